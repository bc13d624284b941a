"""Reads `/metrics` as Prometheus does: the text of a moment, and such moments one after the other."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

from vllm_teach.errors import InvalidArgumentError, RequestTimeoutError

_OPENER = build_opener(ProxyHandler({}))


@dataclass(frozen=True)
class Scrape:
    """What `/metrics` said at `moment` (seconds, `time.monotonic`): the value of each sample by its name and labels."""

    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]
    moment: float = 0.0

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples called `name` that have these labels.

        Raises InvalidArgumentError when there is none: a name that is misspelt would otherwise be 0 for ever.
        """
        found = [value for (each, own), value in self.samples.items() if each == name and labels.items() <= set(own)]
        if not found:
            raise InvalidArgumentError(f"name={name!r} with labels {labels} is not among the metrics: see /metrics.")
        return sum(found)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of the samples called `name` by the value of one label."""
        sums: dict[str, float] = {}
        for (each, own), value in self.samples.items():
            if each == name and label in dict(own):
                sums[dict(own)[label]] = sums.get(dict(own)[label], 0.0) + value
        return sums

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """Return a histogram as (upper bound, how many were not above it), by bound; the last bound is infinite."""
        counts = self.by_label(f"{name}_bucket", "le")
        return sorted((float(bound.replace("+Inf", "inf")), count) for bound, count in counts.items())


def read_scrape(text: str, moment: float = 0.0) -> Scrape:
    """Return the samples in Prometheus' text format."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not math.isnan(sample.value):
                samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return Scrape(samples, moment)


def scrape(url: str, timeout: float = 10.0) -> Scrape:
    """Read `/metrics` of the server at `url`; raises what `fetch` raises."""
    return read_scrape(fetch(f"{url}/metrics", timeout).decode(), time.monotonic())


def fetch(url: str, timeout: float = 10.0) -> bytes:
    """Return what `url` gives, straight from its server, through no proxy; raises what urllib raises."""
    with _OPENER.open(url, timeout=timeout) as answer:
        return answer.read()


def scrape_until(url: str, condition: Callable[[Scrape], bool], timeout: float = 10.0) -> Scrape:
    """Read `/metrics` again and again until `condition` holds of it, and return that scrape.

    Raises RequestTimeoutError after `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while True:
        found = scrape(url)
        if condition(found):
            return found
        if time.monotonic() > end:
            raise RequestTimeoutError(
                f"within timeout={timeout:g} s the metrics of {url} did not come to it: wait more."
            )
        time.sleep(0.02)


@asynccontextmanager
async def scraping(url: str, interval: float = 0.1) -> AsyncIterator[list[Scrape]]:
    """While the block is open, read `/metrics` every `interval` seconds, and once more at its end, into the list."""
    scrapes: list[Scrape] = []

    async def go_on() -> None:
        while True:
            scrapes.append(await asyncio.to_thread(scrape, url))
            await asyncio.sleep(interval)

    task = asyncio.create_task(go_on())
    try:
        yield scrapes
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        scrapes.append(await asyncio.to_thread(scrape, url))
