"""`vllm-teach simulate`: its table and files, and what it refuses in one line."""

import json
from pathlib import Path

import pytest

from vllm_teach import cli
from vllm_teach.performance.simulator import draw_traffic, simulate_serving

BASE = ["simulate", "--model", "llama-2-7b", "--hardware", "a100-80gb-sxm"]
SMALL = [*BASE, "--num-prompts", "12", "--input-len", "100", "--output-len", "10"]


def test_it_prints_the_table_and_writes_the_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    files = {name: tmp_path / name for name in ("run.json", "trace.json", "run.png")}
    options = zip(("--json", "--trace-out", "--figure"), map(str, files.values()), strict=True)
    command = [*SMALL, "--request-rate", "5", "--seed", "3", *(word for pair in options for word in pair)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    plain = json.loads(files["run.json"].read_text())
    direct = simulate_serving("llama-2-7b", "a100-80gb-sxm", workload=draw_traffic(12, (100, 10), 5.0, seed=3))
    assert plain["seconds"] == direct.run.seconds
    assert plain["latencies"] == json.loads(json.dumps(direct.latencies))
    assert plain["command"].startswith("vllm-teach simulate --model llama-2-7b")
    assert printed.startswith("MODELLED")
    assert f"{direct.request_throughput:,.3f}" in printed
    trace = json.loads(files["trace.json"].read_text())["traceEvents"]
    assert sum(each["name"].startswith("step ") for each in trace) == direct.run.num_steps
    labels = {each["pid"]: each["args"]["labels"] for each in trace if each["name"] == "process_labels"}
    assert set(labels) == {each["pid"] for each in trace}
    assert all(label.startswith("modelled") for label in labels.values())
    assert files["run.png"].read_bytes().startswith(b"\x89PNG")


def test_settings_reach_the_deployment(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    options = ["--block-size", "32", "--no-enable-prefix-caching", "--max-num-seqs", "7", "--quantization", "int8"]
    assert cli.main([*SMALL, *options, "--tensor-parallel-size", "2", "--json", str(file)]) == 0
    plain = json.loads(file.read_text())["deployment"]
    assert plain["settings"]["block_size"] == 32
    assert plain["settings"]["enable_prefix_caching"] is False
    assert plain["settings"]["max_num_seqs"] == 7
    assert (plain["quantization"], plain["tensor_parallel_size"]) == ("int8", 2)


def test_a_mix_with_a_shared_prefix_in_bursts(capsys: pytest.CaptureFixture) -> None:
    options = ["--mix", "alpaca", "--request-rate", "20", "--burstiness", "0.5"]
    assert cli.main([*BASE, "--num-prompts", "20", *options, "--shared-prefix", "16", "--num-prefixes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "20 requests, lengths of the mix 'alpaca'" in printed
    assert "20 a second (gamma gaps of burstiness 0.5), prompts begin with one of 2 texts of 16 tokens" in printed


def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "azure.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n1.5,200,5\n9,300,5\n")
    assert cli.main([*BASE, "--trace", str(file), "--num-prompts", "2"]) == 0
    assert (
        "2 requests, 150 tokens in and 8 out on average, at the times of azure.csv, over 2 s" in capsys.readouterr().out
    )
    assert cli.main([*BASE, "--trace", str(file), "--request-rate", "2"]) == 0
    assert "2 a second (Poisson)" in capsys.readouterr().out


def test_find_prints_the_rate(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "found.json"
    limits = ["--find", "max-qps", "--ttft-p99-ms", "300", "--e2e-p99-ms", "900", "--resolution", "0.2"]
    assert cli.main([*SMALL, "--num-prompts", "60", *limits, "--input-len", "800", "--json", str(file)]) == 0
    plain = json.loads(file.read_text())
    assert [each["latency"] for each in plain["objectives"]] == ["ttft", "e2e"]
    assert f": {plain['rate']:.4g} requests a second (modelled)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--hardware", "a1000"], "a100-80gb-sxm"),
        (["--hardware", "a1000"], "or 'this' for this machine"),
        (
            ["--num-kv-blocks", "99999999"],
            "num_kv_blocks=99999999 does not fit: weights and steps leave each device room for ",
        ),
        (["--block-size", "999999999"], "a block of 999,999,999 tokens"),
        (["--swap-space", "1e-9"], "swap_space=1e-09 is less than one block of 8,388,608 bytes"),
        (["--request-rate", "1e-12"], "rate=1e-12 is too low"),
        (["--find", "max-qps", "--e2e-p99-ms", "900", "--resolution", "1e-17"], "resolution=1e-17"),
        (["--model", "llama-9"], "llama-2-70b"),
        (["--request-rate", "0"], "rate=0.0"),
        (["--request-rate", "nan"], "rate=nan"),
        (["--burstiness", "2"], "--burstiness belongs to a rate"),
        (["--mix", "alpaca"], "--input-len is what the mix draws"),
        (["--num-prefixes", "2"], "--num-prefixes belongs to a shared prefix"),
        (["--trace", "none.csv"], "--input-len is what the trace says"),
        (["--find", "max-qps"], "--find max-qps has no limit"),
        (["--e2e-p99-ms", "100"], "--e2e-p99-ms belongs to --find"),
        (["--resolution", "0.1"], "--resolution belongs to --find"),
        (["--find", "max-qps", "--e2e-p99-ms", "9", "--request-rate", "1"], "--request-rate is what --find looks for"),
        (["--find", "max-qps", "--e2e-p99-ms", "9", "--figure", "a.png"], "--figure shows one run"),
        (["--find", "max-qps", "--e2e-p99-ms", "9"], "never kept"),
        (["--find", "max-qps", "--e2e-p99-ms", "-9"], "seconds=-0.009"),
        (["--figure", "a.txt"], "name a file .png or .svg or .pdf"),
        (["--figure", "nowhere/a.png"], "--figure is 'nowhere/a.png'"),
        (["--trace-out", "nowhere/a.json"], "--trace-out is 'nowhere/a.json'"),
        (["--json", "nowhere/a.json"], "--json is 'nowhere/a.json'"),
        (["--input-len", "4096"], "max_model_len is 4096"),
        (["--max-num-batched-tokens", "3"], "max_num_batched_tokens=3"),
        (["--hardware", "this", "--dtype", "float16"], "vllm-teach tune --steps"),
    ],
)
def test_what_is_wrong_is_one_line(options: list[str], complaint: str, capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path))
    assert cli.main([*SMALL, *options]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.strip().splitlines()
    assert line.startswith("vllm-teach: ")
    assert complaint in line


def test_bench_simulate(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_teach.performance.simulator import speed

    monkeypatch.setattr(speed, "_TOKENS", 512)
    file = tmp_path / "speed.json"
    command = ["bench", "simulate", "--model", "tiny", "--hardware", "l4", "--tensor-parallel-size", "1"]
    assert cli.main([*command, "--rounds", "1", "--json", str(file)]) == 0
    assert "steps/s" in capsys.readouterr().out
    assert [row["num_seqs"] for row in json.loads(file.read_text())["rows"]] == [1, 64, 256]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--swap-space", "1e9"], "swap_space=1000000000.0 is more than 10,000,000 blocks"),
        (["--num-prompts", "999999999"], "num_requests=999999999 is not valid: use a whole number from 1 to 1,000,000"),
        (["--shared-prefix", "5000"], "--shared-prefix is 5000, but no prompt has more than 1024 tokens"),
    ],
)
def test_what_would_fill_the_memory_or_mean_nothing_is_refused(options, message, capsys):
    command = ["simulate", "--model", "llama-3-8b", "--hardware", "a100-80gb-sxm", "--num-prompts", "5"]
    assert cli.main([*command, *options]) == 1
    assert message in capsys.readouterr().err


def test_two_results_need_two_files(capsys, tmp_path):
    file = str(tmp_path / "a.json")
    command = ["simulate", "--model", "llama-3-8b", "--hardware", "a100-80gb-sxm", "--num-prompts", "5"]
    assert cli.main([*command, "--json", file, "--trace-out", file]) == 1
    assert "name the same file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_trace_shorter_than_what_is_asked_for_is_told(capsys, tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,2\n1,5,2\n", encoding="utf-8")
    command = ["simulate", "--model", "llama-3-8b", "--hardware", "a100-80gb-sxm", "--trace", str(file)]
    assert cli.main([*command, "--num-prompts", "10"]) == 1
    assert "--num-prompts is 10, but" in capsys.readouterr().err
