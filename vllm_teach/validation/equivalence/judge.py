"""Where tokens differ from the reference's, and whether rounding can be why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from torch import Tensor

TIE = 1e-3


@dataclass(frozen=True)
class Difference:
    """A token that is not the reference's, after the same tokens before it.

    `gap` is how far the reference's score of our token lies below its best one, in logits; where both followed the
    same tokens so far, the lower of the two counts, as the reference computed it twice. `ours` None: we stopped before
    the reference; `theirs` None: we went on after it.
    """

    request: int
    completion: int
    position: int
    ours: int | None
    theirs: int | None
    gap: float

    @property
    def excused(self) -> bool:
        """Whether the two tokens tie, so that the order of a sum decides between them."""
        return self.gap <= TIE

    def __str__(self) -> str:
        """Return it as a line of the report."""
        verdict = "excused" if self.excused else "WRONG"
        return (
            f"request {self.request}, completion {self.completion}, position {self.position}: {self.ours} for "
            f"{self.theirs}, {self.gap:.1e} below it: {verdict}"
        )


# First position -> the reference's scores of that one and all later ones, each after OUR tokens before it.
Scores = Callable[[int], Tensor]


def find_differences(
    ours: Sequence[int], expected: Sequence[int], scores: Scores, request: int = 0, completion: int = 0
) -> list[Difference]:
    """Compare the tokens with the reference's own; from the first difference on, with what it says of our prefix.

    `scores(first)` is `[len(ours) - first, vocab]` and is asked only if there is a difference. Its largest entry is the
    reference's token: for a sampled one, the request's random numbers are in it.
    """
    differs = (position for position, pair in enumerate(zip(ours, expected, strict=False)) if pair[0] != pair[1])
    first = next(differs, None)
    found = []
    if first is not None:
        judged = scores(first)
        gap = float(judged[0].max() - judged[0, [ours[first], expected[first]]].min())
        found = [Difference(request, completion, first, ours[first], expected[first], gap)]
        found += _judge(ours, first + 1, judged[1:], request, completion)
    if len(ours) != len(expected):
        at = min(len(ours), len(expected))
        mine, theirs = (tokens[at] if at < len(tokens) else None for tokens in (ours, expected))
        found.append(Difference(request, completion, at, mine, theirs, inf))
    return found


def _judge(ours: Sequence[int], first: int, scores: Tensor, request: int, completion: int) -> list[Difference]:
    """Return the positions from `first` on at which ours is not the token with the best score."""
    best = scores.max(-1)
    return [
        Difference(request, completion, position, token, theirs, top - float(scores[position - first, token]))
        for position, token, theirs, top in zip(
            range(first, len(ours)), ours[first:], best.indices.tolist(), best.values.tolist(), strict=True
        )
        if token != theirs
    ]
