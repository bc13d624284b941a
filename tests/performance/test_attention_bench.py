"""The table of `vllm-teach bench attention`: who is in it, what its ratios mean, and why who is not."""

import json
import re
import shlex
from collections.abc import Callable
from functools import cache

import pytest
import torch

from vllm_teach import backends, cli
from vllm_teach.attention.patterns import LocalWindow
from vllm_teach.backends.hardware import Hardware, detect_hardware
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.performance import attention_bench
from vllm_teach.performance.attention_bench import Bench, LeftOut, MemoryRow, Row, bench_attention, format_bench

CASES = [
    "causal fp32, n = 128",
    "causal bf16, n = 128",
    "25% block-sparse / dense, n = 128",
    "local 16 / causal, n = 256",
    "forward + backward, causal fp32, n = 64",
    "peak memory, forward, n = 128",
    "peak memory, forward + backward, n = 128",
]
PLAIN = {"naive", "tiled", "memory_efficient", "sdpa"}


def this_machine_without(**reasons: str) -> Callable[[], Hardware]:
    """Return `detect_hardware` for this machine, on which some backends cannot run; flex would compile for seconds."""
    real = detect_hardware()
    reasons = {"flex": "It takes too long for a test."} | reasons
    return cache(lambda: Hardware(real.cuda_capability, real.cpu_isa, tuple((dict(real.unusable) | reasons).items())))


@pytest.fixture(autouse=True)
def _no_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bench, "detect_hardware", this_machine_without())


@pytest.fixture(scope="module")
def bench() -> Bench:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_bench, "detect_hardware", this_machine_without())
        return bench_attention(rounds=2, scale=32, progress=False)


def test_every_backend_is_in_every_case_with_figures_or_a_reason(bench: Bench) -> None:
    for case in CASES:
        timed = [row.backend for row in (*bench.rows, *bench.memory) if row.case == case]
        missing = [one.backend for one in bench.left_out if one.case == case]
        assert sorted(timed + missing) == sorted(backends.names()), case
        assert set(timed) >= PLAIN, case
    assert all(one.reason.endswith(".") for one in bench.left_out)


def test_ratios_are_to_the_baseline_of_the_same_round(bench: Bench) -> None:
    for row in bench.rows:
        assert 0 < row.ratio_low <= row.ratio <= row.ratio_high
        assert 0 < row.seconds < 10
        assert row.baseline == ("itself" if " / " in row.case else "sdpa")
        if row.backend == "sdpa" and row.baseline == "sdpa":
            assert (row.ratio_low, row.ratio, row.ratio_high) == (1, 1, 1)


def test_memory_is_counted_and_compared_with_naives(bench: Bench) -> None:
    peaks = {(row.case, row.backend): row.peak_bytes for row in bench.memory}
    for row in bench.memory:
        assert row.naive_over_this == pytest.approx(peaks[row.case, "naive"] / row.peak_bytes)
    scores = 8 * 128 * 128 * 4
    assert peaks[CASES[5], "naive"] >= scores > peaks[CASES[5], "sdpa"]
    assert peaks[CASES[6], "tiled"] > peaks[CASES[5], "tiled"]


def test_it_is_json_with_all_that_is_in_the_text(bench: Bench) -> None:
    data = json.loads(json.dumps(bench.to_json()))
    assert (data["rounds"], data["device"]) == (2, "cpu")
    assert [Row(**row) for row in data["rows"]] == bench.rows
    assert [MemoryRow(**row) for row in data["memory"]] == bench.memory
    assert [LeftOut(**one) for one in data["left_out"]] == bench.left_out


def test_the_text_has_a_line_for_each_row_and_each_reason(bench: Bench) -> None:
    text = format_bench(bench)
    lines = text.splitlines()
    assert [line for line in lines if line in CASES] == CASES
    assert sum(bool(re.search(r"\d x (sdpa|itself) +\(.* ms$", line)) for line in lines) == len(bench.rows)
    assert sum("naive / this = " in line for line in lines) == len(bench.memory)
    below = " ".join(text.partition("not in the table")[2].split())
    for one in bench.left_out:
        assert f"{one.backend} {one.reason}" in below
    assert "flash_attn flash-attn runs on cuda, not on cpu. (all cases)" in below
    assert max(map(len, lines)) <= 132


def small_bench() -> attention_bench._Bench:
    return attention_bench._Bench("cpu", rounds=1, tell=lambda text: None)


def failing(error: Exception) -> Callable[..., torch.Tensor]:
    def run(*args: object, **kwargs: object) -> torch.Tensor:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MissingDependencyError("It does not build."), "It failed: It does not build."),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "It failed: CUDA out of memory. Tried."),
        (MemoryError(), "It failed: MemoryError."),
    ],
)
def test_a_backend_that_fails_at_its_first_call_is_listed(monkeypatch, error: Exception, reason: str) -> None:
    monkeypatch.setattr(backends.get("tiled"), "run", failing(error))
    found = small_bench()
    found.against_sdpa("a", 16, torch.float32)
    found.against_itself("b", 16, None, LocalWindow(3, 0))
    found.forward_and_backward("c", 16)
    found.peak_memory("d", 16, grad=False)
    mine = [(one.case, one.reason) for one in found.left_out if one.backend == "tiled"]
    assert mine == [(case, reason) for case in "abcd"]
    others = {(row.case, row.backend) for row in (*found.rows, *found.memory)}
    assert {(case, name) for case in "abcd" for name in PLAIN - {"tiled"}} <= others
    assert not {(case, "tiled") for case in "abcd"} & others


