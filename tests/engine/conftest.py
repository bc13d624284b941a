"""A tiny random model with a tokenizer of bytes: an engine that runs in milliseconds."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from vllm_teach.engine.events import EventLog
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.plan import StepResult
from vllm_teach.engine.request import SampledToken, Sequence
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler import Scheduler
from vllm_teach.engine.scheduler_config import SchedulerConfig
from vllm_teach.errors import EngineError
from vllm_teach.kvcache.manager import KVCacheManager
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
    """Return LLM.from_loaded for the tiny model: 150 blocks of 4 tokens unless `blocks` or `block_size` says otherwise.

    `host_blocks` is how many blocks the swap space holds.
    """

    def make(blocks: int = 150, host_blocks: int = 0, **limits) -> LLM:
        limits = {"block_size": 4, "num_kv_blocks": blocks, "attention_backend": "sdpa", **limits}
        block_bytes = limits["block_size"] * tiny_model.config.kv_bytes_per_token(4)
        return LLM.from_loaded(tiny_model, byte_tokenizer, swap_space=host_blocks * block_bytes / 2**30, **limits)

    return make


@pytest.fixture(scope="session")
def assert_empty() -> Callable[[LLMEngine], None]:
    """Return a check that nothing of any request is left in an engine, however it ended."""

    def check(engine: LLMEngine) -> None:
        pool, usage = engine.kv.pool, engine.kv.usage()
        assert pool.num_held == usage.host_blocks_used == 0
        assert pool.num_free + pool.num_idle == engine.kv.num_blocks  # idle: kept for later prompts
        assert not engine.scheduler.waiting
        assert not engine.scheduler.running
        assert not engine.scheduler.swapped
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
    """Return a factory of bare sequences for tests of scheduler and sampler; with n > 1 the siblings are its forks."""
    counter = iter(range(10**9))

    def make(prompt=(1, 2, 3), output=(), stop_ids=(), source: object = 0, priority=0, salt="", **params) -> Sequence:
        settings = SamplingParams(**params)
        family = [
            Sequence(
                seq_id=next(counter),
                index=index,
                prompt_token_ids=tuple(prompt),
                params=settings,
                max_total_tokens=len(prompt) + (settings.max_tokens or 0),
                stop_ids=frozenset(stop_ids) | frozenset(settings.stop_token_ids or ()),
                random_source=str(source),
                output_token_ids=list(output),
                priority=priority,
                salt=salt,
                share_prefix=settings.prompt_logprobs is None,
            )
            for index in range(settings.n)
        ]
        family[0].forks = family[1:]
        return family[0]

    return make


@pytest.fixture
def make_scheduler() -> Callable[..., Scheduler]:
    """Return a factory of schedulers with a cache of `blocks` blocks of 4 tokens; the rest are its config's fields."""

    def make(blocks: int = 30, host_blocks: int = 0, prefix_cache: str | None = None, **config) -> Scheduler:
        config = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "watermark": 0, **config}
        times, events = itertools.count(), EventLog(clock=lambda: float(next(times)))
        kv = KVCacheManager(blocks, 4, prefix_cache=prefix_cache, num_host_blocks=host_blocks, record=events.record)
        return Scheduler(kv, SchedulerConfig(**config), events)

    return make


@pytest.fixture
def run_step() -> Callable[..., list[tuple[Sequence, int, int]]]:
    """Return a function that makes a step of which every token is `token_id`, or what `tokens` says by sequence id.

    It returns what was planned: sequence, start, number of tokens. Sequences in `fail` get an error instead.
    """

    def run(scheduler: Scheduler, token_id: int = 9, tokens=None, fail=()) -> list[tuple[Sequence, int, int]]:
        plan = scheduler.schedule()
        result = StepResult(
            errors={item.sequence.seq_id: EngineError("broken.") for item in plan.items if item.sequence in fail}
        )
        for item in plan.items:
            drawn = (item.sequence, *item.sequence.forks) if item.samples and item.sequence not in fail else ()
            for each in drawn:
                result.tokens[each.seq_id] = SampledToken((tokens or {}).get(each.seq_id, token_id))
        scheduler.update(plan, result)
        return [(item.sequence, item.start, item.num_tokens) for item in plan.items]

    return run
