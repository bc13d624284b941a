"""The committed audit, which lesson 13 reads: complete, of this version's rules, and of nobody's home folder."""

import json

from vllm_teach import data
from vllm_teach.teaching.canonical import absolute_paths
from vllm_teach.validation.audit.finding import COUNTED
from vllm_teach.validation.audit.result_file import read_audit
from vllm_teach.validation.audit.verdict import UNDECIDED
from vllm_teach.validation.tables import load_tables

FILE = "results/audit_quick.json"


def test_it_has_every_row_in_the_tables_order_and_none_broke_off() -> None:
    audit = read_audit(data.path(FILE))
    rows = [(table.id, key) for table in load_tables().values() for key in table.keys]
    assert [(row.experiment.table_id, row.experiment.key) for row in audit.rows] == rows
    assert [row.stopped for row in audit.rows] == [None] * len(rows)


def test_its_verdicts_are_those_of_todays_rules_and_its_claims_those_published() -> None:
    stored = json.loads(data.path(FILE).read_text(encoding="utf-8"))
    anew = json.loads(json.dumps(read_audit(data.path(FILE)).to_json()))
    for name in ("claim", "verdict", "parts"):
        assert [row[name] for row in stored["rows"]] == [row[name] for row in anew["rows"]]


def test_it_says_where_it_comes_from_without_a_path_of_that_machine() -> None:
    stored = json.loads(data.path(FILE).read_text(encoding="utf-8"))
    provenance = stored["provenance"]
    assert provenance["command"].startswith("vllm-teach validate --quick")
    assert provenance["commit"]
    assert not absolute_paths(json.dumps(provenance))
    assert stored["quick"] is True


def test_at_most_five_rows_are_undecided_and_each_names_what_is_missing() -> None:
    undecided = [row for row in read_audit(data.path(FILE)).rows if row.verdict.verdict == UNDECIDED]
    assert len(undecided) <= 5
    assert all(row.verdict.missing for row in undecided)


def test_no_seconds_and_no_rate_are_called_a_count() -> None:
    for row in read_audit(data.path(FILE)).rows:
        for finding in row.findings:
            assert finding.how != COUNTED or finding.unit not in ("s", "ms", "tokens/s"), finding
