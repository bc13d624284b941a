from dataclasses import replace

from vllm_teach.validation.audit.report import format_audit, format_list, format_markdown
from vllm_teach.validation.audit.run import Audit


def columns(text: str, heading: str) -> str:
    """All lines of one table's block, joined, without the rules between columns."""
    block = text.split(heading)[1].split("\n\n\n")[0]
    return " ".join(part.strip() for line in block.splitlines() for part in line.split("|"))


def test_claim_findings_and_verdict_stand_side_by_side(small_audit: Audit) -> None:
    lines = format_audit(small_audit).splitlines()
    row = next(line for line in lines if line.startswith("memory reduction: >="))
    claim, here, elsewhere, verdict = (cell.strip() for cell in (row + " ").split(" |"))
    assert claim == "memory reduction: >="
    assert here.startswith("saved: 0.75 of all")
    assert (elsewhere, verdict) == ("", "CONFIRMED")


def test_a_modelled_figure_says_so_and_stands_apart(small_audit: Audit) -> None:
    row = next(line for line in format_audit(small_audit).splitlines() if "ratio: 9 x" in line)
    assert row.split("|")[1].strip() == ""
    assert "[modelled]" in row.split("|")[2]
    assert "PARTLY" in row.split("|")[3]


def test_why_stands_beside_the_verdict(small_audit: Audit) -> None:
    text = " ".join(columns(format_audit(small_audit), "B-flash-attention").split())
    assert "direction only, 9 x" in text
    assert "a factor of 2" in text


def test_the_end_counts_the_verdicts_and_names_the_undecided_and_what_is_missing(small_audit: Audit) -> None:
    last = format_audit(small_audit).splitlines()[-1]
    assert last.startswith("3 rows: 1 confirmed, 1 partly, 1 cannot be decided")
    assert "B-motivation/a_200b_parameter_dialogue_model_15_s_per (missing: the tokens)" in last


def test_no_line_is_wider_than_the_columns(small_audit: Audit) -> None:
    assert max(map(len, format_audit(small_audit).splitlines()[:-1])) <= 131


def test_markdown_has_provenance_settings_and_what_stopped_an_experiment(small_audit: Audit) -> None:
    text = format_markdown(small_audit)
    assert "- command: `vllm-teach validate --quick`" in text
    assert "torch " in text
    assert "300 requests \\| paged" in text  # a bar would end the cell
    assert "model 'x' is not here." in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "verdict" not in line]
    assert len(rows) == 3
    assert all(line.replace("\\|", "").count("|") == 5 for line in rows)


def test_the_list_has_a_heading_for_each_table() -> None:
    text = format_list([("A", "one", "Count one."), ("A", "two", "Count two."), ("B", "three", "Count three.")])
    assert text.splitlines() == [
        "A", "  one", "    Count one.", "  two", "    Count two.", "", "B", "  three", "    Count three.",
    ]  # fmt: skip


def test_where_the_seconds_went_is_told_the_longest_first(small_audit: Audit) -> None:
    seconds = {"A-overall": 2.0, "B-flash-attention": 7.0, "B-motivation": 0.1}
    rows = tuple(replace(row, seconds=seconds[row.experiment.table_id]) for row in small_audit.rows)
    audit = replace(small_audit, rows=rows, shared={"race layer": 5.0}, seconds=15.0)
    told = "time: 15 s, B-flash-attention/time_ms 7.0 s, race layer (shared) 5.0 s, A-overall/memory_reduction 2.0 s"
    assert f"{told}, all else 1.0 s." in format_markdown(audit)
    assert told in format_audit(audit).replace("\n", " ")
