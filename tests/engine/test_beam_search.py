"""Beam search on the paged cache: the same texts as transformers', shared blocks, and nothing left behind."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_teach.engine.beam_params import BeamSearchOutput, BeamSearchParams
from vllm_teach.engine.beam_search import BeamSearch, search_beams
from vllm_teach.engine.events import Forked
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import EngineError, InvalidArgumentError, PromptTooLongError
from vllm_teach.kvcache.events import Copied
from vllm_teach.models.load import load_model

EOS = 2
VOCAB = 24
# Of 1 to 30 tokens; two begin alike, so that a prefix cache has something to find.
PROMPTS = [[(7 * place + 3 * length) % VOCAB for place in range(length)] for length in (1, 2, 3, 5, 8, 13, 21, 30)]
PROMPTS += [PROMPTS[-1][:22], [9] * 9]
PARAMS = BeamSearchParams(4, 9)


class NumberTokenizer:
    """A text is its tokens' numbers."""

    stop_token_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages) -> list[int]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def make_reference() -> Callable[[int], LlamaForCausalLM]:
    def make(vocab: int) -> LlamaForCausalLM:
        torch.manual_seed(11)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(
            vocab_size=vocab, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4, **sizes
        )
        return LlamaForCausalLM(config).eval()

    return make


@pytest.fixture(scope="module")
def reference(make_reference) -> LlamaForCausalLM:
    return make_reference(VOCAB)


@pytest.fixture(scope="module")
def expected(reference) -> list[list[tuple[float, list[int]]]]:
    return [theirs(reference, prompt, PARAMS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory: pytest.TempPathFactory):
    return loaded(reference, tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_engine(model, assert_empty) -> Iterator[Callable[..., LLMEngine]]:
    """Return a factory of engines with 200 blocks of 4 tokens; none may hold a block at the test's end."""
    made = []

    def make(model=model, **limits) -> LLMEngine:
        limits = {"block_size": 4, "num_kv_blocks": 200, "attention_backend": "sdpa", **limits}
        made.append(LLM.from_loaded(model, NumberTokenizer(), **limits).engine)
        return made[-1]

    yield make
    for engine in made:
        assert_empty(engine)


def loaded(reference: LlamaForCausalLM, folder: Path):
    reference.save_pretrained(folder)
    return load_model(folder)


def theirs(reference, prompt: list[int], params: BeamSearchParams, stop_ids=(EOS,)) -> list[tuple[float, list[int]]]:
    """Return transformers' [(score, new tokens without the end)]."""
    ids = torch.tensor([prompt])
    found = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = [
        list(itertools.takewhile(lambda token: token not in stop_ids, tokens))
        for tokens in found.sequences[:, len(prompt) :].tolist()
    ]
    return list(zip(found.sequences_scores.tolist(), texts, strict=True))


def check(outputs: list[BeamSearchOutput], expected: list[list[tuple[float, list[int]]]], prompts=PROMPTS) -> None:
    for prompt, output, texts in zip(prompts, outputs, expected, strict=True):
        assert [each.tokens for each in output.sequences] == [[*prompt, *tokens] for _, tokens in texts]
        assert [each.score for each in output.sequences] == pytest.approx([score for score, _ in texts], abs=1e-4)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"enable_prefix_caching": False},
        {"prefix_cache": "radix"},
        {"block_size": 1, "num_kv_blocks": 800},
        {"block_size": 16},
        {"max_num_seqs": 8, "max_num_batched_tokens": 8},  # prompts in chunks, beside beams that decode
        {"max_num_seqs": 4},  # one prompt at a time
        {"num_kv_blocks": 19},  # what the longest needs, so mostly one at a time
        {"kv_placement": "prefer_contiguous"},
        {"kv_placement": "contiguous"},
        {"num_kv_blocks": 32, "kv_placement": "contiguous"},
    ],
    ids=lambda limits: " ".join(f"{name}={value}" for name, value in limits.items()) or "defaults",
)
def test_equals_transformers(make_engine, expected, limits) -> None:
    check(search_beams(make_engine(**limits), PROMPTS, PARAMS), expected)


