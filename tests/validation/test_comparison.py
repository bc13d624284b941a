import math
import subprocess
import sys

import pytest
import torch

from vllm_teach import validation
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import machine
from vllm_teach.validation.comparison import NOT_MEASURED, Measured, claim, claims, compare
from vllm_teach.validation.tables import get_table, load_tables


def cells(text: str) -> dict[str, tuple[str, str]]:
    """Join the wrapped lines of a printed comparison again: claim -> (measured, note)."""
    body = text.split("-+-")[-1].splitlines()[1:]
    rows: list[list[str]] = []
    for line in body:
        if not line.strip():
            break
        parts = [part.strip() for part in (line + " | | ").split("|")][:3]
        # The middle cells here fit on one line, so a line without one continues the row above.
        if parts[1]:
            rows.append(parts)
        else:
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], parts, strict=True)]
    return {row[0]: (row[1], row[2]) for row in rows}


def test_claim_measured_and_note_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    compare(
        "B-flash-attention",
        {"time_ms": Measured(41.26, "ms", note="one layer"), "speedup@4096": Measured(2, how="computed")},
        device="a test bench",
    )
    printed = capsys.readouterr().out
    assert "measured on: a test bench\n" in printed
    assert "claimed on: A100\n" in printed
    found = cells(printed)
    assert found["time: baseline 185 ms, optimised 62 ms, ratio 3.0"] == ("41.3 ms", "one layer")
    assert found["memory: baseline 3200 MB, optimised 1100 MB, ratio 2.9"] == (NOT_MEASURED, "")
    assert found["speedup at 4,096 tokens: 5 to 8"] == ("2 (computed)", "")
    assert len(found) == 4
    assert "185 ms x 580 GB/s" in printed


def test_columns_stand_below_each_other() -> None:
    for table_id in load_tables():
        lines = str(compare(table_id, {}, device="x")).splitlines()
        rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
        bars = [i for i, sign in enumerate(lines[rule]) if sign == "+"]
        assert len(bars) == 2
        end = lines.index("", rule) if "" in lines[rule:] else len(lines)
        rows = [lines[rule - 1], *lines[rule + 1 : end]]
        for line in rows:
            # Spaces at a line's end are cut, so a line with an empty last cell ends before its bar or with it.
            assert all(line[i] == "|" for i in bars if i < len(line)), line
        assert max(map(len, lines)) <= 104


def test_a_comparison_is_data_too(capsys: pytest.CaptureFixture[str]) -> None:
    number = Measured(0.41)
    result = compare("B-bottleneck", {"attention_time_share@2048": number}, device="a bench")
    assert {row.key: found for row, found in result.rows}["attention_time_share@2048"] is number
    assert sum(found is None for _, found in result.rows) == 5
    assert repr(result) == "<Comparison B-bottleneck: 1 of 6 rows measured on a bench>"
    assert capsys.readouterr().out == f"{result}\n"


def test_the_cpu_is_named_by_default_also_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Imagined GPU")
    monkeypatch.setattr(machine, "cpu_name", lambda: "Imagined CPU")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert "measured on: Imagined CPU, 3 threads\n" in str(compare("A-overall", {}))
    assert "measured on: Imagined GPU\n" in str(compare("A-overall", {}, device="cuda"))
    assert "measured on: Imagined GPU\n" not in str(compare("A-overall", {}, device="a pencil"))


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match=r"'cuda'.*use 'cpu'"):
        compare("A-overall", {}, device="cuda")


def test_a_bare_number_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"measured\['time_ms'\]=3.0 is no Measured: write Measured\(3.0\)"):
        compare("B-flash-attention", {"time_ms": 3.0}, device="x")  # type: ignore[dict-item]


def test_a_number_takes_the_unit_of_its_row() -> None:
    printed = cells(str(compare("B-flash-attention", {"time_ms": Measured(41.0), "memory_mb": Measured(2, "MB")}, "x")))
    assert printed["time: baseline 185 ms, optimised 62 ms, ratio 3.0"] == ("41 ms", "")
    assert printed["memory: baseline 3200 MB, optimised 1100 MB, ratio 2.9"] == ("2 MB", "")


@pytest.mark.parametrize(
    ("key", "unit", "named"),
    [("time_ms", "s", "use 'ms'"), ("memory_mb", "MiB", "use 'MB'"), ("speedup@4096", "ms", "use none")],
)
def test_another_unit_than_the_rows_is_refused(key: str, unit: str, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"unit='{unit}' is not that of the row '{key}'.*{named}"):
        compare("B-flash-attention", {key: Measured(1.0, unit)}, device="x")


