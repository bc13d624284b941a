"""Adds up the records of a load test as they come, so that a long one takes no more memory than a short one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.load_test.log_histogram import ACCURACY, LogHistogram
from vllm_teach.performance.load_test.record import ANSWERED, FAILED, OUTCOMES, REFUSED, RequestRecord

LATENCIES = ("ttft", "itl", "tpot", "e2e")
_MOST_CLASSES = 50
_OTHER = "other"


@dataclass(frozen=True)
class Slo:
    """Service-level objective: the seconds that a good answer does not exceed, each None where it does not matter.

    Goodput is the rate of answers that meet all of them (Zhong et al., "DistServe", OSDI 2024, section 2). One token
    has no TPOT and meets any.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name, limit in self.limits.items():
            if not (math.isfinite(limit) and limit > 0):
                raise InvalidArgumentError(f"{name}={limit!r} is no objective: give seconds above 0.")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        every = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {name: limit for name, limit in every.items() if limit is not None}

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a request was answered within all limits."""
        if record.outcome != ANSWERED:
            return False
        values = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
        return all(value is None or value <= self.limits[name] for name, value in values.items() if name in self.limits)


class LoadTally:
    """Sums over all records. Latencies are of answered requests only, in seconds, from the time each was due.

    `good` of `judged` requests met the objective; aborted and malformed ones are not judged, failed ones are not good.
    `messages` has the first one of each class of errors. Tokens are of answered requests: `tokens_from` counts these by
    who counted their output, `off_length` those whose output has another length than planned. `seconds` go from the
    first due time to the last end.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.errors: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.messages: dict[str, str] = {}
        self.tokens_from: Counter[str] = Counter()
        self.latencies = {name: LogHistogram() for name in LATENCIES}
        self.send_lag = LogHistogram()
        self.good = self.judged = 0
        self.prompt_tokens = self.output_tokens = self.events = 0
        self.planned_prompt = self.planned_output = self.off_length = 0
        self.begin, self.finish, self.open_seconds = math.inf, -math.inf, 0.0

    @property
    def count(self) -> int:
        """How many requests have ended."""
        return sum(self.outcomes.values())

    @property
    def seconds(self) -> float:
        """From the first request's due time to the last one's end; 0 when none has ended."""
        return max(0.0, self.finish - self.begin) if self.count else 0.0

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.outcomes[record.outcome] += 1
        self.begin, self.finish = min(self.begin, record.due), max(self.finish, record.end)
        self.open_seconds += record.end - record.sent
        self.send_lag.add(max(0.0, record.sent - record.due))
        if record.outcome == FAILED:
            kind = _count_class(self.errors, record.error or "unknown")
            if record.message is not None:
                self.messages.setdefault(kind, record.message)
        elif record.outcome == REFUSED:
            _count_class(self.refusals, record.error or "unknown")
        elif record.outcome == ANSWERED:
            self._add_answer(record)
        if record.outcome in (ANSWERED, FAILED) and not record.malformed:
            self.judged += 1
            self.good += self.slo is not None and self.slo.met_by(record)

    def rate(self, amount: float) -> float:
        """Return `amount` a second of the test; 0 when nothing has ended."""
        return amount / self.seconds if self.seconds else 0.0

    @property
    def mean_in_flight(self) -> float:
        """Requests that were open on average."""
        return self.rate(self.open_seconds)

    @property
    def tokens_per_event(self) -> float | None:
        """Output tokens that an event of a stream carried on average; None when nothing was streamed."""
        return self.output_tokens / self.events if self.events else None

    def to_json(self) -> dict[str, object]:
        """Return sums, rates and `LogHistogram.summary` of the latencies as plain data; `goodput` None without SLO."""
        return {
            "seconds": self.seconds,
            "outcomes": dict(self.outcomes),
            "errors": dict(self.errors.most_common()),
            "error_messages": dict(self.messages),
            "refusals": dict(self.refusals.most_common()),
            "requests_per_second": self.rate(self.outcomes[ANSWERED]),
            "output_tokens_per_second": self.rate(self.output_tokens),
            "prompt_tokens_per_second": self.rate(self.prompt_tokens),
            "mean_in_flight": self.mean_in_flight,
            "latencies": {name: histogram.summary() for name, histogram in self.latencies.items()},
            "percentile_accuracy": ACCURACY,
            "send_lag": self.send_lag.summary(),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "planned_prompt_tokens": self.planned_prompt,
            "planned_output_tokens": self.planned_output,
            "answers_off_planned_length": self.off_length,
            "tokens_from": dict(self.tokens_from),
            "tokens_per_event": self.tokens_per_event,
            "slo": None if self.slo is None else self.slo.limits,
            "good": self.good,
            "judged": self.judged,
            "goodput": None if self.slo is None else self.rate(self.good),
        }

    def _add_answer(self, record: RequestRecord) -> None:
        for name in ("ttft", "tpot", "e2e"):
            value = getattr(record, name)
            if value is not None:
                self.latencies[name].add(max(0.0, value))
        for gap in record.gaps:
            self.latencies["itl"].add(gap)
        self.prompt_tokens += record.prompt_tokens if record.prompt_tokens is not None else record.planned_prompt_len
        self.output_tokens += record.output_tokens or 0
        self.tokens_from[record.tokens_from or "events"] += 1
        self.events += record.events
        self.planned_prompt += record.planned_prompt_len
        self.planned_output += record.planned_output_len
        self.off_length += record.output_tokens != record.planned_output_len


def _count_class(classes: Counter[str], name: str) -> str:
    """Count `name`, and return as what; a server that thinks of ever new errors does not fill the memory."""
    name = name if name in classes or len(classes) < _MOST_CLASSES else _OTHER
    classes[name] += 1
    return name
