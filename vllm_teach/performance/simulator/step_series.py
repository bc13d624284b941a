"""What each step of a simulation looked like: a column for each figure, so that a long run takes little memory."""

from __future__ import annotations

from array import array
from itertools import pairwise

from vllm_teach.engine.plan import Plan
from vllm_teach.engine.scheduler import Scheduler

COLUMNS = ("start", "seconds", "prefill_tokens", "decode_tokens", "running", "waiting", "swapped", "held_blocks")


class StepSeries:
    """A `virtual_time.Watch` with an entry for each step in each of COLUMNS, an attribute each.

    `start` and `seconds` are virtual seconds. Sequences (`running`, `waiting`, `swapped`) and the KV cache's
    `held_blocks` are counted at the end of the step, before those that it completes have left; who came meanwhile is
    among those who wait.
    """

    def __init__(self) -> None:
        self.start, self.seconds = array("d"), array("d")
        self.prefill_tokens, self.decode_tokens = array("q"), array("q")
        self.running, self.waiting, self.swapped = array("q"), array("q"), array("q")
        self.held_blocks = array("q")

    def __call__(self, start: float, end: float, plan: Plan, scheduler: Scheduler) -> None:
        """Append the figures of one step."""
        decode = plan.num_decode_tokens
        self.start.append(start)
        self.seconds.append(end - start)
        self.prefill_tokens.append(plan.num_tokens - decode)
        self.decode_tokens.append(decode)
        self.running.append(len(scheduler.running))
        self.waiting.append(len(scheduler.waiting))
        self.swapped.append(len(scheduler.swapped))
        self.held_blocks.append(scheduler.kv.pool.num_held)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which a step was computed."""
        return sum(self.seconds)

    def mean(self, column: str) -> float:
        """Return the mean of a column over the time in steps: each step counts by its seconds."""
        weighted = sum(value * seconds for value, seconds in zip(getattr(self, column), self.seconds, strict=True))
        return weighted / self.busy_seconds if self.busy_seconds else 0.0

    def thinned(self, most: int = 500) -> dict[str, list[float]]:
        """Return the columns as plain data, of at most `most` rows: each row stands for as many steps as the others.

        Of those, `start` is the first one's, `seconds` and tokens are sums, and the rest are the last one's.
        """
        edges = sorted({round(i * len(self) / most) for i in range(most + 1)})
        rows = list(pairwise(edges))
        columns: dict[str, list[float]] = {}
        for name in COLUMNS:
            values = getattr(self, name)
            if name == "start":
                columns[name] = [values[first] for first, _ in rows]
            elif name in ("seconds", "prefill_tokens", "decode_tokens"):
                columns[name] = [sum(values[first:end]) for first, end in rows]
            else:
                columns[name] = [values[end - 1] for _, end in rows]
        return columns
