"""`vllm-teach bench throughput`: the requests, the other system's batches, the ratio, what a step is made of."""

import dataclasses
import json
import re
import shlex
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_teach import LLM, SamplingParams, cli
from vllm_teach.engine import model_runner
from vllm_teach.errors import EngineError, InvalidArgumentError, ModelLoadError
from vllm_teach.models.load import load_config
from vllm_teach.models.quantize import quantize_model
from vllm_teach.models.resolve import resolve_model
from vllm_teach.performance import peer_choice, throughput_bench
from vllm_teach.performance.peers import StaticBatches, TransformersPeer, Trial
from vllm_teach.performance.step_profile import KINDS, measure_step_parts, profile_steps
from vllm_teach.performance.throughput_bench import bench_throughput, serve
from vllm_teach.performance.throughput_report import FULL, QUICK, Mix, ThroughputBench, format_throughput
from vllm_teach.performance.workload import Workload, draw_workload
from vllm_teach.quantization.quantization_config import QuantizationConfig

SMALL = Mix(5, (3, 12), (2, 6), profiled_steps=2)


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve_model("tiny")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, dtype="float32", device="cpu", enable_prefix_caching=False, kv_cache_memory_bytes=2**25)


@pytest.fixture(scope="module")
def bench() -> ThroughputBench:
    return bench_throughput("tiny", rounds=2, dtype="float32", mix=SMALL, progress=False)


