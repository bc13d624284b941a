"""Common problems and their cures: text quality, memory that runs out, times that vary (B-troubleshooting)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vllm_teach.performance.timing import Timing, time_median
from vllm_teach.validation.audit.check import Check, at_least, at_most
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import Finding, counted, measured
from vllm_teach.validation.audit.lab import MODEL, Lab

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_teach.kvcache.manager import KVCacheManager
    from vllm_teach.models.attend import Attend

_TABLE = "B-troubleshooting"


@experiment(
    _TABLE,
    "text_quality_drops",
    at_least(
        "a softmax in 16 bits spoils the text", "loss, softmax in bfloat16, more than float32's", 0.01,
        "a hundredth of a nat a token, one per cent of perplexity: less is not felt",
    ),
    at_least("a wrong scale does", "loss, scale forgotten, more than float32's", 0.01, "the same"),
    at_most(
        "a softmax in float32 repairs it", "loss, float32 softmax on 16-bit inputs, more than float32's", 0.01,
        "the same",
    ),
)  # fmt: skip
def text_quality(lab: Lab) -> Iterator[Finding]:
    """Read a text with the softmax in float32, kept in bfloat16, and with a wrong scale, in the same model."""
    import torch

    from vllm_teach import data
    from vllm_teach.models import load_model, load_tokenizer, resolve_model

    name, length = lab.pick((MODEL, 1024), ("tiny", 400))
    path = resolve_model(name)
    model = load_model(path, torch.float32)
    story = data.path("texts/corran_sound.txt").read_text(encoding="utf-8")
    ids = torch.tensor(load_tokenizer(path).encode(story)[:length])
    setting = f"{name}, {length:,} tokens of a story it has not seen"

    def loss(attend: Attend) -> float:
        with torch.inference_mode():
            hidden = model(ids, torch.arange(len(ids)), attend)
            return float(torch.nn.functional.cross_entropy(model.logits(hidden)[:-1], ids[1:]))

    right = loss(_attend())
    yield counted("loss, float32", right, "nats a token", setting)
    for name, attend in (
        ("softmax in bfloat16", _attend(in_16_bits=True)),
        ("float32 softmax on 16-bit inputs", _attend(inputs_16_bits=True)),
        ("scale forgotten", _attend(scale=8.0)),
    ):
        yield counted(f"loss, {name}, more than float32's", loss(attend) - right, "nats a token", setting)


def _attend(scale: float = 1.0, in_16_bits: bool = False, inputs_16_bits: bool = False) -> Attend:
    """Return causal attention for one text: its scores times `scale`, its softmax or its inputs in bfloat16."""
    import torch

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        if inputs_16_bits:
            q, k, v = (x.bfloat16().float() for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5 * scale
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        if in_16_bits:
            weights = (scores.bfloat16() - scores.bfloat16().amax(-1, keepdim=True)).exp()
            total = torch.zeros_like(weights[..., 0])
            for key in range(weights.shape[-1]):  # a sum kept in bfloat16, one key after the other
                total = total + weights[..., key]
            return torch.einsum("hqk,khd->qhd", (weights / total[..., None]).float(), v)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    return attend


@experiment(
    _TABLE,
    "oom_after_long_running",
    at_most(
        "blocks are released when requests end", "blocks held after 300 requests", 0.0, "one held block is a leak"
    ),
    at_least(
        "the check finds a leak", "blocks held after 20 leaking requests", 1.0, "one held block shows it"
    ),
    at_least(
        "an eviction policy is the cure", "leaking requests served, LRU eviction / none", 1.05,
        "5 % more requests before memory runs out would be some cure", 1.0,
    ),
)  # fmt: skip
def leak(lab: Lab) -> Iterator[Finding]:
    """Run the cache with requests that release their blocks and with some that do not, with and without eviction."""
    kept = _manager("lru")
    for number in range(300):
        _serve(kept, number)
        kept.free(number)
    yield counted("blocks held after 300 requests", kept.usage().held_blocks, "blocks", "64 blocks, prompts of 40")
    leaking = _manager("lru")
    for number in range(20):
        _serve(leaking, number)
    yield counted("blocks held after 20 leaking requests", leaking.usage().held_blocks, "blocks", "nobody frees them")
    served = {policy: _until_full(policy) for policy in ("lru", "none")}
    yield counted(
        "leaking requests served, LRU eviction / none", served["lru"] / served["none"], "x",
        f"{served['lru']} and {served['none']} requests until 64 blocks are gone: held blocks cannot be evicted",
    )  # fmt: skip


def _manager(policy: str) -> KVCacheManager:
    from vllm_teach.kvcache.manager import KVCacheManager

    return KVCacheManager(64, eviction=policy)


def _serve(manager: KVCacheManager, number: int) -> bool:
    """Compute a prompt of 40 tokens that no other request has; return whether there was room."""
    prompt = [1000 * number + i for i in range(40)]
    manager.begin(number, prompt)
    if not manager.extend(number, len(prompt)):
        return False
    manager.commit(number, len(prompt), lambda start, count: prompt[start : start + count])
    return True


def _until_full(policy: str) -> int:
    manager = _manager(policy)
    return next(number for number in range(1000) if not _serve(manager, number))


@experiment(
    _TABLE,
    "same_input_varying_time",
    at_least(
        "without the flag results differ, so that determinism is what to check", "calls with another result", 1.0,
        "one differing bit in any of the calls would be enough",
    ),
    at_least(
        "the flag governs something of a step", "convolutions in a pass of the model", 1.0,
        "cudnn.deterministic chooses among cuDNN's convolutions, so that a model without one cannot feel it",
    ),
    Check(
        "with the flag times are even", "spread with the flag / without", 0.0, 0.8,
        "a fifth less of the slowest call over the fastest; only on a GPU, for a processor has no cuDNN", 1.0, True,
    ),
)  # fmt: skip
def varying_time(lab: Lab) -> Iterator[Finding]:
    """Compare results without the flag, count what it governs, and time a text alone and beside five long prompts."""
    import torch

    q, k, v = (torch.randn(1, 8, 512, 64, device=lab.device) for _ in range(3))

    def attend() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    first = attend()
    other = sum(not torch.equal(first, attend()) for _ in range(20))
    yield counted("calls with another result", other, "of 20", f"sdpa, 512 tokens, no flag, {lab.label}")
    operators = _operators_of_a_pass()
    convolutions = sum("conv" in name for name in operators)
    yield counted("convolutions in a pass of the model", convolutions, "", f"of {len(operators):,} operators; tiny")
    if lab.on_gpu:
        spreads = Timing.of([_spread(attend, lab, True) / _spread(attend, lab, False) for _ in range(lab.pick(15, 7))])
        yield measured("spread with the flag / without", spreads, "x", f"sdpa, 512 tokens, {lab.label}")
    jitter = Timing.of([_jitter(5) / _jitter(0) for _ in range(5)])
    yield measured(
        "longest wait over median, neighbours in the batch / alone", jitter, "x",
        "the tiny model, 12 tokens; five prompts of 450 tokens arrive meanwhile: what does make times vary",
    )  # fmt: skip


def _operators_of_a_pass() -> list[str]:
    """Return the names of PyTorch's operators that a forward pass of the tiny model calls."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from vllm_teach.models import load_model, resolve_model
    from vllm_teach.models.attend import full_causal

    names: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    model = load_model(resolve_model("tiny"), torch.float32)
    ids = torch.arange(5, 37)
    with torch.inference_mode(), Watch():
        model.logits(model(ids, torch.arange(len(ids)), full_causal()))
    return names


def _spread(call: Callable[[], object], lab: Lab, flag: bool) -> float:
    """Return the slowest of some calls over the fastest, with cudnn.deterministic set to `flag` meanwhile."""
    import torch

    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = flag
    try:
        timing = time_median(call, repeats=9, device=lab.device)
    finally:
        torch.backends.cudnn.deterministic = before
    return timing.high / timing.low


def _jitter(neighbours: int) -> float:
    """Return the longest wait between two tokens of one request over their median."""
    from vllm_teach import LLM, SamplingParams

    llm = LLM("tiny", device="cpu", num_kv_blocks=256, enable_prefix_caching=False)
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    request = engine.get_request(engine.add_request({"prompt_token_ids": list(range(5, 45))}, params))
    for _ in range(4):
        engine.step()
    for number in range(neighbours):
        engine.add_request({"prompt_token_ids": [7 + number, *range(100, 549)]}, SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    waits = request.metrics.inter_token_times
    return max(waits) / statistics.median(waits)
