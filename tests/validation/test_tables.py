import hashlib
from pathlib import Path

import pytest
import yaml

from vllm_teach import data
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.tables import FILE, ROW_KEYS, get_table, load_tables

# The transcription is never edited: a number that does not fit is a finding, not a typing error.
SHA256 = "3ba5c4a8a926d30cf6364fd54f6b7fffe6920450890285b36d696c22a4f315ba"


def test_the_file_is_the_transcription_byte_for_byte() -> None:
    assert hashlib.sha256(data.path(FILE).read_bytes()).hexdigest() == SHA256


def test_every_row_of_the_file_is_loaded() -> None:
    raw = yaml.safe_load(data.path(FILE).read_text(encoding="utf-8"))["tables"]
    tables = load_tables()
    assert [entry["id"] for entry in raw] == list(tables)
    assert sum(len(table.rows) for table in tables.values()) == sum(
        len(entry["rows"]) + len(entry.get("scenarios", [])) for entry in raw
    )
    assert {row.kind for table in tables.values() for row in table.rows} == set(ROW_KEYS)


def test_known_rows() -> None:
    table = get_table("B-bottleneck")
    assert table.keys[:3] == (
        "attention_time_share",
        "attention_time_share@2048",
        "attention_intermediates_memory_share@2048",
    )
    row = table.row("attention_time_share@2048")
    assert (row.kind, row.name, dict(row.values)) == (
        "metric",
        "attention_time_share",
        {"seq_len": 2048, "value": 0.68},
    )
    scenario = get_table("B-xformers").row("text_generation")
    assert (scenario.kind, scenario.name) == ("scenario", "text generation")
    assert get_table("B-flash-attention").tiles == {"a100": [128, 128], "h100": [256, 256]}
    assert get_table("A-attention-2048").workload == {"input_len": 2048}
    assert "\n" not in get_table("B-flash-attention").caveat


def test_keys_are_short_unique_and_do_not_depend_on_the_order(tmp_path: Path) -> None:
    raw = yaml.safe_load(data.path(FILE).read_text(encoding="utf-8"))
    for entry in raw["tables"]:
        entry["rows"].reverse()
    path = tmp_path / "reversed.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    for table_id, table in load_tables(path).items():
        keys = get_table(table_id).keys
        assert set(table.keys) == set(keys)
        assert len(set(keys)) == len(keys)
        assert max(map(len, keys)) <= 60


def test_claims_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        get_table("B-bottleneck").row("max_batch@2048").values["at_most"] = 5  # type: ignore[index]
    with pytest.raises(TypeError):
        load_tables()["new"] = get_table("B-bottleneck")  # type: ignore[index]


def test_an_unknown_table_or_row_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'B-bottle' is no reference table.*B-bottleneck"):
        get_table("B-bottle")
    with pytest.raises(InvalidArgumentError, match=r"'speed' is not in table 'B-flash-attention'.*speedup@4096"):
        get_table("B-flash-attention").row("speed")


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"rows": [{"metric": "time_ms", "valu": 3}]}, "unknown key 'valu'"),
        ({"rows": [{"claim": "it is fast", "value": 3}]}, "unknown key 'value'"),
        ({"rows": [{"metric": "time_ms", "value": "3"}]}, "value='3': it needs a number"),
        ({"rows": [{"metric": "time_ms", "value": True}]}, "value=True: it needs a number"),
        ({"rows": [{"metric": 3}]}, "metric=3: it needs a text"),
        ({"rows": [{"value": 3}]}, "exactly one of"),
        ({"rows": [{"metric": "a", "claim": "b"}]}, "exactly one of"),
        ({"rows": [{"method": "awq", "accuracy_loss_percent": 3}]}, "it needs a mapping of bounds"),
        ({"rows": [{"method": "awq", "accuracy_loss_percent": {"under": 3}}]}, "unknown key 'under'"),
        ({"rows": [{"metric": "a"}, {"metric": "a"}]}, "'a' twice"),
        ({"rows": [], "scenarios": [{"use": "chat", "mask": "x"}]}, "unknown key 'mask'"),
        ({"rows": [], "verdict": "confirmed"}, "unknown key 'verdict'"),
        ({}, "has no 'rows'"),
    ],
)
def test_the_schema_refuses(tmp_path: Path, table: dict, named: str) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text(yaml.safe_dump({"tables": [{"id": "T", "article": "A", **table}]}), encoding="utf-8")
    with pytest.raises(InvalidArgumentError) as caught:
        load_tables(path)
    assert named in str(caught.value)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="no file of reference tables"):
        load_tables(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{{{", "is no YAML"),
        ("a: \x00", "is no YAML"),
        ("[" * 5000, "is no YAML"),
        ("tables: [3]", "an entry of 'tables' is 3"),
        ("tables: [{id: x, article: a, rows: 5}]", "'rows' of table 'x' is 5"),
        ("tables: [{id: x, article: a, rows: [5]}]", "a row of table 'x' is 5"),
        ("tables: [{id: x, article: a, rows: [], scenarios: [5]}]", "a scenario is 5"),
        ("tables: [{id: [1], article: a, rows: []}]", r"'id' of table \[1\]"),
        ("tables: [{id: x, article: a, rows: [], workload: 5}]", "'workload' of table 'x' is 5"),
        ("tables: [{id: x, article: a, rows: [], caveat: 5}]", "'caveat' of table 'x' is 5"),
        ("tables: [{id: x, article: a, rows: [], 1: 2, z: 3}]", "unknown key 1"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=named):
        load_tables(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            load_tables(path)