def test_the_same_seed_draws_the_same_requests_within_the_bounds() -> None:
    text = list(range(100))
    drawn = draw_workload(text, 200, inputs=(16, 150), outputs=(1, 9), seed=3)
    assert drawn == draw_workload(text, 200, inputs=(16, 150), outputs=(1, 9), seed=3)
    assert drawn != draw_workload(text, 200, inputs=(16, 150), outputs=(1, 9), seed=4)
    assert {len(prompt) for prompt in drawn.prompts} <= set(range(16, 151))
    assert set(drawn.output_lens) == set(range(1, 10))
    assert all((after - before) % 100 == 1 for p in drawn.prompts for before, after in pairwise(p))
    assert (len(drawn), drawn.num_input_tokens) == (200, sum(map(len, drawn.prompts)))
    assert drawn.num_output_tokens == sum(drawn.output_lens)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": 0}, "count=0"),
        ({"inputs": (5, 4)}, r"inputs=\(5, 4\)"),
        ({"outputs": (0, 4)}, r"outputs=\(0, 4\)"),
        ({"text_ids": []}, "text_ids is empty"),
    ],
)
def test_requests_that_cannot_be_drawn(arguments: dict, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        draw_workload(**{"text_ids": [1, 2]} | arguments)


def test_the_full_mix_is_the_stated_one() -> None:
    assert (FULL.count, FULL.inputs, FULL.outputs) == (64, (16, 512), (16, 256))


WORKLOAD = Workload(((1,) * 5, (2,) * 9, (3,) * 2, (4,) * 9), (7, 1, 7, 3))


@pytest.mark.parametrize(
    ("batches", "cut"),
    [
        (StaticBatches(3), [[0, 1, 2], [3]]),
        (StaticBatches(2, "prompt length"), [[1, 3], [0, 2]]),
        (StaticBatches(2, "output length"), [[0, 2], [3, 1]]),
        (StaticBatches(9, "output length"), [[0, 2, 3, 1]]),
    ],
)
def test_batches_are_cut_in_their_order(batches: StaticBatches, cut: list[list[int]]) -> None:
    assert batches.cut(WORKLOAD) == cut


@pytest.mark.parametrize("batches", [StaticBatches(0), StaticBatches(2, "size")])
def test_batches_that_are_none(batches: StaticBatches) -> None:
    with pytest.raises(InvalidArgumentError, match="cut no batches"):
        batches.cut(WORKLOAD)


def test_transformers_computes_each_requests_own_tokens(tiny: Path, llm: LLM, monkeypatch) -> None:
    """Padded on the left and masked, a row's tokens are those of the request alone, and ours."""
    workload = draw_workload(range(3, 400), 5, inputs=(3, 12), outputs=(2, 6), seed=1)
    peer = TransformersPeer(tiny)
    model, seen = peer.load(), []
    generate = model.generate

    def listening(ids, **arguments):
        out = generate(ids, **arguments)
        seen.append(out[:, ids.shape[1] :].tolist())
        return out

    monkeypatch.setattr(model, "generate", listening)
    peer.batches = StaticBatches(3, "output length")
    assert peer.run(workload) > 0
    order = [i for batch in peer.batches.cut(workload) for i in batch]
    assert [len(rows) for rows in seen] == [3, 2]
    assert [len(rows[0]) for rows in seen] == [workload.output_lens[order[0]], workload.output_lens[order[3]]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
    ours = llm.generate([list(prompt) for prompt in workload.prompts], params, use_tqdm=False)
    rows = [row for batch in seen for row in batch]
    theirs = {i: row[: workload.output_lens[i]] for i, row in zip(order, rows, strict=True)}
    assert {i: output.outputs[0].token_ids for i, output in enumerate(ours)} == theirs


def scripted(monkeypatch, seconds: dict[tuple[int, str], float]) -> list[tuple[StaticBatches, float]]:
    """Make the peer take these seconds, or stop at its limit; return what was tried with which limit."""
    tried: list[tuple[StaticBatches, float]] = []

    def run(self, workload: Workload, batches: StaticBatches, limit: float) -> Trial:
        tried.append((batches, limit))
        wanted = seconds[batches.size, batches.order]
        return Trial(batches, min(wanted, limit), stopped=wanted > limit)

    monkeypatch.setattr(TransformersPeer, "_run", run)
    return tried


def test_tuning_finds_the_fastest_and_stops_what_is_slower(monkeypatch) -> None:
    best = "output length"
    seconds = {(4, best): 9.0, (2, best): 6.0, (1, best): 8.0, (2, "arrival"): 7.0, (2, "prompt length"): 5.0}
    tried = scripted(monkeypatch, seconds)
    peer = TransformersPeer("nowhere")
    trials = list(peer.tune(WORKLOAD, sizes=(8, 4, 2, 1)))
    assert [(str(batches), limit) for batches, limit in tried] == [
        ("batches of 4, by output length", float("inf")),  # 8 is no more than 4 of 4 requests
        ("batches of 2, by output length", 9.0),
        ("batches of 1, by output length", 6.0),
        ("batches of 2, by arrival", float("inf")),
        ("batches of 2, by prompt length", float("inf")),
    ]
    assert [trial.stopped for trial in trials] == [False, False, True, False, False]
    assert peer.batches == StaticBatches(2, "prompt length")


def test_a_time_limit_stops_within_a_batch(tiny: Path) -> None:
    peer = TransformersPeer(tiny)
    long = Workload(((5,) * 8,) * 2, (400, 400))
    trial = peer._run(long, StaticBatches(2), 0.05)
    assert trial.stopped
    assert 0.05 <= trial.seconds < 2


def test_a_batch_that_ends_early_is_an_error(tiny: Path, monkeypatch) -> None:
    peer = TransformersPeer(tiny)
    monkeypatch.setattr(peer.load(), "generate", lambda ids, **_: ids)
    with pytest.raises(EngineError, match="ended a batch before its last token"):
        peer.run(WORKLOAD)


def test_a_step_is_its_parts(llm: LLM) -> None:
    workload = draw_workload(range(3, 400), 6, inputs=(3, 12), outputs=(1, 1))
    parts = measure_step_parts(llm, workload, num_steps=3)
    assert (parts.num_sequences, parts.num_steps) == (6, 3)
    assert 0 < parts.bookkeeping_share < 1
    assert min(parts.schedule, parts.update, parts.around, parts.inputs) > 0
    assert llm.engine.kv.pool.num_held == 0
    assert not llm.engine.has_unfinished_requests()


def test_shares_are_of_known_kinds_and_add_up(llm: LLM) -> None:
    before = [vars(module).get("forward") for module in llm.model.modules()]
    profile = profile_steps(llm, draw_workload(range(3, 400), 6, inputs=(3, 12), outputs=(1, 1)), num_steps=2)
    assert tuple(profile.shares) == KINDS
    assert sum(profile.shares.values()) == pytest.approx(1)
    assert min(profile.shares.values()) > 0
    assert [vars(module).get("forward") for module in llm.model.modules()] == before  # nothing stays wrapped
    assert not {"schedule", "update", "execute"} & (vars(llm.engine.scheduler).keys() | vars(llm.engine.runner).keys())


def test_a_model_of_other_layers_has_no_profile(llm: LLM, monkeypatch) -> None:
    monkeypatch.setattr(llm, "model", object())
    with pytest.raises(InvalidArgumentError, match="llm runs a object, whose layers are not known"):
        profile_steps(llm, WORKLOAD)


def test_work_is_booked_where_it_was_done(llm: LLM, monkeypatch) -> None:
    """A sampler and a scheduler that are made slow take that part of the profile."""
    workload = draw_workload(range(3, 400), 2, inputs=(3, 12), outputs=(1, 1))
    real_sample, real_schedule = model_runner.sample, llm.engine.scheduler.schedule

    def slow_sample(*arguments):
        time.sleep(0.2)
        return real_sample(*arguments)

    def slow_schedule():
        time.sleep(0.1)
        return real_schedule()

    monkeypatch.setattr(model_runner, "sample", slow_sample)
    monkeypatch.setattr(llm.engine.scheduler, "schedule", slow_schedule)
    shares = profile_steps(llm, workload, num_steps=1).shares
    assert shares["sampling"] > 0.35
    assert 0.15 < shares["bookkeeping"] < 0.45
    parts = measure_step_parts(llm, workload, num_steps=1)
    assert 0.15 < parts.bookkeeping_share < 0.45
    assert parts.schedule > 0.1 > parts.update


def test_requests_that_do_not_run_at_once_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match="65 requests, but max_num_seqs=64"):
        measure_step_parts(llm, draw_workload(range(3, 400), 65, inputs=(1, 1), outputs=(1, 1)), 1)
    with pytest.raises(InvalidArgumentError, match="do not all decode for 500 steps"):
        measure_step_parts(llm, draw_workload(range(3, 400), 2, inputs=(20, 30), outputs=(1, 1)), 500)
    assert llm.engine.kv.pool.num_held == 0


def test_the_ratio_is_of_the_same_round_and_to_the_fastest(bench: ThroughputBench) -> None:
    ours, *theirs = bench.rows
    assert [row.system for row in bench.rows] == ["vllm_teach", "transformers", "transformers"]
    ratios = [[b / a for b, a in zip(row.seconds.samples, ours.seconds.samples, strict=True)] for row in theirs]
    assert list(bench.speedups) == ["transformers"]
    speedup = bench.speedups["transformers"]
    assert list(speedup.samples) in ratios
    assert speedup.median == min(map(statistics.median, ratios))
    assert len(speedup.samples) == bench.rounds == 2
    for row in bench.rows:
        rates = [bench.num_output_tokens / seconds for seconds in row.seconds.samples]
        assert row.tokens_per_second.samples == pytest.approx(rates)
    finished = sorted((trial for trial in bench.trials if not trial.stopped), key=lambda trial: trial.seconds)
    assert [row.how for row in theirs] == [str(trial.batches) for trial in finished[:2]]
    assert bench.step.num_sequences == 64


def test_it_is_json_and_text(bench: ThroughputBench) -> None:
    data = json.loads(json.dumps(bench.to_json()))
    median = bench.speedups["transformers"].median
    assert data["speedups"]["transformers"]["median"] == median
    assert data["bookkeeping_share"] == bench.step.bookkeeping_share
    assert data["mix"]["inputs"] == [3, 12]
    assert data["environment"]["packages"]["transformers"]
    text = format_throughput(bench)
    assert text.startswith("tiny, float32, cpu, ")
    assert re.search(rf"vllm_teach is {median:.2f} times as fast as transformers", text)
    assert all(str(trial.batches) in text for trial in bench.trials)
    assert all(kind in text for kind in KINDS)


def test_ours_alone(tiny: Path, capsys) -> None:
    bench = bench_throughput(tiny, compare=(), rounds=1, dtype="float32", mix=SMALL, progress=False)
    assert [row.system for row in bench.rows] == ["vllm_teach"]
    assert bench.speedups == {}
    assert "times as fast" not in format_throughput(bench)


class Fake:
    """A peer in a process of its own, without the process."""

    failing: str | None = None
    seen: ClassVar[list[object]] = []

    def __init__(self, name: str, model_path: Path, dtype: torch.dtype, python: str = "python") -> None:
        self.name, self.version, self.how = name, "1.0", "in its way"

    def available(self) -> str | None:
        return "It is not installed." if self.name == "llama.cpp" else None

    def load(self, max_len: int, max_seqs: int, cache_bytes: int) -> None:
        self.seen.append(("load", max_len, max_seqs, cache_bytes))
        if self.failing:
            raise EngineError(self.failing)

    def run(self, workload: Workload) -> float:
        self.seen.append(workload)
        return 1.0

    def close(self) -> None:
        self.seen.append("close")


@pytest.fixture
def fake(monkeypatch) -> type[Fake]:
    monkeypatch.setattr(peer_choice, "ProcessPeer", Fake)
    monkeypatch.setattr(Fake, "seen", [])
    return Fake


def test_other_systems_get_the_same_requests_and_missing_ones_are_named(tiny: Path, fake: type[Fake]) -> None:
    compare = ("vllm", "llama.cpp")
    bench = bench_throughput(tiny, compare=compare, rounds=2, dtype="float32", mix=SMALL, progress=False)
    assert [(row.system, row.how, row.version) for row in bench.rows] == [
        ("vllm_teach", "continuous batching", None),
        ("vllm", "in its way", "1.0"),
    ]
    assert list(bench.speedups) == ["vllm"]
    loaded, warmed_up, *rounds, closed = fake.seen
    shape = load_config(tiny)
    token_bytes = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    assert (loaded, closed) == (("load", 18, 5, 18 * 5 * token_bytes), "close")
    assert len(warmed_up) == 4
    assert [(len(each), each.num_output_tokens) for each in rounds] == [(5, bench.num_output_tokens)] * 2
    assert [(each.system, each.reason) for each in bench.missing] == [("llama.cpp", "It is not installed.")]
    assert bench.rows[1].seconds.samples == (1.0, 1.0)  # its own clock's, without the way into its process
    data = json.loads(json.dumps(bench.to_json()))
    assert data["missing"] == [{"system": "llama.cpp", "reason": "It is not installed."}]
    text = format_throughput(bench)
    assert "1.0: in its way" in text
    assert re.search(r"not in the table\n  llama.cpp +It is not installed\.\n", text)


def test_a_system_that_cannot_load_the_model_is_missing(tiny: Path, fake: type[Fake], monkeypatch) -> None:
    monkeypatch.setattr(fake, "failing", "vllm failed: no such processor.")
    bench = bench_throughput(tiny, compare=("vllm",), rounds=1, dtype="float32", mix=SMALL, progress=False)
    assert [(each.system, each.reason) for each in bench.missing] == [("vllm", "vllm failed: no such processor.")]
    assert [row.system for row in bench.rows] == ["vllm_teach"]
    assert fake.seen[-1] == "close"


def test_a_system_that_fails_to_load_is_closed_before_the_others_run(tiny: Path, fake: type[Fake], monkeypatch) -> None:
    monkeypatch.setattr(fake, "failing", "vllm failed: no such processor.")

    def listening(*arguments: object, **more: object) -> None:
        fake.seen.append("race")
        raise EngineError("This is far enough.")

    monkeypatch.setattr(throughput_bench, "race", listening)
    with pytest.raises(EngineError, match="far enough"):
        bench_throughput(tiny, compare=("vllm",), rounds=1, dtype="float32", mix=SMALL, progress=False)
    assert [each for each in fake.seen if isinstance(each, str)] == ["close", "race", "close"]


def test_weights_that_transformers_would_draw_at_random_are_refused(tiny: Path, tmp_path: Path) -> None:
    """As it does, with a warning, where it does not know how they are quantised."""
    quantize_model(tiny, tmp_path / "q", QuantizationConfig.choose("rtn"), progress=False)
    with pytest.raises(ModelLoadError, match=r"does not find the weights model\.layers\.0\.mlp\.down_proj\.weight, "):
        TransformersPeer(tmp_path / "q").run(WORKLOAD)


def test_a_model_that_transformers_cannot_load_makes_it_missing(tiny: Path, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("It needs a package more. \nAnd more words.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    bench = bench_throughput(tiny, rounds=1, dtype="float32", mix=SMALL, progress=False)
    reason = f"transformers cannot load {tiny} (It needs a package more): compare without it, or use another model."
    assert [(each.system, each.reason) for each in bench.missing] == [("transformers", reason)]
    assert [row.system for row in bench.rows] == ["vllm_teach"]


def test_a_system_that_fails_while_it_is_measured_ends_the_run(tiny: Path, fake: type[Fake], monkeypatch) -> None:
    def fail(self: Fake, workload: Workload) -> float:
        if len(workload) == SMALL.count:
            raise EngineError("vllm failed: it ran out of memory.")
        return 1.0

    monkeypatch.setattr(fake, "run", fail)
    with pytest.raises(EngineError, match="ran out of memory"):
        bench_throughput(tiny, compare=("vllm",), rounds=1, dtype="float32", mix=SMALL, progress=False)
    assert fake.seen[-1] == "close"


def test_an_unknown_system_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(InvalidArgumentError, match="compare='sglang' is no system"):
        bench_throughput("no such model", compare=("sglang",))


def test_a_request_of_another_length_is_an_error(llm: LLM, monkeypatch) -> None:
    short = llm.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)
    monkeypatch.setattr(llm, "generate", lambda *_, **__: short)
    with pytest.raises(EngineError, match="ended requests before their last token"):
        serve(llm, Workload(((5, 6),), (2,)))


def test_a_mix_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="up to 768 tokens, but the model's context is 512"):
        bench_throughput("tiny", compare=(), dtype="float32", progress=False)


def test_a_mix_far_too_long_is_refused_before_it_is_drawn(monkeypatch) -> None:
    monkeypatch.setattr(throughput_bench, "draw_workload", lambda *_, **__: pytest.fail("draws"))
    with pytest.raises(InvalidArgumentError, match="but the model's context is 512"):
        bench_throughput("tiny", compare=(), dtype="float32", mix=Mix(64, (10**9, 10**9)), progress=False)


def test_more_requests_than_the_memory_holds_are_refused_before_they_are_drawn() -> None:
    with pytest.raises(InvalidArgumentError, match=r"count=999999999 requests .* do not fit into memory: use fewer"):
        draw_workload([1, 2], 999_999_999, inputs=(512, 512), outputs=(1, 1))


COMMAND = {
    "compare": ("transformers",),
    "peer_pythons": {},
    "rounds": 3,
    "dtype": "bfloat16",
    "mix": FULL,
    "progress": True,
}


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ([], {}),
        (
            ["--compare", "none", "--rounds", "5", "--dtype", "float32", "--quick", "--quiet"],
            {"compare": (), "rounds": 5, "dtype": "float32", "mix": QUICK, "progress": False},
        ),
        (
            ["--compare", "transformers,vllm,llama.cpp", "--peer-python", "vllm=/a/python=3"],
            {"compare": ("transformers", "vllm", "llama.cpp"), "peer_pythons": {"vllm": "/a/python=3"}},
        ),
        (
            ["--input-len", "2048", "--output-len", "512", "--num-prompts", "1000"],
            {"mix": Mix(1000, (2048, 2048), (512, 512))},
        ),
        (["--quick", "--output-len", "8"], {"mix": dataclasses.replace(QUICK, outputs=(8, 8))}),
    ],
)
def test_the_command(bench: ThroughputBench, monkeypatch, tmp_path, capsys, more: list[str], asked: dict) -> None:
    seen: list[tuple] = []
    monkeypatch.setattr(throughput_bench, "bench_throughput", lambda *a, **k: seen.append((a, k)) or bench)
    file = tmp_path / "bench.json"
    assert cli.main(["bench", "throughput", *more, "--json", str(file)]) == 0
    assert seen == [(("smollm2",), COMMAND | asked)]
    assert capsys.readouterr().out == format_throughput(bench) + "\n"
    written = json.loads(file.read_text())
    assert written.items() >= json.loads(json.dumps(bench.to_json())).items()
    assert written["command"] == shlex.join(["vllm-teach", "bench", "throughput", *more, "--json", str(file)])
    assert "commit" in written


def test_an_interpreter_without_a_name_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "throughput", "--peer-python", "/usr/bin/python3"])
    assert "give NAME=PATH, as vllm=/opt/vllm/bin/python" in capsys.readouterr().err


def test_two_interpreters_for_one_system_are_refused(capsys) -> None:
    twice = ["--peer-python", "vllm=/a/python", "--peer-python", "vllm=/b/python"]
    assert cli.main(["bench", "throughput", "--compare", "vllm", *twice]) == 1
    assert "--peer-python names vllm, vllm: give one interpreter for each." in capsys.readouterr().err


def test_fixed_lengths_are_one_number(bench: ThroughputBench) -> None:
    fixed = dataclasses.replace(bench, mix=Mix(3, (7, 7), (2, 4)))
    assert "prompts of 7 tokens (" in format_throughput(fixed)
    assert "outputs of 2 to 4 (" in format_throughput(fixed)
