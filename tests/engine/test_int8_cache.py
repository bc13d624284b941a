"""`kv_cache_dtype="int8"`: what attention reads, and that no way of keeping, moving or losing blocks changes it.

The model here looks its q, k and v up by token and position, so that they have the same bits in every batch: what a
request says alone is exactly what it must say in company.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_teach import LLM, RequestOutput, SamplingParams
from vllm_teach.attention.patterns import GlobalTokens, LocalWindow
from vllm_teach.backends import cpu
from vllm_teach.backends.dispatch import attend
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.events import Preempted
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.quantized_storage import (
    DequantizedBlocks,
    QuantizedKVStorage,
    pack,
    packed_bytes,
    unpack,
)
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.models.attend import Attend, window_size
from vllm_teach.models.config import ModelConfig

VOCAB, CONTEXT = 61, 128
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, seed=5, max_tokens=28, ignore_eos=True, logprobs=2)
THREE = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, n=3)
SINKS = GlobalTokens(2) | LocalWindow(5)
SMALL: dict[str, Any] = {"num_kv_blocks": 11, "max_model_len": 40, "watermark": 0}
# In GiB: 30 blocks of 4 tokens.
SWAP = {"preemption_mode": "swap", "swap_space": 30 * 4 * 2 * 2 * 2 * packed_bytes(8, torch.float32) / 2**30}


class LookUpModel:
    """Two layers, the first with a window of 9 keys, of 4 query and 2 key heads with 8 numbers each."""

    config = ModelConfig(
        "MistralForCausalLM", VOCAB, 64, 48, 2, 4, 2, 8, CONTEXT, sliding_window=9, sliding_layers=(True, False)
    )
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(4)
        # [layers, vocabulary, positions, heads, head_dim]: 4 heads of q, 2 of k, 2 of v
        self._qkv = 2 * torch.randn(2, VOCAB, CONTEXT, 8, 8, generator=source)
        self._head = 3 * torch.randn(64, VOCAB, generator=source)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        read = []
        for layer in range(2):
            q, k, v = self._qkv[layer, token_ids, positions].split((4, 2, 2), dim=1)  # [tokens, heads, head_dim]
            read.append(attend(layer, q, k, v, window=self.config.window(layer)).flatten(1))
        return torch.cat(read, dim=1)  # [tokens, 64]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._head


class NoTokenizer:
    stop_token_ids = ()


MODEL = LookUpModel()
START = [(5 * i) % VOCAB for i in range(10)]
PROMPTS = [[*START, 1, 2], [*START, 1, 3], START[:6], [9] * 5, [*START, 1, 2]]
PARAMS = [LONG, LONG, THREE, GREEDY, LONG]


def make(**limits: Any) -> LLM:
    limits = {"kv_cache_dtype": "int8", "block_size": 4, "num_kv_blocks": 150, "attention_backend": "sdpa", **limits}
    return LLM.from_loaded(MODEL, NoTokenizer(), **limits)  # type: ignore[arg-type]


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    """The outputs, of an engine whose cache holds NaN where nobody wrote, and holds nothing of a request at the end."""
    storage = llm.engine.runner.storage
    storage.keys[:, : storage.num_blocks] = storage.values[:, : storage.num_blocks] = -1  # a scale of NaN
    storage.host.fill_(-1)
    quiet = [each.copy() for each in params]
    for each in quiet:
        each.detokenize = False
    outputs = llm.generate(prompts, quiet, use_tqdm=False)
    pool, usage = llm.engine.kv.pool, llm.engine.kv.usage()
    assert pool.num_held == usage.host_blocks_used == 0
    return outputs


@pytest.fixture(scope="module")
def all_alone() -> list[RequestOutput]:
    """What each request says in an engine of its own."""
    return [
        generate(make(enable_prefix_caching=False), [prompt], [params])[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def logprobs_alone(ids: list[int], pattern: Any, exact: bool) -> Tensor:
    """The log-probabilities after each of `ids`: no cache, the plain formula, on K and V that were rounded once."""

    def attend_alone(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        if not exact:
            k, v = (unpack(pack(each), torch.empty_like(each)) for each in (k, v))
        masks = {"causal": True, "window_size": window_size(window), "pattern": pattern}
        return attend(q[None], k[None], v[None], backend="naive", **masks)[0]

    hidden = MODEL(torch.tensor(ids), torch.arange(len(ids)), attend_alone)
    return MODEL.logits(hidden).log_softmax(-1)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled"])
@pytest.mark.parametrize("pattern", [None, SINKS], ids=["causal", "sinks"])
def test_attention_reads_what_was_rounded_once(backend: str, pattern: Any) -> None:
    """Prompts in chunks, decode steps, windows and blocks given back; each token's own K and V are rounded too."""
    llm = make(attention_backend=backend, attention_pattern=pattern, max_num_batched_tokens=13, max_num_seqs=3)
    prompts = [[(7 * start + 3 * i) % VOCAB for i in range(length)] for start, length in enumerate((1, 4, 17, 30))]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=3)
    for prompt, output in zip(prompts, generate(llm, prompts, [params] * 4), strict=True):
        completion = output.outputs[0]
        known = prompt + completion.token_ids
        wanted = logprobs_alone(known, pattern, exact=False)[len(prompt) - 1 : -1]
        plain = logprobs_alone(known, pattern, exact=True)[len(prompt) - 1 : -1]
        assert (wanted - plain).abs().max() > 1e-2  # or the comparison below would tell nothing
        assert completion.token_ids == wanted.argmax(-1).tolist()
        for row, entries in zip(wanted, completion.logprobs, strict=True):
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.parametrize("placement", ["scattered", "contiguous", "prefer_contiguous"])
@pytest.mark.parametrize("memory", [{}, SMALL, {**SMALL, **SWAP}], ids=["roomy", "recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", [None, "hash", "radix"])
def test_no_way_of_keeping_blocks_changes_a_token(
    all_alone: list[RequestOutput], placement: str, memory: dict[str, Any], prefix_cache: str | None
) -> None:
    """Shared prefixes (also half a block), copies on write, evictions, moves, swaps and recomputed sequences."""
    if placement == "contiguous" and memory:
        memory = {**memory, "num_kv_blocks": 16}  # a sequence of 40 tokens lies in a run of 16 blocks
    limits = {"kv_placement": placement, "max_num_seqs": 8, "max_num_batched_tokens": 20, **memory}
    # Where there is a compiler "auto" reads the codes as they lie, "sdpa" copies of their numbers.
    limits["attention_backend"] = "auto" if placement == "scattered" else "sdpa"
    limits |= {"enable_prefix_caching": False} if prefix_cache is None else {"prefix_cache": prefix_cache}
    llm = make(**limits)
    for output, alone in zip(generate(llm, PROMPTS, PARAMS), all_alone, strict=True):
        assert tokens(output) == tokens(alone)
        assert output.outputs[0].cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob, abs=1e-3)
    usage = llm.engine.kv.usage()
    assert usage.copies > 0
    if memory and placement != "contiguous":
        assert llm.engine.events.of(Preempted)
        assert (usage.swapped_out > 0) == (memory.get("preemption_mode") == "swap")
    if prefix_cache is not None and placement == "scattered":
        assert usage.hit_tokens > 0