def test_some_texts_ended_and_some_did_not(make_engine) -> None:
    outputs = search_beams(make_engine(), PROMPTS, PARAMS)
    ends = [each.finish_reason for output in outputs for each in output.sequences]
    assert {"stop", "length"} == set(ends)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert [each.score for each in output.sequences] == sorted((e.score for e in output.sequences), reverse=True)
        for each in output.sequences:
            stopped = each.finish_reason == "stop"
            assert each.stop_reason == (EOS if stopped else None)
            assert each.text == " ".join(map(str, each.tokens))
            new = len(each.tokens) - len(prompt) + stopped
            assert len(each.logprobs) == new
            assert each.score == pytest.approx(each.cum_logprob / new)
            chosen = [*each.tokens[len(prompt) :], *([EOS] if stopped else [])]
            total = sum(row[token].logprob for row, token in zip(each.logprobs, chosen, strict=True))
            assert each.cum_logprob == pytest.approx(total)


def test_the_end_may_stay_in_the_text(make_engine) -> None:
    plain = search_beams(make_engine(), PROMPTS, PARAMS)
    kept = search_beams(make_engine(), PROMPTS, BeamSearchParams(4, 9, include_stop_str_in_output=True))
    for without, with_end in zip(plain, kept, strict=True):
        for a, b in zip(without.sequences, with_end.sequences, strict=True):
            assert b.tokens == [*a.tokens, *([EOS] if a.finish_reason == "stop" else [])]


def test_the_end_may_be_ignored(make_engine, reference) -> None:
    params = BeamSearchParams(3, 6, ignore_eos=True)
    outputs = search_beams(make_engine(), PROMPTS[:3], params)
    texts = [theirs(reference, prompt, params, stop_ids=(VOCAB,)) for prompt in PROMPTS[:3]]
    check(outputs, texts, PROMPTS[:3])


def test_wide_enough_it_is_exhaustive(make_engine, make_reference, tmp_path: Path) -> None:
    """Six tokens, three of them new, and a place for each of the 156 texts: the best ones of all that there are."""
    tiny = make_reference(6)
    scores = {}
    with torch.inference_mode():
        for text in itertools.product(range(6), repeat=3):
            logits = tiny(torch.tensor([[1, 3, *text[:-1]]])).logits[0, 1:].log_softmax(-1)
            size = text.index(EOS) + 1 if EOS in text else 3
            scores[text[:size]] = sum(logits[place, text[place]].item() for place in range(size)) / size
    params = BeamSearchParams(156, 3, early_stopping="never", include_stop_str_in_output=True)
    engine = make_engine(loaded(tiny, tmp_path), max_num_seqs=156, num_kv_blocks=400)
    (output,) = search_beams(engine, [[1, 3]], params)
    assert {tuple(each.tokens[2:]) for each in output.sequences} == scores.keys()
    for each in output.sequences:
        assert each.score == pytest.approx(scores[tuple(each.tokens[2:])], abs=1e-4)
    assert tuple(output.sequences[0].tokens[2:]) == max(scores, key=scores.__getitem__)


