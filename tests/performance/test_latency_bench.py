"""`vllm-teach bench latency`: whose times they are, what they add up to, and what cannot be measured."""

import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest

from vllm_teach import LLM, SamplingParams, cli
from vllm_teach.engine.outputs import RequestMetrics
from vllm_teach.errors import EngineError, InvalidArgumentError
from vllm_teach.performance import latency_bench
from vllm_teach.performance.latency_bench import Batch, LatencyBench, bench_latency, format_latency, serve_once
from vllm_teach.performance.workload import Workload

SMALL = Batch(3, 5, 4)


@pytest.fixture(scope="module")
def bench() -> LatencyBench:
    return bench_latency("tiny", batch=SMALL, rounds=5, dtype="float32", progress=False)


def test_the_times_are_of_each_request_and_each_token(clock) -> None:
    """Requests whose tokens come at known times; the clock's first look, the start, is at 1 second, its next at 2."""
    times = {"a": [1.25, 1.5, 2.0], "b": [1.75, 2.0, 3.0]}
    tokens = [SimpleNamespace(token_ids=[5, 6, 7])]
    outputs = [SimpleNamespace(outputs=tokens, metrics=SimpleNamespace(token_times=each)) for each in times.values()]
    engine = SimpleNamespace(kv=SimpleNamespace(block_size=4, num_blocks=2))
    llm = SimpleNamespace(engine=engine, generate=lambda *_, **__: outputs)
    found = serve_once(llm, Workload(((1,), (2,)), (3, 3)))
    assert found == {
        "ttft": [0.25, 0.75],
        "tpot": [0.375, 0.625],
        "itl": [0.25, 0.5, 0.25, 1.0],
        "latency": [1.0],
    }


def test_a_round_is_first_token_and_the_rest(bench: LatencyBench) -> None:
    assert bench.rounds == 5
    for timing in bench.figures.values():
        assert len(timing.samples) == 5
        assert timing.median == statistics.median(timing.samples)
    first, rest, whole = (bench.figures[name].samples for name in ("ttft", "tpot", "latency"))
    for ttft, tpot, latency in zip(first, rest, whole, strict=True):
        assert 0 < ttft + tpot * (SMALL.output_len - 1) <= latency
    assert bench.tokens_per_second == pytest.approx(12 / statistics.median(whole))


def test_percentiles_are_nearest_ranks_over_all_rounds(monkeypatch) -> None:
    rounds = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]
    found = iter(
        [{"ttft": [99.0], "tpot": [], "itl": [], "latency": [99.0]}] * 2
        + [{"ttft": each, "tpot": [], "itl": [], "latency": [sum(each)]} for each in rounds]
    )
    monkeypatch.setattr(latency_bench, "serve_once", lambda llm, workload: next(found))
    bench = bench_latency("tiny", batch=SMALL, rounds=5, warmup=2, dtype="float32", progress=False)
    assert bench.percentiles["ttft"] == {"p10": 1.0, "p25": 3.0, "p50": 5.0, "p75": 8.0, "p90": 9.0, "p99": 10.0}
    assert bench.figures["ttft"].samples == (1.5, 3.5, 5.5, 7.5, 9.5)
    assert set(bench.figures) == {"ttft", "latency"}  # one token each: there is no time between two
    assert "time per output token" not in format_latency(bench)


def test_prompts_are_of_the_length_asked_for_and_no_prefix_is_reused(monkeypatch) -> None:
    seen = []
    real = latency_bench.serve_once

    def listening(llm: LLM, workload: Workload) -> dict[str, list[float]]:
        seen.append((workload, llm.engine.config.enable_prefix_caching))
        return real(llm, workload)

    monkeypatch.setattr(latency_bench, "serve_once", listening)
    bench_latency("tiny", batch=SMALL, rounds=1, warmup=1, dtype="float32", progress=False)
    assert len(seen) == 2
    workload, caching = seen[0]
    assert [len(prompt) for prompt in workload.prompts] == [5, 5, 5]
    assert workload.output_lens == (4, 4, 4)
    assert caching is False


