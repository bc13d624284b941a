"""The runner on hand-made plans: whatever the blocks, chunks and company, as if each sequence were computed alone."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.patterns import GlobalTokens, LocalWindow, Pattern
from vllm_teach.backends.dispatch import attend
from vllm_teach.engine.model_runner import ModelRunner
from vllm_teach.engine.plan import Plan, ScheduledSequence
from vllm_teach.engine.request import Sequence
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.kvcache.transfers import Transfer
from vllm_teach.models.attend import window_size
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder

VOCAB = 61
BLOCK_SIZE = 4
SINKS = GlobalTokens(2) | LocalWindow(5)

_ids = itertools.count()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(window: int | None = None) -> Decoder:
    """Three layers; with a window, the middle one sees all."""
    sliding = () if window is None else (True, False, True)
    config = ModelConfig(
        "MistralForCausalLM", VOCAB, 32, 48, 3, 4, 2, 8, 256, sliding_window=window, sliding_layers=sliding
    )
    model = Decoder(config).init_random(seed=3)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.mul_(15.0)  # otherwise attention hardly matters
    return model


def make_runner(
    model: Decoder, num_blocks: int = 40, backend: str = "auto", pattern: Pattern | None = None
) -> ModelRunner:
    """A runner whose cache holds NaN wherever nothing was written."""
    c = model.config
    storage = KVStorage(c.num_layers, num_blocks, BLOCK_SIZE, c.num_kv_heads, c.head_dim, model.dtype, "cpu", 8)
    storage.keys[:, :num_blocks] = torch.nan
    storage.values[:, :num_blocks] = torch.nan
    return ModelRunner(model, storage, backend, pattern)


def make_sequence(prompt: list[int], output: list[int] | None = None, **params: object) -> Sequence:
    settings = SamplingParams(temperature=0.0, logprobs=-1, **params)
    output = [] if output is None else output
    return Sequence(next(_ids), 0, tuple(prompt), settings, 999, frozenset(), "", output_token_ids=output)


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: Decoder, tokens: list[int], pattern: Pattern | None = None) -> torch.Tensor:
    """The log-probabilities after each token, float32 `[tokens, vocab]`: no cache, the plain formula."""

    def attend_alone(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int | None = None):
        masks = {"causal": True, "window_size": window_size(window), "pattern": pattern}
        return attend(q[None], k[None], v[None], backend="naive", **masks)[0]

    hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attend_alone)
    return model.logits(hidden).log_softmax(-1)


def assert_distribution(found: dict[int, tuple[float, int]], wanted: torch.Tensor) -> None:
    assert len(found) == VOCAB
    logprobs = torch.tensor([found[token][0] for token in range(VOCAB)])
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-4)


def steps(sequences: list[Sequence], tables: list[list[int]], budget: int, rng: random.Random) -> Iterator[Plan]:
    """Plans that compute what is known of all sequences, in chunks of random sizes and in random company."""
    done = dict.fromkeys((each.seq_id for each in sequences), 0)
    while unfinished := [i for i, each in enumerate(sequences) if done[each.seq_id] < each.num_tokens]:
        items, left = [], budget
        for i in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            each = sequences[i]
            count = min(left, rng.randint(1, each.num_tokens - done[each.seq_id]))
            if count:
                items.append(ScheduledSequence(each, done[each.seq_id], count, tables[i]))
                done[each.seq_id] += count
                left -= count
        yield Plan(items=tuple(items))


def scattered(lengths: list[int], num_blocks: int, rng: random.Random) -> list[list[int]]:
    """Disjoint block tables, with a block more than is needed now."""
    free = rng.sample(range(num_blocks), num_blocks)
    return [[free.pop() for _ in range(-(-length // BLOCK_SIZE) + 1)] for length in lengths]


@pytest.mark.parametrize("backend", ["auto", "naive", "tiled", "sdpa"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("pattern", [None, SINKS], ids=["causal", "sinks"])
def test_every_sequence_is_computed_as_if_alone(backend: str, window: int | None, pattern: Pattern | None) -> None:
    rng = random.Random(5)
    model = make_model(window)
    lengths = [1, 4, 5, 17, 30]
    sequences = [make_sequence(random_tokens(n, seed=n)) for n in lengths]
    runner = make_runner(model, backend=backend, pattern=pattern)
    drawn = set()
    for plan in steps(sequences, scattered(lengths, 40, rng), budget=13, rng=rng):
        result = runner.execute(plan)
        sampling = [item.sequence for item in plan.items if item.samples]
        assert list(result.tokens) == [each.seq_id for each in sampling]
        assert not result.errors
        for each in sampling:
            wanted = alone(model, list(each.prompt_token_ids), pattern)[-1]
            token = result.tokens[each.seq_id]
            assert token.token_id == wanted.argmax()
            assert_distribution(token.top_logprobs, wanted)
            drawn.add(each.seq_id)
    assert len(drawn) == len(sequences)
    assert not runner.storage.keys[:, runner.storage.zero_block].any()


def test_a_generated_sequence_goes_on_from_its_output() -> None:
    model = make_model()
    sequence = make_sequence(random_tokens(6, 1), random_tokens(5, 2))
    runner = make_runner(model)
    table = [7, 3, 20]
    runner.execute(Plan(items=(ScheduledSequence(sequence, 0, 10, table),)))
    result = runner.execute(Plan(items=(ScheduledSequence(sequence, 10, 1, table),)))
    wanted = alone(model, random_tokens(6, 1) + random_tokens(5, 2))[-1]
    assert_distribution(result.tokens[sequence.seq_id].top_logprobs, wanted)


def test_layers_are_prepared_once_a_step_and_kind() -> None:
    """Counting the calls of the layout's check: it reads the block tables, which costs time for each sequence."""
    from vllm_teach.attention import layout

    calls = []
    original = layout._read_table

    def counting(*arguments: object) -> object:
        calls.append(1)
        return original(*arguments)

    model = make_model(window=6)
    runner = make_runner(model)
    sequences = [make_sequence(random_tokens(9, seed)) for seed in range(3)]
    tables = scattered([9] * 3, 40, random.Random(1))
    backends.reset_calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_read_table", counting)
        runner.execute(Plan(items=tuple(ScheduledSequence(s, 0, 9, t) for s, t in zip(sequences, tables, strict=True))))
    assert len(calls) == 2  # layers with a window, and the one without
    assert sum(each.calls for each in backends.calls().values()) == model.config.num_layers


