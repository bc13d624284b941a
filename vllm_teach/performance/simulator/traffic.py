"""The requests of a simulation: how long they are, when they come, what their prompts have in common. All from a seed.

Times and lengths come from sources of their own: the same requests can come at another rate. The draws are those of
`performance.load_test`, so a real server can be sent what was simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_teach.engine.field_checks import check_number, check_seed, check_whole
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import LengthMix
from vllm_teach.performance.virtual_time import LATEST, Arrival

AT_ONCE = math.inf
_MOST = 10**6  # requests, which take some gigabytes and an hour


@dataclass(frozen=True)
class Traffic:
    """`arrivals`, and in words how long they are, when they come, and what they share."""

    arrivals: tuple[Arrival, ...]
    lengths: str
    times: str
    prefixes: str = ""

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise InvalidArgumentError("arrivals is empty: give at least one request.")

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(each.prompt_len for each in self.arrivals)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the requests ask for."""
        return sum(each.output_len for each in self.arrivals)

    @property
    def longest(self) -> int:
        """The most tokens that a request has, prompt and output together."""
        return max(each.prompt_len + each.output_len for each in self.arrivals)

    def at_rate(self, rate: float, burstiness: float = 1.0, seed: int = 0) -> Traffic:
        """Return the same requests at the times of `draw_times`."""
        times = draw_times(len(self.arrivals), rate, burstiness, seed)
        arrivals = tuple(replace(each, time=time) for each, time in zip(self.arrivals, times, strict=True))
        return replace(self, arrivals=arrivals, times=_times_in_words(rate, burstiness))

    def with_shared_prefix(self, num_tokens: int, num_prefixes: int = 1, seed: int = 0) -> Traffic:
        """Return the same requests, but each prompt begins with one of `num_prefixes` texts of `num_tokens` tokens.

        A prompt's length stays, and one token at least is its own. All texts are equally likely.
        """
        check_whole("num_tokens", num_tokens, 0)
        check_whole("num_prefixes", num_prefixes, 1)
        source = random.Random(f"{seed} prefixes")
        arrivals = tuple(
            replace(each, prefix_len=min(num_tokens, each.prompt_len - 1), prefix_group=source.randrange(num_prefixes))
            for each in self.arrivals
        )
        one_of = f"one of {num_prefixes} texts" if num_prefixes > 1 else "the same text"
        told = f"prompts begin with {one_of} of {num_tokens:,} tokens" if num_tokens else ""
        return replace(self, arrivals=arrivals, prefixes=told)

    def __str__(self) -> str:
        """Return it in words."""
        parts = [f"{len(self.arrivals):,} requests", self.lengths, self.times, self.prefixes]
        return ", ".join(part for part in parts if part)


def draw_traffic(
    num_requests: int,
    lengths: LengthMix | tuple[int, int],
    rate: float = AT_ONCE,
    *,
    burstiness: float = 1.0,
    seed: int = 0,
) -> Traffic:
    """Return `num_requests` requests of (prompt, output) tokens, or of lengths from a mix.

    They come at the times of `draw_times`. Raises InvalidArgumentError for what is no number, no length or no rate.
    """
    check_whole("num_requests", num_requests, 1, _MOST, hint=f"use a whole number from 1 to {_MOST:,}")
    check_seed(seed)
    if isinstance(lengths, LengthMix):
        pairs: Sequence[tuple[int, int]] = lengths.draw(num_requests, seed)
        told = f"lengths of the mix {lengths.name!r}, " + mean_lengths(pairs)
    else:
        pairs = [lengths] * num_requests
        told = f"each {lengths[0]:,} tokens in and {lengths[1]:,} out"
    arrivals = tuple(Arrival(prompt, output) for prompt, output in pairs)
    return Traffic(arrivals, told, "").at_rate(rate, burstiness, seed)


def draw_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return when `count` requests come, in seconds, `rate` of them a second on average; AT_ONCE: all at 0.

    The gaps have a gamma distribution of shape `burstiness`, as in vLLM's `bench serve`: 1 is a Poisson process, users
    who know nothing of each other; below 1 they come in bursts. The coefficient of variation is 1 / √burstiness.
    Another rate stretches the same gaps. Raises InvalidArgumentError for a rate or a burstiness that is none, and for a
    rate so low that the last request would come after `virtual_time.LATEST`.
    """
    check_number("burstiness", burstiness, 0, open_low=True, hint="use a number above 0; 1 is a Poisson process")
    if rate == AT_ONCE:
        return [0.0] * count
    check_number("rate", rate, 0, open_low=True, hint="use requests a second above 0, or inf for all at once")
    source, moment, times = random.Random(f"{seed} arrivals"), 0.0, []
    for _ in range(count):
        moment += source.gammavariate(burstiness, 1 / burstiness)
        times.append(moment / rate)
    if times and times[-1] > LATEST:
        raise InvalidArgumentError(
            f"rate={rate:g} is too low: the last of {count:,} requests would come after {times[-1]:.3g} seconds, and "
            f"{LATEST:g} are the most."
        )
    return times


def mean_lengths(pairs: Sequence[tuple[int, int]]) -> str:
    """Return the means of prompt and output lengths in words."""
    prompt, output = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return f"{prompt:.0f} tokens in and {output:.0f} out on average"


def _times_in_words(rate: float, burstiness: float) -> str:
    if rate == AT_ONCE:
        return "all at once"
    pattern = "Poisson" if burstiness == 1 else f"gamma gaps of burstiness {burstiness:g}"
    return f"{rate:g} a second ({pattern})"
