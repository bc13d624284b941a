"""A tiny random model with a tokenizer of bytes: an engine that runs in milliseconds."""

from collections.abc import Callable, Iterator

import pytest
import torch

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.request import Sequence
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder

EOS = 256


class ByteTokenizer:
    """Token i < 256 is byte i, 256 ends a text, 257 and 258 open and close a turn. Half the bytes are no character."""

    stop_token_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        specials = {} if skip_special_tokens else {256: b"<eos>", 257: b"<user>", 258: b"<end>"}
        return b"".join(bytes([i]) if i < 256 else specials.get(i, b"") for i in ids).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages) -> list[int]:
        return [token for message in messages for token in [257, *self.encode(message["content"]), 258]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    config = ModelConfig("LlamaForCausalLM", 259, 32, 48, 2, 4, 2, 8, 128)
    model = Decoder(config).init_random(seed=1)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.mul_(20.0)  # otherwise all tokens are about equally likely
    return model


@pytest.fixture
def make_llm(tiny_model: Decoder, byte_tokenizer: ByteTokenizer) -> Callable[..., LLM]:
    """Return LLM.from_loaded for the tiny model: 600 slots unless `slots` says otherwise."""

    def make(slots: int = 600, **limits) -> LLM:
        size = slots * tiny_model.config.kv_bytes_per_token(4)
        return LLM.from_loaded(tiny_model, byte_tokenizer, **{"kv_cache_memory_bytes": size, **limits})

    return make


@pytest.fixture(scope="session")
def assert_empty() -> Callable[[LLMEngine], None]:
    """Return a check that nothing of any request is left in an engine, however it ended."""

    def check(engine: LLMEngine) -> None:
        assert engine.kv.slots_held == engine.kv.tokens_stored == 0
        assert engine.kv.longest_free_run == engine.kv.num_slots
        assert not engine.scheduler.waiting
        assert not engine.scheduler.running
        assert not engine.has_unfinished_requests()

    return check


@pytest.fixture
def engine(make_llm: Callable[..., LLM], assert_empty: Callable[[LLMEngine], None]) -> Iterator[LLMEngine]:
    """The engine of one; whatever the test does, nothing of a request may be left in it."""
    engine = make_llm().engine
    yield engine
    assert_empty(engine)


@pytest.fixture
def llm(make_llm: Callable[..., LLM], assert_empty: Callable[[LLMEngine], None]) -> Iterator[LLM]:
    """One of them; whatever the test does, nothing of a request may be left in it."""
    llm = make_llm()
    yield llm
    assert_empty(llm.engine)


@pytest.fixture
def make_sequence() -> Callable[..., Sequence]:
    """Return a factory of bare sequences for tests of scheduler and sampler."""
    counter = iter(range(10**9))

    def make(prompt=(1, 2, 3), output=(), stop_ids=(), source: object = 0, **params) -> Sequence:
        settings = SamplingParams(**params)
        return Sequence(
            seq_id=next(counter),
            index=0,
            prompt_token_ids=tuple(prompt),
            params=settings,
            max_total_tokens=len(prompt) + (settings.max_tokens or 0),
            stop_ids=frozenset(stop_ids) | frozenset(settings.stop_token_ids or ()),
            random_source=str(source),
            output_token_ids=list(output),
        )

    return make
