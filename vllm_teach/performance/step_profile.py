"""What an engine step is made of: by the clock, its bookkeeping; under PyTorch's profiler, the kinds of work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from vllm_teach.engine import model_runner
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import Attend
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.layers import Attention, RMSNorm
from vllm_teach.performance.timing import check_calls
from vllm_teach.performance.workload import Workload

KINDS = ("linear layers", "attention", "norms", "sampling", "batch inputs", "bookkeeping", "rest of the layers")
_PRODUCTS = ("aten::linear", "aten::matmul", "aten::addmm", "aten::mm", "mkldnn::_linear_pointwise")

Region = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class StepParts:
    """Seconds of decode steps of `num_sequences` sequences, medians over `num_steps`: the whole and its bookkeeping.

    `schedule` and `update` are the scheduler's and the cache's; `around` is what the engine does beside its three
    calls: texts, outputs, requests. `inputs` is making the batch's arrays, and part of the runner's time.
    """

    num_sequences: int
    num_steps: int
    step: float
    schedule: float
    update: float
    around: float
    inputs: float

    @property
    def bookkeeping_share(self) -> float:
        """The share of a step that is not the runner's: schedule, update and around."""
        return (self.schedule + self.update + self.around) / self.step


@dataclass(frozen=True)
class StepProfile:
    """The share of each of KINDS in decode steps of `num_sequences` sequences, under the profiler, which slows them.

    Shares are of the main thread's time, so they add up to 1. "rest of the layers" is everything in the forward pass
    that is none of the others: activations, rotary embedding, residual sums, and Python between the operators.
    """

    num_sequences: int
    num_steps: int
    shares: dict[str, float]


def measure_step_parts(llm: LLM, workload: Workload, num_steps: int = 20) -> StepParts:
    """Time `num_steps` steps in which every request of `workload` decodes.

    Prompts are served as they are; the requests are aborted afterwards. Raises InvalidArgumentError if the engine
    cannot run all of them at once.
    """
    check_calls("num_steps", num_steps, 1, "measures nothing")
    clock = _Clock()
    samples: list[dict[str, float]] = []
    with _decoding(llm, workload, num_steps), _regions(llm, clock.region):
        for _ in range(num_steps):
            clock.seconds = {}
            with clock.region("step"):
                llm.engine.step()
            samples.append(clock.seconds)

    def median(of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(of, samples))

    return StepParts(
        len(workload),
        num_steps,
        median(lambda sample: sample["step"]),
        median(lambda sample: sample["schedule"]),
        median(lambda sample: sample["update"]),
        median(lambda sample: sample["step"] - sample["schedule"] - sample["update"] - sample["execute"]),
        median(lambda sample: sample["batch inputs"]),
    )


def profile_steps(llm: LLM, workload: Workload, num_steps: int = 5) -> StepProfile:
    """Run `num_steps` decode steps of all requests under `torch.profiler`; see `measure_step_parts`.

    Raises InvalidArgumentError as well for a model that is no `Decoder`: it has other layers.
    """
    check_calls("num_steps", num_steps, 1, "measures nothing")
    model = llm.model
    if not isinstance(model, Decoder):
        raise InvalidArgumentError(
            f"llm runs a {type(model).__name__}, whose layers are not known here: use a Decoder."
        )
    with _decoding(llm, workload, num_steps), _regions(llm, record_function), ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, RMSNorm):
                hooks.enter_context(_around_module(module, "norms"))
            elif isinstance(module, Attention):
                hooks.enter_context(_around_attend(module))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(num_steps):
                with record_function("step"):
                    llm.engine.step()
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in profiler.events() or ():
        kind = _kind(event)
        if kind is not None:
            seconds[kind] += event.self_cpu_time_total
    whole = sum(seconds.values())
    return StepProfile(len(workload), num_steps, {kind: spent / whole for kind, spent in seconds.items()})


# What the time directly in a region counts as.
_KIND_OF_REGION = {kind: kind for kind in KINDS} | {
    "step": "bookkeeping",
    "schedule": "bookkeeping",
    "update": "bookkeeping",
    "execute": "rest of the layers",
}


def _kind(event: Any) -> str | None:
    """Return the kind of work an operator is: a matrix product's own, else its innermost region's; None outside."""
    product = False
    while event is not None:
        region = _KIND_OF_REGION.get(event.name)
        if region is not None:
            return "linear layers" if product and region != "attention" else region
        product |= event.name in _PRODUCTS
        event = event.cpu_parent
    return None


@contextmanager
def _decoding(llm: LLM, workload: Workload, num_steps: int) -> Iterator[None]:
    """Bring all requests to where they decode, with tokens left for `num_steps` steps; abort them at the end."""
    engine = llm.engine
    if len(workload) > engine.config.max_num_seqs:
        raise InvalidArgumentError(
            f"workload has {len(workload)} requests, but max_num_seqs={engine.config.max_num_seqs} run at once: "
            "give fewer."
        )
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    names = [engine.add_request({"prompt_token_ids": list(prompt)}, params) for prompt in workload.prompts]
    try:
        requests = [engine.get_request(name) for name in names]
        while not all(request.sequences[0].output_token_ids for request in requests):
            engine.step()
            for request in requests:
                if request.error is not None:
                    raise request.error
        engine.step()  # the first step of decode alone sets things up
        room = engine.max_model_len - max(request.sequences[0].num_tokens for request in requests)
        if room < num_steps or len(engine.scheduler.running) < len(requests):
            raise InvalidArgumentError(
                f"workload does not fit: its {len(requests)} requests do not all decode for {num_steps} steps in this "
                "KV cache, so give shorter prompts."
            )
        yield
    finally:
        for name in names:
            engine.abort(name)


class _Clock:
    """Adds up the seconds of regions by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def _regions(llm: LLM, region: Region) -> Iterator[None]:
    """Put the engine's calls into regions, as long as the context lasts."""
    engine = llm.engine
    calls: list[tuple[Any, str, str]] = [
        (engine.scheduler, "schedule", "schedule"),
        (engine.scheduler, "update", "update"),
        (engine.runner, "execute", "execute"),
        (model_runner.Batch, "of", "batch inputs"),
        (model_runner, "sample", "sampling"),
    ]
    with ExitStack() as undo:
        for owner, name, label in calls:
            undo.enter_context(_replaced(owner, name, _in_region(getattr(owner, name), region, label)))
        yield


def _in_region(call: Callable[..., Any], region: Region, label: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with region(label):
            return call(*args, **kwargs)

    return wrapped


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give `owner` the attribute for a while, and back what its own dictionary had, if anything."""
    absent = object()
    before = vars(owner).get(name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def _around_module(module: nn.Module, label: str) -> Iterator[None]:
    with _replaced(module, "forward", _in_region(module.forward, record_function, label)):
        yield


@contextmanager
def _around_attend(module: Attention) -> Iterator[None]:
    """Put what the layer calls to mix the tokens into a region; the projections around it are linear layers."""
    forward = module.forward

    def wrapped(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        return forward(x, cos, sin, _in_region(attend, record_function, "attention"))

    with _replaced(module, "forward", wrapped):
        yield