def test_blocks_that_were_given_back_are_not_needed() -> None:
    """Under sinks and a window, blocks between the two may go; the rest of the cache holds NaN."""
    model = make_model()
    tokens = random_tokens(30, 4)
    wanted = alone(model, tokens, SINKS)[-1]
    for backend in ("auto", "sdpa", "naive", "tiled", "memory_efficient"):
        runner = make_runner(model, backend=backend, pattern=SINKS)
        sequence = make_sequence(tokens)
        table = [9, 2, 14, 30, 1, 8, 22, 5]
        runner.execute(Plan(items=(ScheduledSequence(sequence, 0, 29, table),)))
        for logical in range(1, 5):  # of positions 4 to 19; the last token sees 0, 1 and 24 to 29
            runner.storage.keys[:, table[logical]] = torch.nan
            runner.storage.values[:, table[logical]] = torch.nan
            table[logical] = NO_BLOCK
        result = runner.execute(Plan(items=(ScheduledSequence(sequence, 29, 1, table),)))
        assert_distribution(result.tokens[sequence.seq_id].top_logprobs, wanted)


def test_a_transfer_that_failed_is_made_up_for_and_those_before_it_are_not_repeated(monkeypatch) -> None:
    runner = make_runner(make_model())
    done, apply = [], runner.storage.apply

    def fail_once(transfers):
        if len(done) == 1 and not failures:
            failures.append(1)
            raise MemoryError
        apply(transfers)
        done.extend(transfers)

    failures: list[int] = []
    monkeypatch.setattr(runner.storage, "apply", fail_once)
    plan = Plan(transfers=(Transfer("copy", ((0, 1),)), Transfer("copy", ((1, 2),)), Transfer("copy", ((3, 1),))))
    with pytest.raises(MemoryError):
        runner.execute(plan)
    runner.execute(plan)
    assert done == list(plan.transfers)


