import json
import os
from pathlib import Path

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.audit.result_file import check_out, read_audit, write_audit
from vllm_teach.validation.audit.run import Audit, audit_tables
from vllm_teach.validation.audit.verdict import CONFIRMED, CONTRADICTED, UNDECIDED


def test_the_ending_decides_the_form(small_audit: Audit, tmp_path: Path) -> None:
    write_audit(tmp_path / "audit.json", small_audit)
    write_audit(tmp_path / "audit.md", small_audit)
    assert len(json.loads((tmp_path / "audit.json").read_text())["rows"]) == 3
    assert (tmp_path / "audit.md").read_text().startswith("# The reference tables, audited\n")
    assert sorted(os.listdir(tmp_path)) == ["audit.json", "audit.md"]  # nothing half written is left


def test_another_ending_and_a_folder_that_is_not_there_are_refused(small_audit: Audit, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"ends in none of .json, .md"):
        write_audit(tmp_path / "audit.txt", small_audit)
    with pytest.raises(InvalidArgumentError, match="lies in none"):
        write_audit(tmp_path / "missing" / "audit.json", small_audit)


def test_an_older_file_stays_where_the_new_one_cannot_be_written(
    small_audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "audit.json"
    target.write_text("old")

    def full(source: object, destination: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidArgumentError, match="no space left"):
        write_audit(target, small_audit)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["audit.json"]


def test_a_file_is_judged_anew_by_the_rules_of_today(small_audit: Audit, tmp_path: Path) -> None:
    """The file's findings are made up, and the register's own checks know none of them."""
    path = tmp_path / "audit.json"
    write_audit(path, small_audit)
    found = read_audit(path)
    assert [row.findings for row in found.rows] == [row.findings for row in small_audit.rows]
    assert (found.device, found.quick, found.provenance) == (
        small_audit.device,
        small_audit.quick,
        small_audit.provenance,
    )
    assert {row.verdict.verdict for row in found.rows} == {UNDECIDED}


def test_what_a_real_run_found_comes_back_with_its_verdict(tmp_path: Path) -> None:
    audit = audit_tables(Lab(quick=True), ["B-motivation", "B-paged-memory"])
    write_audit(tmp_path / "audit.json", audit)
    assert read_audit(tmp_path / "audit.json").to_json() == audit.to_json() | {"seconds": round(audit.seconds, 1)}


def test_a_changed_finding_in_the_file_changes_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    audit = audit_tables(Lab(quick=True), ["B-paged-memory"])
    assert audit.rows[0].verdict.verdict == CONFIRMED
    content = audit.to_json()
    for finding in content["rows"][0]["findings"]:  # type: ignore[index]
        finding.update(value=0.9, low=0.9, high=0.9)
    path.write_text(json.dumps(content))
    assert read_audit(path).rows[0].verdict.verdict == CONTRADICTED


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting"),
        ("{}", "'what'"),
        ('{"what": "x", "schema": 1}', "what is 'x'"),
        ("[]", "list indices"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_what_is_no_audit_is_refused(content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match=f"holds no audit .*{why}"):
        read_audit(tmp_path / "audit.json")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 2}, "schema 2"),
        ({"seconds": "long"}, "seconds is 'long'"),
        ({"provenance": []}, r"provenance is \[\]"),
        ({"rows": {"one": 1}}, "rows is"),
        ({"rows": ["one"]}, ""),
        ({"rows": [{"table": "A-overall", "key": "speed"}]}, "has no experiment"),
    ],
)
def test_a_damaged_audit_is_refused_as_one(
    change: dict[str, object], why: str, small_audit: Audit, tmp_path: Path
) -> None:
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(small_audit.to_json() | change))
    with pytest.raises(InvalidArgumentError, match=f"holds no audit .*{why}"):
        read_audit(path)


def test_a_row_that_stands_there_twice_is_refused(small_audit: Audit, tmp_path: Path) -> None:
    content = small_audit.to_json()
    content["rows"] *= 2  # type: ignore[operator]
    (tmp_path / "audit.json").write_text(json.dumps(content))
    with pytest.raises(InvalidArgumentError, match="twice"):
        read_audit(tmp_path / "audit.json")


def test_an_audit_without_shared_seconds_is_read_as_well(small_audit: Audit, tmp_path: Path) -> None:
    content = small_audit.to_json()
    del content["shared"]
    (tmp_path / "audit.json").write_text(json.dumps(content))
    assert read_audit(tmp_path / "audit.json").shared == {}


@pytest.mark.parametrize("name", ["a" * 300 + ".json", "a" * 252 + ".md"])
def test_a_name_that_no_file_can_have_is_refused_before_minutes_are_spent(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        check_out(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_the_check_leaves_nothing_and_an_older_file_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text("old")
    check_out(tmp_path / "audit.json")
    assert os.listdir(tmp_path) == ["audit.json"]
    assert (tmp_path / "audit.json").read_text() == "old"
