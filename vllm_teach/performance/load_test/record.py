"""What became of one request of a load test: its outcome, its times, its tokens."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field

ANSWERED, ABORTED, REFUSED, FAILED = OUTCOMES = ("answered", "aborted", "refused", "failed")


@dataclass
class RequestRecord:
    """One request. Times are seconds from the start of the test, None for what never happened.

    `outcome`: "answered" (to its end), "aborted" (by this client, as planned), "refused" (a malformed request, by a
    status from 400 to 499: as it should be), "failed". `error` is the class of a failure, or of a refusal, `message`
    what the server says to it. `due` is when it should have been sent, `sent` when it was: latencies count from `due`.
    `tokens_from` says who counted the output: "usage", "tokenizer" or "events"; `events` is how many events of the
    stream carried text, `first_tokens` how many tokens the first of them.
    """

    index: int
    planned_prompt_len: int
    planned_output_len: int
    malformed: bool = False
    outcome: str = FAILED
    error: str | None = None
    message: str | None = None
    status: int | None = None
    due: float = 0.0
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    end: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tokens_from: str | None = None
    events: int = 0
    first_tokens: int = 1
    finish_reason: str | None = None
    text: str | None = None
    gaps: array[float] = field(default_factory=lambda: array("d"), repr=False)

    @property
    def ttft(self) -> float | None:
        """Seconds until the first text came: time to first token. None when nothing was streamed."""
        return None if self.first is None else self.first - self.due

    @property
    def e2e(self) -> float:
        """Seconds until the answer, or whatever became of it, had ended."""
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first event: time per output token. None for an answer that has no such tokens."""
        if self.first is None or self.last is None or self.output_tokens is None:
            return None
        rest = self.output_tokens - self.first_tokens
        return (self.last - self.first) / rest if rest > 0 else None

    def to_json(self) -> dict[str, object]:
        """Return it as plain data: what is None is left out, and of the gaps there is the longest."""
        plain = {name: value for name, value in asdict(self).items() if name != "gaps" and value is not None}
        derived = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e, "longest_gap": max(self.gaps, default=None)}
        return plain | {name: value for name, value in derived.items() if value is not None}