def test_transfers_come_first_and_once() -> None:
    """Block 3 moves to 6 and the table names 6 already; executed again, the plan must not move what is there now."""
    model = make_model()
    tokens = random_tokens(7, 8)
    runner = make_runner(model)
    sequence = make_sequence(tokens)
    runner.execute(Plan(items=(ScheduledSequence(sequence, 0, 6, [3, 5]),)))
    plan = Plan(
        items=(ScheduledSequence(sequence, 6, 1, [6, 5]),),
        transfers=(Transfer("swap_out", ((3, 2),)), Transfer("swap_in", ((2, 6),))),
    )
    wanted = alone(model, tokens)[-1]
    assert_distribution(runner.execute(plan).tokens[sequence.seq_id].top_logprobs, wanted)
    assert plan.num_applied == 2
    runner.storage.keys[:, 3] = torch.nan
    assert_distribution(runner.execute(plan).tokens[sequence.seq_id].top_logprobs, wanted)


def test_a_plan_of_transfers_alone() -> None:
    runner = make_runner(make_model())
    runner.storage.keys[:, 1] = 5.0
    result = runner.execute(Plan(transfers=(Transfer("copy", ((1, 2),)),)))
    assert (runner.storage.keys[:, 2] == 5).all()
    assert not result.tokens


def test_forks_draw_from_their_parents_row() -> None:
    model = make_model()
    runner = make_runner(model)
    parent, other = make_sequence(random_tokens(5, 1)), make_sequence(random_tokens(3, 2))
    parent.forks = [make_sequence(random_tokens(5, 1)) for _ in range(2)]
    plan = Plan(items=(ScheduledSequence(other, 0, 3, [4]), ScheduledSequence(parent, 0, 5, [1, 2])))
    result = runner.execute(plan)
    assert list(result.tokens) == [each.seq_id for each in (other, parent, *parent.forks)]
    for each in (parent, *parent.forks):
        assert_distribution(result.tokens[each.seq_id].top_logprobs, alone(model, random_tokens(5, 1))[-1])
    assert_distribution(result.tokens[other.seq_id].top_logprobs, alone(model, random_tokens(3, 2))[-1])


@pytest.mark.parametrize("logits_bytes", [1, 1 << 20])
def test_prompt_logprobs_come_chunk_by_chunk(monkeypatch, logits_bytes: int) -> None:
    monkeypatch.setattr("vllm_teach.engine.prompt_logprobs._LOGITS_BYTES", logits_bytes)
    model = make_model()
    runner = make_runner(model)
    tokens, output = random_tokens(11, 3), random_tokens(2, 4)
    asks, silent = make_sequence(tokens, output, prompt_logprobs=2), make_sequence(random_tokens(4, 5))
    wanted = alone(model, tokens)
    found = []
    for start, count in ((0, 4), (4, 1), (5, 8)):
        items = (ScheduledSequence(silent, 0, 4, [9]), ScheduledSequence(asks, start, count, [4, 8, 2, 7]))
        result = runner.execute(Plan(items=items))
        assert list(result.prompt_logprobs) == [asks.seq_id]
        found += result.prompt_logprobs[asks.seq_id]
    assert len(found) == 10
    for position, top in enumerate(found, start=1):
        row = wanted[position - 1]
        own = tokens[position]
        best = row.topk(2).indices.tolist()
        assert set(top) == {own, *best}
        for token, (logprob, rank) in top.items():
            assert logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert rank == int((row > row[token]).sum()) + 1
    last = runner.execute(Plan(items=(ScheduledSequence(asks, 12, 1, [4, 8, 2, 7]),)))
    assert not last.prompt_logprobs