def test_a_row_that_is_no_metric_takes_any_unit() -> None:
    mode = Measured({"time": 3.0}, "s")
    assert [found for _, found in compare("B-xformers", {"original": mode}, "x").rows if found] == [mode]


def test_an_unknown_row_lists_the_rows() -> None:
    with pytest.raises(InvalidArgumentError, match=r"row 'time'.*time_ms, memory_mb"):
        compare("B-flash-attention", {"time": Measured(1)}, device="x")


def test_an_unknown_table_lists_the_tables() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'B-flash'.*B-flash-attention"):
        compare("B-flash", {}, device="x")
    with pytest.raises(InvalidArgumentError, match=r"'B-flash'.*B-flash-attention"):
        claims("B-flash")


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (Measured(0.41234), "0.412"),
        (Measured(1234.5, "MB"), "1,234 MB"),
        (Measured(7, "GB"), "7 GB"),
        (Measured("yes", how="counted here"), "yes (counted)"),
        (Measured({"baseline": 10.0, "optimised": 4.0}, "ms"), "baseline 10 ms, optimised 4 ms"),
    ],
)
def test_numbers_are_printed_with_three_digits_and_their_origin(measured: Measured, text: str) -> None:
    assert measured.text == text


@pytest.mark.parametrize(
    "value", [math.nan, -math.inf, True, None, {"baseline": 1.0, "optimised": math.nan}, {"baseline": "3"}], ids=repr
)
def test_what_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is no finite number.*leave the row out"):
        Measured(value)  # type: ignore[arg-type]


def test_an_unknown_origin_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"how='guessed'.*computed"):
        Measured(1, how="guessed")


@pytest.mark.parametrize(
    ("table_id", "key", "text"),
    [
        ("B-bottleneck", "attention_time_share", "attention time share: > 0.6"),
        ("B-bottleneck", "max_batch@2048", "max batch at 2,048 tokens: <= 4"),
        ("A-llama2-70b-serving", "gpu_memory_gb", "gpu memory: baseline 135 GB, optimised 68 GB, reduction 0.5"),
        ("A-overall", "memory_reduction", "memory reduction: >= 0.5"),
        ("A-quantization", "awq", "awq: accuracy loss 2 to 3 %, speedup 2.8, use high throughput"),
        ("B-xformers", "original", "original: time 185 ms, memory 3200 MB, accuracy change none"),
        ("B-xformers", "text_generation", "text generation (attention: memory-efficient + local window 512)"),
        ("B-customer-service", "full_vllm", "full vLLM: qps 68, p99 150 ms, gpu memory 8 GB"),
        ("A-layernorm-kernel", "dynamic_input_shapes", "dynamic input shapes"),
    ],
)
def test_a_claim_as_text(table_id: str, key: str, text: str) -> None:
    assert claim(get_table(table_id).row(key)) == text


def test_claims_hold_every_published_number() -> None:
    for table in load_tables().values():
        text = " ".join(claims(table.id).replace(",", "").split())
        for row in table.rows:
            for value in row.values.values():
                for number in value.values() if isinstance(value, dict) else [value]:
                    assert str(number).replace(",", "") in text, (table.id, row.key)


def test_the_tiles_of_a_table_are_shown() -> None:
    line = "tiles: A100 128 x 128, H100 256 x 256"
    assert line in claims("B-flash-attention").splitlines()
    assert line in str(compare("B-flash-attention", {}, device="x")).splitlines()
    assert [table_id for table_id in load_tables() if "tiles: " in claims(table_id)] == ["B-flash-attention"]


def test_the_caveat_can_be_left_out() -> None:
    short, full = claims("B-flash-attention", caveat=False), claims("B-flash-attention")
    assert full.startswith(f"{short}\n\ncaveat: Batch size, layer count")
    assert "caveat" not in short


def test_the_package_exports_the_function() -> None:
    # A submodule called `compare` would hide the function behind itself after the first import.
    assert validation.compare is compare
    code = "import sys, vllm_teach.validation as v; v.claims('A-overall'); print(callable(v.compare))"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\nFalse\n"


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000, {"a": 10**400}], ids=range(4))
def test_a_number_beyond_every_float_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="is no finite number"):
        Measured(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("table_id", [[], {}, None, 5])
def test_a_table_that_is_not_named_by_a_text_is_refused(table_id: object) -> None:
    with pytest.raises(InvalidArgumentError, match="is no reference table"):
        claims(table_id)  # type: ignore[arg-type]


@pytest.mark.parametrize("measured", [None, [1], "x"])
def test_numbers_that_are_no_mapping_are_refused(measured: object) -> None:
    with pytest.raises(InvalidArgumentError, match="is no mapping"):
        compare(next(iter(load_tables())), measured)  # type: ignore[arg-type]