def test_it_is_json_and_text(bench: LatencyBench) -> None:
    data = json.loads(json.dumps(bench.to_json()))
    assert data["figures"]["ttft"]["median"] == bench.figures["ttft"].median
    assert data["batch"] == {"size": 3, "input_len": 5, "output_len": 4, "seed": 0}
    assert data["environment"]["packages"]["torch"]
    text = format_latency(bench)
    assert text.startswith("tiny, float32, cpu, ")
    assert f"{bench.figures['itl'].median * 1e3:,.2f}" in text
    assert all(what in text for what in latency_bench.FIGURES.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rounds": 0}, "rounds=0 measures nothing"),
        ({"warmup": -1}, "warmup=-1 is no number of rounds"),
        ({"batch": Batch(1, 500, 13)}, "batch has 513 tokens a request, but the model's context is 512"),
    ],
)
def test_what_cannot_be_measured(arguments: dict, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        bench_latency("tiny", dtype="float32", progress=False, **arguments)


@pytest.mark.parametrize(("input_len", "output_len"), [(8, 20), (20, 1)])
def test_a_batch_that_does_not_run_at_once_is_an_error(input_len: int, output_len: int) -> None:
    """Whether it would be preempted, or wait in the queue, which no counter tells."""
    llm = LLM("tiny", dtype="float32", device="cpu", enable_prefix_caching=False, block_size=4, num_kv_blocks=12)
    with pytest.raises(
        InvalidArgumentError, match=r"batch needs \d\d blocks of 4 tokens in the KV cache, which has 12"
    ):
        serve_once(llm, Workload(((5,) * input_len,) * 3, (output_len,) * 3))


def test_a_request_of_another_length_is_an_error() -> None:
    llm = LLM("tiny", dtype="float32", device="cpu", num_kv_blocks=12)
    short = llm.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)
    llm.generate = lambda *_, **__: short  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="ended requests before their last token"):
        serve_once(llm, Workload(((5, 6),), (2,)))


@pytest.mark.parametrize("metrics", [None, RequestMetrics(0.0, token_times=[1.0])])
def test_tokens_without_a_time_are_not_taken_for_missing_ones(metrics: RequestMetrics | None) -> None:
    llm = LLM("tiny", dtype="float32", device="cpu", num_kv_blocks=12)
    [output] = llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    llm.generate = lambda *_, **__: [replace(output, metrics=metrics)]  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="kept no time of some tokens"):
        serve_once(llm, Workload(((5, 6),), (2,)))


def test_a_batch_of_more_requests_than_a_step_has_tokens_by_default(monkeypatch) -> None:
    seen: list[LLM] = []
    one = {name: [1.0] for name in latency_bench.FIGURES}
    monkeypatch.setattr(latency_bench, "serve_once", lambda llm, workload: seen.append(llm) or one)
    bench_latency("tiny", batch=Batch(3000, 1, 1), rounds=1, warmup=0, dtype="float32", progress=False)
    assert (seen[0].engine.config.max_num_seqs, seen[0].engine.config.max_num_batched_tokens) == (3000, 3000)


def test_the_command(bench: LatencyBench, monkeypatch, tmp_path, capsys) -> None:
    seen: list[tuple] = []
    monkeypatch.setattr(latency_bench, "bench_latency", lambda *a, **k: seen.append((a, k)) or bench)
    file = tmp_path / "latency.json"
    assert cli.main(["bench", "latency"]) == 0
    flags = "--model tiny --batch-size 2 --input-len 7 --output-len 9 --num-iters-warmup 3 --num-iters 6 --quiet"
    assert cli.main(["bench", "latency", *flags.split(), "--json", str(file)]) == 0
    common = {"dtype": "bfloat16", "device": "cpu"}
    assert seen == [
        (("smollm2",), common | {"batch": Batch(8, 32, 128), "rounds": 5, "warmup": 1, "progress": True}),
        (("tiny",), common | {"batch": Batch(2, 7, 9), "rounds": 6, "warmup": 3, "progress": False}),
    ]
    assert capsys.readouterr().out == 2 * (format_latency(bench) + "\n")
    assert json.loads(file.read_text()).items() >= json.loads(json.dumps(bench.to_json())).items()