def test_our_kernel_reads_the_codes_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu.unavailable() is not None:
        pytest.skip("no compiler")
    copies: list[Tensor] = []

    def noting(storage: QuantizedKVStorage, block_table: Tensor) -> DequantizedBlocks:
        copies.append(block_table)
        return DequantizedBlocks(storage, block_table)

    monkeypatch.setattr("vllm_teach.engine.model_runner.DequantizedBlocks", noting)
    for backend, copied in (("auto", False), ("cpu", False), ("sdpa", True)):
        generate(make(attention_backend=backend), [[3] * 9], [GREEDY])
        assert bool(copies) == copied


def test_an_aborted_request_leaves_its_neighbour_alone() -> None:
    engine = make(**SMALL).engine
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    gone, kept = (engine.get_request(engine.add_request([token] * 12, params)) for token in (1, 2))
    for _ in range(4):
        engine.step()
    engine.abort(gone)
    run_to_end(engine)
    assert engine.kv.pool.num_held == 0
    assert kept.output().outputs[0].token_ids == tokens(generate(make(), [[2] * 12], [params])[0])[0]


def run_to_end(engine: LLMEngine) -> None:
    for _ in range(500):
        if not engine.has_unfinished_requests():
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def test_a_decoder_says_nearly_the_same(make_llm: Callable[..., LLM]) -> None:
    """On the random Decoder, whose K and V depend on one another: near, and not equal."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = [(11 * i) % 256 for i in range(60)]
    plain, packed = (
        make_llm(kv_cache_dtype=kind).generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
        for kind in ("auto", "int8")
    )
    differences = [
        abs(a[token].logprob - b[token].logprob) for token, a, b in zip(prompt[1:], plain[1:], packed[1:], strict=True)
    ]
    assert 1e-4 < sum(differences) / len(differences) < 0.2


def test_the_same_bytes_hold_more_tokens(tmp_path) -> None:
    token_bytes = 2 * 2 * 2 * (8 + 4)  # K and V, layers, heads; 8 codes and a float32 scale
    limits = {"kv_cache_memory_bytes": 7 * 16 * token_bytes + 5, "swap_space": (3.5 * 16 * token_bytes) / 2**30}
    llm = make(**limits, num_kv_blocks=None, block_size=16, swap_file=tmp_path / "swap")
    engine, storage = llm.engine, llm.engine.runner.storage
    assert isinstance(storage, QuantizedKVStorage)
    assert (engine.kv.num_blocks, engine.kv.num_host_blocks) == (7, 3)
    assert storage.keys.nbytes + storage.values.nbytes == (7 + 1) * 16 * token_bytes
    assert (tmp_path / "swap").stat().st_size == 3 * 16 * token_bytes
    assert engine.scheduler.config.costs.kv_bytes_per_token == token_bytes
    with pytest.raises(InvalidArgumentError, match=f"a block of 16 tokens has {16 * token_bytes} bytes"):
        make(kv_cache_memory_bytes=9, num_kv_blocks=None, block_size=16)


def test_auto_is_the_plain_cache() -> None:
    assert EngineConfig().kv_cache_dtype == "auto"
    storage = make(kv_cache_dtype="auto").engine.runner.storage
    assert type(storage) is KVStorage
    assert storage.keys.dtype == torch.float32
