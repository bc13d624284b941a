"""What all routes share: the engine, the settings, the metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from vllm_teach.engine.failure import shown
from vllm_teach.engine.field_checks import refuse
from vllm_teach.errors import InvalidArgumentError, VllmTeachError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.http.http_errors import ApiError
from vllm_teach.serving.http.settings import AppSettings
from vllm_teach.version import __version__

if TYPE_CHECKING:
    from vllm_teach.serving.metrics.server_metrics import ServerMetrics

# What OpenAI's clients are to compare where a seed did not bring the same text: the software that computed it.
FINGERPRINT = f"vllm_teach-{__version__}"


@dataclass(frozen=True)
class Service:
    """One engine as a service. `created` is when it began, in seconds since 1970."""

    engine: AsyncLLMEngine
    settings: AppSettings
    metrics: ServerMetrics | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model; answers call it by the first. EngineDeadError before the engine's start."""
        return self.settings.served_model_names or (self.engine.ready.model,)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not here; None, which vLLM also takes, means the one that is."""
        if name is not None and name not in self.model_names:
            raise ApiError(
                f"model={shown(name)} does not exist here: use {self.model_names[0]!r}.",
                404,
                code="model_not_found",
                param="model",
            )

    def check_choices(self, n: int | None, prompts: int = 1) -> None:
        """Raise InvalidArgumentError when `n` completions of each prompt are more than one request may have."""
        most = self.settings.max_choices
        if (n or 1) * prompts > most:
            whose = "" if prompts == 1 else f" for each of {prompts} prompts"
            raise InvalidArgumentError(f"n={n or 1}{whose} is not valid: one request has at most {most} completions.")

    def check_logprobs(self, name: str, asked: int | None) -> None:
        """Raise InvalidArgumentError for more log-probabilities than are given."""
        if asked is not None and asked > self.settings.max_logprobs:
            refuse(name, asked, f"use at most {self.settings.max_logprobs}")

    def count_error(self, error: Exception) -> None:
        """Count what the engine, which counts its own, knows nothing of: a refusal, or a failure in writing."""
        if self.metrics is None:
            return
        match error:
            case ApiError():
                self.metrics.on_error(error.code or "invalid_request")
            case VllmTeachError():
                self.metrics.on_error(error)
            case _:
                self.metrics.on_error("internal_error")


async def get_service(request: Request) -> Service:
    """Return the service of the app that got `request`. Were it no coroutine, FastAPI would call it in a thread."""
    return request.app.state.service


ServiceOfApp = Annotated[Service, Depends(get_service)]