@pytest.mark.parametrize("error", [KeyError("bug"), RuntimeError("a bug: shapes do not fit")])
def test_a_bug_in_a_backend_is_no_row_of_the_table(monkeypatch, error: Exception) -> None:
    monkeypatch.setattr(backends.get("tiled"), "run", failing(error))
    with pytest.raises(type(error), match="bug"):
        small_bench().against_sdpa("a", 16, torch.float32)
    with pytest.raises(type(error), match="bug"):
        small_bench().peak_memory("d", 16, grad=False)


def test_without_the_baseline_there_is_no_ratio_and_it_is_said(monkeypatch) -> None:
    monkeypatch.setattr(attention_bench, "detect_hardware", this_machine_without(sdpa="Broken.", naive="Too slow."))
    found = small_bench()
    found.against_sdpa("a", 16, torch.float32)
    found.peak_memory("b", 16, grad=False)
    assert found.rows == []
    assert LeftOut("a", "tiled", "There is no sdpa to compare it with.") in found.left_out
    assert {row.naive_over_this for row in found.memory} == {None}
    text = format_bench(Bench(found.rows, found.memory, found.left_out, 1, "cpu", {}))
    assert "naive / this = unknown" in text
    assert "  sdpa              Broken. (a; b)" in text


def test_naive_is_not_asked_for_gigabytes(monkeypatch) -> None:
    monkeypatch.setattr(attention_bench, "_LONGEST_NAIVE", 16)
    found = small_bench()
    for n in (16, 32):
        found.against_itself(f"{n}", n, None, LocalWindow(3, 0))
    assert [row.case for row in found.rows if row.backend == "naive"] == ["16"]
    assert LeftOut("32", "naive", "Its scores alone would take 0.0 GB.") in found.left_out


def test_the_bar_names_what_is_waited_for(capsys, monkeypatch) -> None:
    monkeypatch.setenv("TQDM_MININTERVAL", "0")
    bench_attention(rounds=1, scale=256)
    shown = capsys.readouterr().err
    assert "bench attention: 100%" in shown
    for name in PLAIN:
        assert f"causal fp32, n = 16: {name} starts" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"rounds": 1.5}, "rounds=1.5"),
        ({"device": "tpu"}, "device='tpu' has no clock here"),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, "is not there"),
        ({"scale": 0}, "scale is 0"),
        ({"scale": 257}, "scale is 257; give a whole number from 1 to 256"),
    ],
)
def test_arguments_that_measure_nothing(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        bench_attention(progress=False, **arguments)


def test_the_command_prints_the_table_and_writes_the_file(bench: Bench, monkeypatch, tmp_path, capsys) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr(attention_bench, "bench_attention", lambda **arguments: asked.update(arguments) or bench)
    file = tmp_path / "bench.json"
    command = ["bench", "attention", "--rounds", "3", "--quick", "--quiet", "--json", str(file)]
    assert cli.main(command) == 0
    assert asked == {"rounds": 3, "device": "cpu", "scale": 8, "progress": False}
    assert capsys.readouterr().out == format_bench(bench) + "\n"
    found = json.loads(file.read_text())
    assert found.pop("command") == shlex.join(["vllm-teach", *command])
    assert found.items() >= json.loads(json.dumps(bench.to_json())).items()


@pytest.mark.parametrize("place", ["no-folder/x.json", "."])
def test_a_file_that_cannot_be_is_refused_before_anything_is_timed(place, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(attention_bench, "bench_attention", lambda **_: pytest.fail("timed"))
    assert cli.main(["bench", "attention", "--json", str(tmp_path / place)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-teach: --json ")
    assert line.endswith(": give a file.")


def test_a_disk_that_is_full_at_the_end_does_not_cost_the_table(bench: Bench, monkeypatch, tmp_path, capsys) -> None:
    def full(*args: object, **kwargs: object) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(attention_bench, "bench_attention", lambda **_: bench)
    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert cli.main(["bench", "attention", "--json", str(tmp_path / "x.json")]) == 1
    printed = capsys.readouterr()
    assert printed.out == format_bench(bench) + "\n"
    assert "No space left on device" in printed.err


@pytest.mark.parametrize("rounds", ["0", "-1", "1.5", "x"])
def test_rounds_that_are_none_are_refused_by_the_command(rounds: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "attention", "--rounds", rounds])
    assert ended.value.code == 2
    assert "is not valid: give a whole number" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_one_line(capsys) -> None:
    assert cli.main(["bench", "attention", "--device", "cuda:99"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-teach: device='cuda:99' is not there")