def test_beams_share_blocks(make_engine) -> None:
    """Four beams after 30 tokens: the seven full blocks are held once, and the rest is copied when written."""
    engine = make_engine()
    shares = []

    def look(search: BeamSearch) -> None:
        tables = [engine.kv.table(beam.seq_id).blocks for beam in search.beams]
        if len(tables) == 4:
            assert len({tuple(table[:7]) for table in tables}) == 1
            last = [table[(beam.num_tokens - 2) // 4] for table, beam in zip(tables, search.beams, strict=True)]
            assert all(engine.kv.pool.holders(block) >= 1 for block in last)
            shares.append(engine.kv.usage().held_blocks / sum(map(len, tables)))
            assert engine.kv.usage().held_blocks == len({block for table in tables for block in table})

    search_beams(engine, [PROMPTS[7]], BeamSearchParams(4, 9, ignore_eos=True), on_step=look)
    assert shares
    assert max(shares) < 0.6
    assert engine.events.of(Forked)
    assert engine.events.of(Copied)


def test_a_beam_goes_on_in_its_own_sequence(make_engine) -> None:
    """Only where several beams continue one is there a fork: of four beams there are never more than four tables."""
    engine = make_engine()
    held = []
    search_beams(engine, [PROMPTS[5]], PARAMS, on_step=lambda search: held.append(len(search.beams)))
    assert max(held) == 4
    assert len(engine.events.of(Forked)) < 4 * len(held)


def test_a_small_pool_takes_prompts_in_turn(make_engine, expected) -> None:
    engine = make_engine(num_kv_blocks=46)
    beams = []
    outputs = search_beams(engine, PROMPTS, PARAMS, on_step=lambda search: beams.append(len(search.beams)))
    check(outputs, expected)
    assert 4 < max(beams) < 4 * len(PROMPTS)


def test_what_can_never_fit_is_refused(make_engine) -> None:
    engine = make_engine(num_kv_blocks=18)
    with pytest.raises(PromptTooLongError, match=r"^prompts\[1\]: 4 beams of 39 tokens may need 19 blocks, but .* 18"):
        search_beams(engine, [[1], PROMPTS[7]], PARAMS)
    with pytest.raises(InvalidArgumentError, match="beam_width=65"):
        search_beams(engine, [[1]], BeamSearchParams(65, 2))
    with pytest.raises(InvalidArgumentError, match=r"^prompts\[0\]: .*24"):
        search_beams(engine, [[VOCAB]], PARAMS)


def test_max_tokens_ends_at_the_context(make_engine) -> None:
    engine = make_engine(max_model_len=32)
    (output,) = search_beams(engine, [PROMPTS[7]], BeamSearchParams(2, 50, ignore_eos=True))
    assert [len(each.tokens) for each in output.sequences] == [32, 32]


def test_prompts_come_from_the_prefix_cache(make_engine, expected) -> None:
    engine = make_engine()
    check(search_beams(engine, PROMPTS, PARAMS), expected)
    before = engine.kv.usage().hit_tokens
    check(search_beams(engine, PROMPTS, PARAMS), expected)
    assert engine.kv.usage().hit_tokens - before >= 28  # of the longest prompt's 30 tokens seven blocks


def test_the_engine_serves_requests_before_and_after(make_engine, expected) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def generate() -> list[int]:
        request = engine.get_request(engine.add_request([3, 4, 5], params))
        while not request.finished:
            engine.step()
        return request.output().outputs[0].token_ids

    first = generate()
    check(search_beams(engine, PROMPTS, PARAMS), expected)
    assert generate() == first


def test_an_engine_with_requests_is_refused(make_engine) -> None:
    engine = make_engine()
    name = engine.add_request([3, 4, 5])
    with pytest.raises(EngineError, match="unfinished requests"):
        search_beams(engine, [[1]], PARAMS)
    engine.abort(name)


def test_closed_early_it_leaves_nothing(make_engine, expected) -> None:
    engine = make_engine()
    search = BeamSearch(engine, PROMPTS, PARAMS)
    for _ in range(4):
        search.step()
    assert search.unfinished
    assert engine.kv.usage().held_blocks > 0
    search.close()
    search.close()
    assert not search.unfinished
    assert engine.kv.usage().held_blocks == 0
    check(search_beams(engine, PROMPTS, PARAMS), expected)


def test_interrupted_it_leaves_nothing(make_engine) -> None:
    def interrupt(search: BeamSearch) -> None:
        if search.beams and search.beams[0].output_token_ids:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_beams(make_engine(), PROMPTS, PARAMS, on_step=interrupt)


@pytest.mark.parametrize("step", [0, 3])
def test_a_failing_forward_pass_leaves_nothing(make_engine, monkeypatch, expected, step) -> None:
    engine = make_engine()
    plain, calls = engine.runner.execute, itertools.count()

    def execute(plan):
        if next(calls) == step:
            raise RuntimeError("no memory")
        return plain(plan)

    monkeypatch.setattr(engine.runner, "execute", execute)
    with pytest.raises(EngineError, match="no memory"):
        search_beams(engine, PROMPTS, PARAMS)
    # What the broken step was to copy is made up for: the prefix cache holds no wrong block.
    check(search_beams(engine, PROMPTS, PARAMS), expected)


def test_logits_that_are_no_numbers_end_the_search(make_engine, model, monkeypatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(model, "logits", lambda hidden: torch.full((len(hidden), VOCAB), torch.nan))
    with pytest.raises(EngineError):
        search_beams(engine, PROMPTS, PARAMS)
