"""Which backend serves a call: the choice, its reason, and for every other one why not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_teach import backends
from vllm_teach.attention.shapes import check_count
from vllm_teach.backends.hardware import Hardware, detect_hardware
from vllm_teach.backends.preference import Preference, prefer
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    from vllm_teach.backends.explanation import Explanation
    from vllm_teach.backends.measured import Measurements

POLICIES = ("threshold", "measured")
DEFAULT_THRESHOLD = 1024


@dataclass(frozen=True)
class Selection:
    """A choice and its account: `others` says for every backend that was not chosen why not."""

    choice: str
    reason: str
    others: dict[str, str]
    spec: AttentionSpec
    policy: str
    machine: str

    def explain(self) -> Explanation:
        """Return the account as a table, which prints as text and shows as HTML in a notebook."""
        from vllm_teach.backends.explanation import Explanation

        return Explanation(self)


def select_backend(
    spec: AttentionSpec,
    policy: str = "threshold",
    threshold: int = DEFAULT_THRESHOLD,
    usable: Iterable[str] | None = None,
    hardware: Hardware | None = None,
    measurements: Measurements | None = None,
) -> Selection:
    """Choose a backend for a call; the same arguments give the same choice.

    `policy` "threshold" is the articles' rule (see `preference`), by the call's length against `threshold`, the
    hardware and the batch; "measured" takes what `vllm-teach tune` found fastest (see `measured`). `usable` are the
    backends to choose from, all by default. `hardware` is this machine by default, `measurements` what was recorded on
    it.

    Raises InvalidArgumentError for an argument of the wrong type, an unknown policy or backend, when none of `usable`
    can serve the call, and when "measured" finds no measurements of this machine; CacheError when their file is broken.
    """
    _check_type("spec", spec, AttentionSpec)
    if policy not in POLICIES:
        raise InvalidArgumentError(f"policy is {policy!r}; choose one of {', '.join(POLICIES)}.")
    threshold = check_count("threshold", threshold, 1)
    among = None if usable is None else tuple(check_names("usable", usable))
    if policy == "threshold":
        measurements = None
    elif measurements is None:
        from vllm_teach.backends.tuning_file import load_measurements

        measurements = load_measurements(spec.device)
    else:
        from vllm_teach.backends.measured import Measurements

        _check_type("measurements", measurements, Measurements)
    if hardware is None:
        hardware = detect_hardware()
    _check_type("hardware", hardware, Hardware)
    return _select(spec, policy, threshold, among, hardware, measurements)


def check_names(argument: str, names: Iterable[str]) -> list[str]:
    """Return `names` as a list; raise InvalidArgumentError unless they, the argument, are names of backends."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidArgumentError(
            f"{argument} is {names!r}; give a list of backends, out of {', '.join(backends.names())}."
        )
    return [backends.get(name).name for name in names]


def _check_type(argument: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        found = type(value).__name__
        raise InvalidArgumentError(f"{argument} is of type {found}; it must be of type {wanted.__name__}.")


# A model asks for the same few specs in every layer and step.
@lru_cache(maxsize=4096)
def _select(
    spec: AttentionSpec,
    policy: str,
    threshold: int,
    among: tuple[str, ...] | None,
    hardware: Hardware,
    measurements: Measurements | None,
) -> Selection:
    refused = refusals(spec, hardware, among)
    preference = prefer(spec, threshold, hardware)
    candidates = [name for name in preference.order if name not in refused]
    if not candidates:
        listed = "; ".join(f"{name}: {reason.removesuffix('.')}" for name, reason in refused.items())
        raise InvalidArgumentError(f"No backend can serve this call ({listed}).")
    timed = None if measurements is None else measurements.choose(spec, candidates)
    if timed is not None:
        choice, reason, others = timed
    else:
        choice = candidates[0]
        untimed = "Nothing like this call was timed, so the threshold decides: " if policy == "measured" else ""
        reason = untimed + _reason(choice, preference)
        others = {name: preference.behind.get(name, f"{choice} comes before it.") for name in candidates[1:]}
    everyone = refused | others
    others = {name: everyone[name] for name in sorted(everyone, key=lambda name: _place(name, preference))}
    return Selection(choice, reason, others, spec, policy, hardware.describe(spec.device))


def refusals(spec: AttentionSpec, hardware: Hardware, among: Collection[str] | None = None) -> dict[str, str]:
    """Return why each backend that cannot serve such a call there cannot: left out of `among`, machine, or call."""
    refused = {}
    for name in backends.names():
        if among is not None and name not in among:
            reason: str | None = "It is not among the usable ones that were given."
        else:
            reason = backends.get(name).supports(spec) or hardware.why_not(name, spec.device)
        if reason is not None:
            refused[name] = reason
    return refused


def _reason(choice: str, preference: Preference) -> str:
    if choice in preference.behind:
        return f"{preference.reason}; no better one can serve the call."
    if preference.order[0] != choice:
        return f"{preference.reason}; what comes before {choice} cannot serve the call."
    return f"{preference.reason}."


def _place(name: str, preference: Preference) -> int:
    """Return where a backend stands in the order of preference; behind its end for those that have no place in it."""
    return preference.order.index(name) if name in preference.order else len(preference.order)


def explain(spec: AttentionSpec, **options: object) -> Explanation:
    """Return `select_backend(spec, **options).explain()`: which backend serves such a call, and why not the others."""
    return select_backend(spec, **options).explain()  # type: ignore[arg-type]
