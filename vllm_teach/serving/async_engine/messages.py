"""What the server's event loop and the engine's loop say to each other. All of it can be pickled.

The engine computes in a thread or a process of its own, so that a step never holds up a connection. Each side only
sends; neither reads the other's state.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_teach.engine.outputs import Logprob, RequestMetrics
from vllm_teach.engine.prompts import TokensPrompt
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import VllmTeachError
from vllm_teach.serving.metrics.step_report import StepReport


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Queue a request. Its first answer is a `RequestDelta` when it is first in a step, or at once if it is refused.

    Each request gets exactly one delta with `finished`, however it ends, unless the engine fails. `arrival_time` is
    when the server took it, by `time.perf_counter`, which the processes of a machine share (None: when the engine did).
    With `whole` nothing is said between the first step and the end.
    """

    request_id: str
    prompt: TokensPrompt
    params: SamplingParams
    priority: int = 0
    arrival_time: float | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request and free its blocks before the next step. One that is unknown, or has ended, is left alone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every computed prefix."""


@dataclass(frozen=True, slots=True)
class CheckRanks:
    """One of the processes that compute together may have ended: look, though no step needs them now."""


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End the loop; what is in flight is aborted."""


ToEngine = AddRequest | AbortRequest | ResetPrefixCache | CheckRanks | StopEngine


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The model is loaded: what the server has to know of it."""

    model: str
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    num_devices: int = 1


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What is new of one completion: `text` to be appended, `token_ids`, and `logprobs` one for each of these."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What is new of one request after a step. One without completions says that its prompt is being computed.

    `error` ends the request. `prompt_logprobs` comes once, whole, with the first token. The last delta has
    `metrics`, and the tokens of the prompt and of all completions together.
    """

    request_id: str
    completions: tuple[CompletionDelta, ...] = ()
    finished: bool = False
    error: VllmTeachError | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """What a step brought, or, with no deltas, the engine's word that it is alive and idle."""

    deltas: tuple[RequestDelta, ...] = ()
    report: StepReport | None = None


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The loop has ended with `error`; whatever was in flight is lost."""

    error: VllmTeachError


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The last message: the engine's thread or process is gone, and all that belonged to it."""


FromEngine = EngineReady | EngineUpdate | EngineFailed | EngineEnded
