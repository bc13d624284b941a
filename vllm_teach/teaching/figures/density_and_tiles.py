"""What a sparse pattern saves, by the size of its blocks: the share of the pairs against the share of the tiles."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.attention.patterns import BlockSparsePattern, TileKind
from vllm_teach.teaching import style

_MARKERS = ("o", "s", "^", "D")
_STRENGTHS = (1.0, 0.8, 0.6, 0.42)  # from the smallest blocks to the largest


@dataclass(frozen=True)
class DensityCurves:
    """For each block size: the share of all pairs that a random layout shows, and of all tiles that are visited."""

    n: int
    tile: int
    density: dict[int, tuple[float, ...]]
    visited: dict[int, tuple[float, ...]]

    def at(self, block: int, density: float) -> float:
        """The share of tiles visited by the layout whose density comes closest to `density`."""
        nearest = min(range(len(self.density[block])), key=lambda i: abs(self.density[block][i] - density))
        return self.visited[block][nearest]


def density_curves(n: int, tile: int, blocks: Sequence[int], densities: Sequence[float]) -> DensityCurves:
    """Draw random layouts, not causal, of each block size and density; those too thin for their diagonal are left out.

    Raises InvalidArgumentError for a density above 1 and for sizes that are not positive.
    """
    found: dict[int, list[tuple[float, float]]] = {block: [] for block in blocks}
    for block in blocks:
        count = -(-n // block)
        for density in densities:
            if density * count < 1:
                continue
            pattern = BlockSparsePattern.random(count, block, density=density, causal=False)
            kinds = pattern.tile_map(n, n, tile, tile)
            visited = float((kinds != TileKind.EMPTY).double().mean())
            found[block].append((pattern.density(n, n), visited))
    return DensityCurves(
        n,
        tile,
        {block: tuple(x for x, _ in points) for block, points in found.items()},
        {block: tuple(y for _, y in points) for block, points in found.items()},
    )


def draw_density_curves(ax: Axes, data: DensityCurves) -> None:
    """Draw a line per block size, and the line on which cost equals density; changes `ax`. At most four sizes."""
    ax.plot([0, 1], [0, 1], "--", color=style.colour("ideal"), linewidth=1.5, label="cost = density", zorder=1)
    dark = "#7A5300"  # the hue of block_sparse, dark enough for its lightest tint to be seen
    for block, marker, strength in zip(sorted(data.density), _MARKERS, _STRENGTHS, strict=False):
        ax.plot(
            data.density[block],
            data.visited[block],
            f"{marker}-",
            color=style.tint(dark, strength),
            label=f"blocks of {block}",
            clip_on=False,
            zorder=3,
        )
    ax.set(xlim=(0, 1), ylim=(0, 1.03))
    for which, what in (("x", "density: share of the pairs that are visible"), ("y", "share of the tiles computed")):
        style.label_axis(ax, "x" if which == "x" else "y", what, ticks=[0, 0.25, 0.5, 0.75, 1])
    ax.legend(loc="lower right", title=f"n = {data.n:,}, tiles of {data.tile}")
