"""What a pattern is: a rule that says which keys a query may see, asked for one pair, a mask or a map of tiles.

Positions, not indices: key j has position j, and query i of q_len has position i + kv_len - q_len, so that the last
query stands where the last key stands (bottom-right, as FlashAttention aligns its masks). A query may have a negative
position when there are more queries than keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_teach.attention.patterns.tiles import (
    Spans,
    TileKind,
    classify_by_diagonal,
    kinds_of_pairs,
    look,
    opposite,
    overlap,
    remembered,
)
from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError

# (q_pos, k_pos) -> bool, as `Pattern.sees`
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# The tiles in which `density` counts: large enough for few of them, small enough for most to be EMPTY or FULL.
_COUNTING_TILE = 128


class Pattern(ABC):
    """Which keys a query may see. Immutable and hashable; combine patterns with `&`, `|` and `~`.

    A new pattern needs only `sees`. With `by_diagonal` or a `classify` of its own, its tile maps come cheaper.
    """

    @abstractmethod
    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """Return, elementwise, whether a query at `q_pos` may see the key at `k_pos`.

        Both are int64 and broadcast against each other; the result is bool, of the broadcast shape, on their device.
        """

    def shown(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """Return `sees`, broadcast to the shape of both: a rule that asks for the keys alone need not do it itself.

        Raises InvalidArgumentError when it is not bool, or of another shape.
        """
        seen, shape = self.sees(q_pos, k_pos), q_pos.shape
        if k_pos.shape != shape:
            shape = torch.broadcast_shapes(shape, k_pos.shape)
        given = isinstance(seen, torch.Tensor)
        sizes = seen.shape if given and seen.dtype == torch.bool else (0,) * (len(shape) + 1)  # which never fit
        if len(sizes) <= len(shape) and all(a in (1, b) for a, b in zip(sizes[::-1], shape[::-1], strict=False)):
            return seen.expand(shape)
        got = f"{seen.dtype} of shape {list(seen.shape)}" if given else type(seen).__name__
        raise InvalidArgumentError(
            f"{type(self).__name__}.sees returned {got} for positions {list(q_pos.shape)} and {list(k_pos.shape)}; "
            f"return bool of shape {list(shape)}."
        )

    def rule(self, device: torch.device) -> Rule:
        """Return `sees` for positions on `device`, with whatever it looks up already there.

        A compiler that traces the result finds tensors in it and no Python that would make them.
        """
        return self.sees

    @property
    def by_diagonal(self) -> bool:
        """Whether `sees` depends on k_pos - q_pos alone, so that one answer holds for a whole diagonal."""
        return False

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """Return what is known of each tile without looking at its pairs, int8 `[q tiles, k tiles]` of `TileKind`.

        EMPTY, PARTIAL and FULL must be certain; at an UNKNOWN tile, `tile_map` looks.
        """
        if self.by_diagonal:
            return classify_by_diagonal(self, queries, keys)
        return torch.full((len(queries), len(keys)), int(TileKind.UNKNOWN), dtype=torch.int8, device="cpu")

    def check_lengths(self, q_len: int, kv_len: int) -> None:  # noqa: B027 - most patterns have nothing to check
        """Raise InvalidArgumentError when the pattern is not defined for such lengths, which are whole numbers from 0.

        To be overridden; most patterns are defined for all lengths. Callers use `check`.
        """

    def check(self, q_len: int, kv_len: int) -> None:
        """Raise InvalidArgumentError when a length is negative, or the pattern not defined for the two."""
        check_count("q_len", q_len, 0)
        check_count("kv_len", kv_len, 0)
        self.check_lengths(q_len, kv_len)

    def mask(self, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return bool `[q_len, kv_len]`, True where query i may see key j.

        Raises InvalidArgumentError when a length is negative or the pattern not defined here.
        """
        self.check(q_len, kv_len)
        return self.tile_mask((0, q_len), (0, kv_len), kv_len - q_len, device)

    def tile_mask(
        self, rows: tuple[int, int], keys: tuple[int, int], offset: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return bool `[rows, keys]` for the queries and keys from the first up to before the second index.

        `offset` is kv_len - q_len of the whole attention.
        """
        if self.by_diagonal and rows[0] < rows[1] and keys[0] < keys[1]:
            # Each row is the one above it, moved right by one: windows into one line of answers.
            ahead = torch.arange(keys[0] - (rows[1] - 1 + offset), keys[1] - (rows[0] + offset), device=device)
            line = self.shown(torch.zeros_like(ahead), ahead)  # [rows + keys - 1]
            return line.unfold(0, keys[1] - keys[0], 1).flip(0)
        q_pos = torch.arange(*rows, device=device) + offset
        k_pos = torch.arange(*keys, device=device)
        return self.shown(q_pos[:, None], k_pos[None, :])

    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_k: int) -> torch.Tensor:
        """Return the exact `TileKind` of each tile, int8 `[ceil(q_len / tile_q), ceil(kv_len / tile_k)]` on the CPU.

        An EMPTY tile has no visible pair and can be skipped; a FULL one hides none and needs no mask. The map is
        remembered, so do not change it.

        Raises InvalidArgumentError when a length is negative, a tile not positive, or the pattern not defined here.
        """
        self.check(q_len, kv_len)
        # A tile is no larger than its axis: what looks at all pairs of one makes as many numbers as it has.
        tile_q = min(check_count("tile_q", tile_q, 1), max(1, int(q_len)))
        tile_k = min(check_count("tile_k", tile_k, 1), max(1, int(kv_len)))
        return _tile_map(self, int(q_len), int(kv_len), tile_q, tile_k)

    def density(self, q_len: int, kv_len: int) -> float:
        """Return the share of all q_len * kv_len pairs that are visible; 0 where there are none.

        Raises InvalidArgumentError when a length is negative or the pattern not defined here.
        """
        self.check(q_len, kv_len)
        if q_len == 0 or kv_len == 0:
            return 0.0
        q_len, kv_len = int(q_len), int(kv_len)
        with torch.device("cpu"):
            count = _count_by_diagonal if self.by_diagonal else _count_by_tile
            return count(self, q_len, kv_len) / (q_len * kv_len)

    def __and__(self, other: Pattern) -> Pattern:
        return Both(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Pattern) -> Pattern:
        return Either(self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> Pattern:
        return Hidden(self)


def check_pattern(pattern: Pattern) -> None:
    """Raise InvalidArgumentError unless the argument `pattern` is one."""
    if not isinstance(pattern, Pattern):
        raise InvalidArgumentError(
            f"pattern is of type {type(pattern).__name__}; give a Pattern of vllm_teach.attention.patterns."
        )


class DiagonalPattern(Pattern):
    """A pattern that asks only how far a key lies ahead of the query: the same at every position."""

    @abstractmethod
    def sees_ahead(self, ahead: torch.Tensor) -> torch.Tensor:
        """Return, elementwise, whether a query may see the key `ahead` = k_pos - q_pos places after it."""

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return self.sees_ahead(k_pos - q_pos)

    @property
    def by_diagonal(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class _Pair(Pattern):
    a: Pattern
    b: Pattern

    @property
    def by_diagonal(self) -> bool:
        """Two patterns that are constant along diagonals are so together."""
        return self.a.by_diagonal and self.b.by_diagonal

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """See `Pattern.check_lengths`."""
        self.a.check_lengths(q_len, kv_len)
        self.b.check_lengths(q_len, kv_len)


class Both(_Pair):
    """`a & b`: the keys that both patterns show."""

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return self.a.sees(q_pos, k_pos) & self.b.sees(q_pos, k_pos)

    def rule(self, device: torch.device) -> Rule:
        """See `Pattern.rule`."""
        a, b = self.a.rule(device), self.b.rule(device)
        return lambda q_pos, k_pos: a(q_pos, k_pos) & b(q_pos, k_pos)

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """See `Pattern.classify` and `overlap`."""
        if self.by_diagonal:
            return classify_by_diagonal(self, queries, keys)
        return overlap(self.a.classify(queries, keys), self.b.classify(queries, keys))

    def __repr__(self) -> str:
        return f"({self.a!r} & {self.b!r})"


class Either(_Pair):
    """`a | b`: the keys that at least one pattern shows."""

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return self.a.sees(q_pos, k_pos) | self.b.sees(q_pos, k_pos)

    def rule(self, device: torch.device) -> Rule:
        """See `Pattern.rule`."""
        a, b = self.a.rule(device), self.b.rule(device)
        return lambda q_pos, k_pos: a(q_pos, k_pos) | b(q_pos, k_pos)

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """What `a | b` hides is what both hide: see `Pattern.classify` and `overlap`."""
        if self.by_diagonal:
            return classify_by_diagonal(self, queries, keys)
        hidden = overlap(opposite(self.a.classify(queries, keys)), opposite(self.b.classify(queries, keys)))
        return opposite(hidden)

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"


@dataclass(frozen=True, repr=False)
class Hidden(Pattern):
    """`~a`: the keys that the pattern hides."""

    a: Pattern

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """See `Pattern.sees`."""
        return ~self.a.sees(q_pos, k_pos)

    def rule(self, device: torch.device) -> Rule:
        """See `Pattern.rule`."""
        a = self.a.rule(device)
        return lambda q_pos, k_pos: ~a(q_pos, k_pos)

    @property
    def by_diagonal(self) -> bool:
        """As the pattern itself."""
        return self.a.by_diagonal

    def classify(self, queries: Spans, keys: Spans) -> torch.Tensor:
        """EMPTY and FULL change places."""
        return opposite(self.a.classify(queries, keys))

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """See `Pattern.check_lengths`."""
        self.a.check_lengths(q_len, kv_len)

    def __repr__(self) -> str:
        return f"~{self.a!r}"


@remembered(256)
def _tile_map(pattern: Pattern, q_len: int, kv_len: int, tile_q: int, tile_k: int) -> torch.Tensor:
    found = pattern.classify(Spans.cut(q_len, tile_q, kv_len - q_len), Spans.cut(kv_len, tile_k, 0)).clone()
    unknown = torch.nonzero(found == TileKind.UNKNOWN)  # [tiles, 2]
    looked = [kinds_of_pairs(*pairs) for pairs in look(pattern, unknown, q_len, kv_len, tile_q, tile_k)]
    if looked:
        found[unknown[:, 0], unknown[:, 1]] = torch.cat(looked)
    return found


def _count_by_diagonal(pattern: Pattern, q_len: int, kv_len: int) -> int:
    """The visible pairs: those on each visible diagonal k - q, which the matrix's borders cut off at both ends."""
    ahead = torch.arange(-kv_len + 1, q_len)  # the last query stands at kv_len - 1, the first at kv_len - q_len
    first_key = torch.clamp(ahead + kv_len - q_len, min=0)
    last_key = torch.clamp(ahead + kv_len - 1, max=kv_len - 1)
    on_diagonal = last_key - first_key + 1
    return int(on_diagonal[pattern.shown(torch.zeros_like(ahead), ahead)].sum())


def _count_by_tile(pattern: Pattern, q_len: int, kv_len: int) -> int:
    """The visible pairs: all of each FULL tile, and those found in PARTIAL ones."""
    tile = _COUNTING_TILE
    found = pattern.tile_map(q_len, kv_len, tile, tile)
    rows = torch.clamp(q_len - torch.arange(0, q_len, tile), max=tile)  # of each query tile
    keys = torch.clamp(kv_len - torch.arange(0, kv_len, tile), max=tile)
    full = int((rows[:, None] * keys[None, :])[found == TileKind.FULL].sum())
    partial = torch.nonzero(found == TileKind.PARTIAL)
    return full + sum(int((seen & real).sum()) for seen, real in look(pattern, partial, q_len, kv_len, tile, tile))
