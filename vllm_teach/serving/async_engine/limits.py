"""How much a server takes on, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_teach.engine.field_checks import check_number, check_whole, take_plain_numbers


@dataclass(frozen=True)
class ServingLimits:
    """Limits of an `AsyncLLMEngine`, each checked on construction: InvalidArgumentError names the bad one.

    `max_queue` is how many requests may wait, accepted but not yet in a step; one more is refused. One that was aborted
    leaves its place at once, though a step may go on before the engine hears of it. A request that waits longer than
    `queue_timeout`, or is not done `request_timeout` after it came, is aborted (None: never). An engine that has work
    and says nothing for `step_timeout` hangs. All times are in seconds.
    """

    max_queue: int = 256
    queue_timeout: float | None = None
    request_timeout: float | None = None
    step_timeout: float = 120.0

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        check_whole("max_queue", self.max_queue, 1)
        for name in ("queue_timeout", "request_timeout"):
            if getattr(self, name) is not None:
                hint = "use seconds above 0, or None for no limit"
                check_number(name, getattr(self, name), 0, open_low=True, hint=hint)
        check_number("step_timeout", self.step_timeout, 0, open_low=True, hint="use seconds above 0")
