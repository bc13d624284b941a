"""The figures of a load test, with what is needed to judge them, and the table that shows them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm_teach.performance.load_test.log_histogram import PERCENTILES
from vllm_teach.performance.load_test.loop_watch import LATE, LoopWatch
from vllm_teach.performance.load_test.record import ABORTED, ANSWERED, FAILED, REFUSED
from vllm_teach.performance.load_test.tally import LoadTally

# From here on the client's own slowness is a part of the figures; chosen by us.
_TOO_LATE, _FULL_CORE = 0.1, 0.9

_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "e2e"}


@dataclass(frozen=True)
class LoadReport:
    """What was asked (`server`, `plan`: plain data; `headline`, `prompts`: in words) and what came of it (`tally`).

    `client` watched this client. `held_back` requests of an open loop waited for a place among those in flight.
    `unfinished` ones were in flight when the test was `interrupted`. `environment` is the client's machine.
    """

    tally: LoadTally
    client: LoopWatch
    headline: str
    prompts: str
    server: dict[str, Any]
    plan: dict[str, Any]
    held_back: int = 0
    unfinished: int = 0
    interrupted: bool = False
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def client_share(self) -> float:
        """What the client's mean delay is of the median TTFT (of the median e2e where nothing was streamed)."""
        first, whole = self.tally.latencies["ttft"], self.tally.latencies["e2e"]
        measured = first if first.count else whole
        if not (measured.count and self.client.delays.count):
            return 0.0
        return self.client.delays.mean / max(measured.quantile(0.5), 1e-9)

    @property
    def client_was_bottleneck(self) -> bool:
        """Whether the client measured itself: it came late to answers, or had no processor left."""
        return self.client_share > _TOO_LATE or self.client.cpu > _FULL_CORE

    def to_json(self) -> dict[str, object]:
        """Return the report as what `json.dump` takes; times in seconds."""
        return self.tally.to_json() | {
            "server": self.server,
            "plan": self.plan,
            "held_back": self.held_back,
            "unfinished": self.unfinished,
            "interrupted": self.interrupted,
            "client": self.client.to_json(),
            "client_share": self.client_share,
            "client_was_bottleneck": self.client_was_bottleneck,
            "environment": self.environment,
        }


def format_load(report: LoadReport) -> str:
    """Return the report as plain text; latencies in milliseconds."""
    parts = [_head(report), _outcomes(report.tally)]
    if report.tally.outcomes[ANSWERED]:
        parts += [_latencies(report.tally), _tokens(report.tally)]
    if report.tally.slo is not None:
        parts.append(_goodput(report.tally, report.tally.slo.limits))
    parts.append(_client(report))
    return "\n\n".join("\n".join(part) for part in parts)


def _head(report: LoadReport) -> list[str]:
    lines = [report.headline, report.prompts]
    if report.interrupted:
        lines.append(f"INTERRUPTED: what had ended by then; {report.unfinished:,} more were in flight")
    return lines


def _outcomes(tally: LoadTally) -> list[str]:
    lines = [f"{tally.seconds:.2f} s, {tally.mean_in_flight:.1f} requests in flight on average"]
    remarks = {
        ANSWERED: f"   {tally.rate(tally.outcomes[ANSWERED]):.2f} a second",
        ABORTED: "   by this client, as planned",
        REFUSED: "   malformed ones, as they should be",
        FAILED: "",
    }
    for outcome, remark in remarks.items():
        if tally.outcomes[outcome] or outcome in (ANSWERED, FAILED):
            lines.append(f"  {outcome:<10}{tally.outcomes[outcome]:>9,}{remark}")
        for kind, number in {REFUSED: tally.refusals, FAILED: tally.errors}.get(outcome, Counter()).most_common():
            lines.append(f"{number:>21,} x {kind}")
            if outcome == FAILED and kind in tally.messages:
                lines.append(f"{'':>24}the first: {tally.messages[kind]}")
    return lines


def _latencies(tally: LoadTally) -> list[str]:
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    lines = [f"  {'ms':<6}{'of':>11}" + "".join(f"{name:>11}" for name in columns)]
    for name, histogram in tally.latencies.items():
        figures = histogram.summary()
        if figures is not None:
            cells = "".join(f"{figures[column] * 1e3:>11,.2f}" for column in columns)
            lines.append(f"  {_NAMES[name]:<6}{histogram.count:>11,}{cells}")
    left_out = f"; the {tally.outcomes[FAILED]:,} failed are not among them" if tally.outcomes[FAILED] else ""
    lines.append(f"  of answered requests, from the time each was due{left_out}")
    if tally.tokens_per_event is not None:
        # Fewer gaps than tokens: some events carried several, and the server did not say how many.
        every = tally.latencies["itl"].count >= tally.output_tokens - tally.outcomes[ANSWERED]
        what = "token" if every else "event with text"
        lines.append(f"  ITL is from one {what} to the next; an event carried {tally.tokens_per_event:.2f} tokens")
    return lines


def _tokens(tally: LoadTally) -> list[str]:
    answered = tally.outcomes[ANSWERED]
    lines = [
        f"tokens a second: {tally.rate(tally.output_tokens):,.1f} out, {tally.rate(tally.prompt_tokens):,.1f} in",
        f"  an answer has {tally.output_tokens / answered:.1f} out (planned {tally.planned_output / answered:.1f}), "
        f"{tally.prompt_tokens / answered:.1f} in (planned {tally.planned_prompt / answered:.1f})",
        f"  output counted by {', '.join(f'{source} ({n:,})' for source, n in tally.tokens_from.most_common())}",
    ]
    if tally.off_length:
        lines.append(f"  {tally.off_length:,} answers have another length than planned")
    return lines


def _goodput(tally: LoadTally, limits: dict[str, float]) -> list[str]:
    within = ", ".join(f"{_NAMES[name]} {seconds * 1e3:g} ms" for name, seconds in limits.items())
    share = tally.good / tally.judged if tally.judged else 0.0
    return [
        f"goodput: {tally.rate(tally.good):.2f} requests a second within {within}",
        f"  {tally.good:,} of {tally.judged:,} ({share:.1%}); failed ones count as not within",
    ]


def _client(report: LoadReport) -> list[str]:
    """How far the figures may be the client's own."""
    client, lag = report.client, report.tally.send_lag.summary()
    line = (
        f"this client: {client.cpu:.0%} of a core, more than {LATE * 1e3:g} ms behind {client.behind:.1%} of the time"
    )
    delay = client.delays.summary()
    if delay is not None:
        line += f" (mean {delay['mean'] * 1e3:.1f} ms, p99 {delay['p99'] * 1e3:.1f}, max {delay['max'] * 1e3:.1f})"
    lines = [line]
    if lag is not None:
        lines.append(f"  requests left {lag['p50'] * 1e3:.2f} ms after they were due (p99 {lag['p99'] * 1e3:.2f} ms)")
    if report.held_back:
        lines.append(f"  {report.held_back:,} waited for a place among those in flight: allow more (--max-in-flight)")
    if report.client_was_bottleneck:
        why = "its core is full" if client.cpu > _FULL_CORE else "others used its core, too"
        lines.append(
            f"  THE CLIENT WAS A BOTTLENECK ({why}): its mean delay is {report.client_share:.0%} of the median "
            f"{'TTFT' if report.tally.latencies['ttft'].count else 'e2e'}, so the server is faster than this says"
        )
    return lines
