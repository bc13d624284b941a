"""What a fleet is to be: read from the arguments of `serve run`, which are texts, or of a Ray Serve configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import yaml

from vllm_teach.engine.failure import shown
from vllm_teach.engine.field_checks import check_number, check_whole, refuse, take_plain_numbers
from vllm_teach.engine.llm import LLM
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.async_engine.limits import ServingLimits
from vllm_teach.serving.http.settings import AppSettings

_NAMES = "served_model_names"
_TEXTS = ("model", "api_key")  # which stay texts, also where they look like numbers


@dataclass(frozen=True)
class ScalingSettings:
    """How many replicas there are and where, each checked on construction: InvalidArgumentError names the bad one.

    Ray Serve keeps between `min_replicas` and `max_replicas` of them, as many as let each have
    `target_ongoing_requests` requests in flight (None: half of what an engine takes into a step): more when that was
    too few for `upscale_delay` seconds, fewer when it was too many for `downscale_delay` seconds. Each takes `num_cpus`
    and `num_gpus` of one machine. One that is no longer needed has `drain_timeout` seconds to finish what is in flight.
    Every `health_check_period` seconds each is asked whether its engine lives.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    target_ongoing_requests: float | None = None
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    drain_timeout: float = 30.0
    health_check_period: float = 5.0

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        check_whole("min_replicas", self.min_replicas, 1)
        hint = f"use a whole number from min_replicas={self.min_replicas}"
        check_whole("max_replicas", self.max_replicas, self.min_replicas, hint=hint)
        if self.target_ongoing_requests is not None:
            hint = "use a number above 0"
            check_number("target_ongoing_requests", self.target_ongoing_requests, 0, open_low=True, hint=hint)
        check_number("health_check_period", self.health_check_period, 0, open_low=True, hint="use seconds above 0")
        for name in ("upscale_delay", "downscale_delay", "drain_timeout"):
            check_number(name, getattr(self, name), 0, hint="use seconds from 0")
        for name in ("num_cpus", "num_gpus"):
            check_number(name, getattr(self, name), 0, hint="use a number from 0")


@dataclass(frozen=True)
class FleetSettings:
    """A model, how each replica computes and serves it, and how many there are."""

    model: str
    engine_args: Mapping[str, Any]
    limits: ServingLimits
    app: AppSettings
    scaling: ScalingSettings

    @property
    def target_ongoing_requests(self) -> float:
        """Requests that one replica should have in flight."""
        return self.scaling.target_ongoing_requests or self._max_num_seqs / 2

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that Ray lets one replica have in flight.

        So many that its engine's queue is full before: what more comes gets the engine's answer, and neither that nor
        `/health` or `/metrics` has to wait in a proxy until another request has ended.
        """
        return 2 * (self.limits.max_queue + self._max_num_seqs)

    @property
    def _max_num_seqs(self) -> int:
        return self.engine_args.get("max_num_seqs", signature(LLM).parameters["max_num_seqs"].default)


def read_fleet_settings(arguments: Mapping[str, Any]) -> FleetSettings:
    """Return the settings that `arguments` state.

    Beside `model` these are the fields of `ScalingSettings`, `ServingLimits` and `AppSettings`, and the keyword
    arguments of `LLM`. A text is read as YAML: "4" is a number, "true" a flag, "null" none; several
    `served_model_names` are divided by commas. Raises InvalidArgumentError for a name that nobody knows and for a value
    that cannot be.
    """
    given = {name: _read(name, value) for name, value in arguments.items()}
    model = given.pop("model", None)
    if not isinstance(model, str) or not model:
        refuse("model", model, "name a model, as model=tiny")
    parts = [_take(kind, given) for kind in (ServingLimits, AppSettings, ScalingSettings)]
    known = [name for name, each in signature(LLM).parameters.items() if each.kind is each.KEYWORD_ONLY]
    unknown = [name for name in given if name not in known]
    if unknown:
        names = [field.name for kind in (ScalingSettings, ServingLimits, AppSettings) for field in fields(kind)]
        raise InvalidArgumentError(
            f"the argument {shown(unknown[0])} is unknown: use model, {', '.join(names)}, or an argument of LLM."
        )
    check_whole("max_num_seqs", given.get("max_num_seqs", 1), 1)
    # A server would fill a long log of events.
    return FleetSettings(model, {"max_events": 10_000, **given}, *parts)


def _read(name: str, value: Any) -> Any:
    if not isinstance(value, str) or name in _TEXTS:
        return value
    if name == _NAMES:
        return tuple(part.strip() for part in value.split(","))
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        refuse(name, value, "write it as in a YAML file")


def _take(kind: type[Any], given: dict[str, Any]) -> Any:
    """Return the settings of one kind, and take what they consist of out of `given`."""
    return kind(**{field.name: given.pop(field.name) for field in fields(kind) if field.name in given})
