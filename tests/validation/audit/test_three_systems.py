"""The baselines of the tables, on the tiny model: they must be what they are called, and give the same tokens."""

import pytest

from vllm_teach import LLM
from vllm_teach.models import load_tokenizer, resolve_model
from vllm_teach.validation.audit.experiments import plain_batch, three_systems
from vllm_teach.validation.audit.experiments.three_systems import (
    MAX_LEN,
    RESERVED,
    SYSTEMS,
    Job,
    ThreeSystems,
    draw_jobs,
)
from vllm_teach.validation.audit.lab import Lab

JOBS = tuple(Job(tuple(range(5 + i, 25 + 3 * i)), 4 + i) for i in range(6))


@pytest.fixture
def tiny_lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab(quick=True)
    lab.__dict__["tokenizer"] = load_tokenizer(resolve_model("tiny"))
    monkeypatch.setattr(
        three_systems, "_load", lambda lab: LLM("tiny", dtype="float32", device="cpu", num_kv_blocks=64)
    )
    monkeypatch.setattr(three_systems, "draw_jobs", lambda lab, llm: JOBS)
    return lab


@pytest.fixture
def engines(tiny_lab: Lab) -> dict[str, LLM]:
    return three_systems._engines(tiny_lab)


def test_all_three_generate_the_same_tokens(engines: dict[str, LLM]) -> None:
    tokens = {}
    for name, llm in engines.items():
        _, done, *_ = three_systems._all_at_once(llm, JOBS)
        tokens[name] = sorted((tuple(out.prompt_token_ids), tuple(out.outputs[0].token_ids)) for out in done)
    assert list(tokens) == list(SYSTEMS)
    assert tokens["original"] == tokens["flash"] == tokens["full"]
    assert [len(out) for _, out in tokens["full"]] == [len(out) for _, out in tokens["original"]]


def test_the_original_reserves_the_longest_sequence_in_one_run_and_full_what_is_needed(engines: dict[str, LLM]) -> None:
    held = {name: three_systems._all_at_once(llm, JOBS)[2] for name, llm in engines.items()}
    assert held["original"] == held["flash"] == RESERVED * MAX_LEN
    blocks = sum(-(-(len(job.prompt) + job.output_len) // 16) for job in JOBS)
    assert held["full"] <= blocks * 16
    slots = {name: llm.engine.kv.num_blocks * llm.engine.kv.block_size for name, llm in engines.items()}
    assert len(set(slots.values())) == 1  # the same bytes for all


def test_the_baselines_are_of_the_kind_they_are_called(engines: dict[str, LLM]) -> None:
    config = {name: llm.engine.config for name, llm in engines.items()}
    assert [config[name].batching for name in SYSTEMS] == ["static", "static", "continuous"]
    assert config["original"].attention_backend == "naive"
    assert config["flash"].attention_backend == config["full"].attention_backend != "naive"
    assert all(not each.enable_prefix_caching for each in config.values())


def test_an_open_loop_counts_from_the_arrival(engines: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a step moves by 1 s: who arrives while a step runs has waited when it is let in."""
    llm, now = engines["full"], [0.0]
    step = llm.engine.step

    def timed_step():  # type: ignore[no-untyped-def]
        now[0] += 1.0
        return step()

    monkeypatch.setattr(llm.engine, "step", timed_step)
    monkeypatch.setattr(three_systems.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(three_systems.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    jobs = [Job((5, 6, 7), 3), Job((6, 7, 8), 3), Job((7, 8, 9), 1)]
    assert three_systems._open_loop(llm, jobs, [0.0, 0.5, 20.0]) == [3.0, 3.5, 1.0]


def test_ratios_are_of_one_round_and_each_p99_of_a_stream_of_its_own(tiny_lab: Lab) -> None:
    found = three_systems.run_three_systems(tiny_lab)
    assert isinstance(found, ThreeSystems)
    assert all(len(run.p99.samples) == len(run.offline.samples) == 5 for run in found.runs.values())
    for of in (lambda run: run.offline, lambda run: run.p99):
        ratio = found.ratio("original", "full", of)
        pairs = zip(of(found.runs["original"]).samples, of(found.runs["full"]).samples, strict=True)
        assert ratio.samples == tuple(a / b for a, b in pairs)
    assert found.memory("original") > found.memory("flash") > found.memory("full") > found.weight_bytes


def test_the_jobs_leave_room_for_the_gain_that_is_claimed(engines: dict[str, LLM]) -> None:
    """With two batches of the original nothing could be more than twice as fast, whatever it does."""
    for quick in (True, False):
        lab = Lab(quick=quick)
        lab.__dict__["tokenizer"] = engines["full"].tokenizer
        jobs = draw_jobs(lab, engines["full"])
        outputs = [job.output_len for job in jobs]
        static = sum(max(outputs[start : start + RESERVED]) for start in range(0, len(outputs), RESERVED))
        assert static / max(outputs) > 2.83  # from here on "5.7 times" would hold
        blocks = sum(-(-(len(job.prompt) + job.output_len) // 16) for job in jobs)
        assert quick is False or blocks <= RESERVED * MAX_LEN // 16  # all at a time


def test_the_original_calls_plain_attention_once_a_layer_for_the_whole_batch(
    engines: dict[str, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop over the sequences would make the baseline slow for a reason that is none of the claim's."""
    batches: list[int] = []
    plain = plain_batch.naive_attention

    def watched(q, k, v, **arguments):  # type: ignore[no-untyped-def]
        batches.append(len(q))
        return plain(q, k, v, **arguments)

    monkeypatch.setattr(plain_batch, "naive_attention", watched)
    steps = three_systems._all_at_once(engines["original"], JOBS[:RESERVED])[3]
    layers = engines["original"].model.config.num_layers
    assert max(batches) == RESERVED
    assert len(batches) <= layers * (steps - 1)  # one step has the prompts


def test_slots_of_an_ended_sequence_do_not_reach_its_successor(engines: dict[str, LLM]) -> None:
    llm = engines["original"]
    short, long = Job(tuple(range(5, 15)), 6), Job(tuple(range(40, 100)), 12)

    def tokens(jobs: list[Job]) -> dict[tuple[int, ...], tuple[int, ...]]:
        done = three_systems._all_at_once(llm, jobs)[1]
        return {tuple(out.prompt_token_ids): tuple(out.outputs[0].token_ids) for out in done}

    alone = tokens([short])
    llm.engine.runner.storage.keys[:, :-1] = 100.0  # what others may have left
    llm.engine.runner.storage.values[:, :-1] = -100.0
    assert tokens([short, long])[short.prompt] == alone[short.prompt]
