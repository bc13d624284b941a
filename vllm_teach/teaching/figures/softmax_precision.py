"""What the softmax statistics lose in 16 bits: a sum that stops growing, and the error of the output against n."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes

from vllm_teach.attention.online_softmax import SoftmaxState, finish, update
from vllm_teach.attention.reference import naive_attention
from vllm_teach.teaching import style

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MARKERS = {"float16": "o", "bfloat16": "s", "float32": "^"}


@dataclass(frozen=True)
class GrowingSum:
    """l after `keys` keys of equal score, one key a tile: dtype name -> l at each entry of `keys`."""

    keys: tuple[int, ...]
    l: dict[str, tuple[float, ...]]  # noqa: E741  the papers' name


def draw_growing_sum(ax: Axes, most_keys: int = 4096) -> GrowingSum:
    """Draw the sum of `most_keys` ones, one at a time, in each dtype, as the online softmax adds equal scores."""
    keys = tuple(2**power for power in range(most_keys.bit_length()))
    sums: dict[str, tuple[float, ...]] = {}
    for name, dtype in DTYPES.items():
        # cumsum would accumulate in float32 on some devices: this adds one by one in the dtype itself.
        total, one, marks = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype), []
        for count in range(1, most_keys + 1):
            total = total + one
            if count in keys:
                marks.append(float(total))
        sums[name] = tuple(marks)
        ax.plot(keys, marks, f"{_MARKERS[name]}-", color=style.colour(name), label=f"kept in {name}", markersize=5)
    ax.plot(keys, keys, "--", color=style.colour("ideal"), label="exact", linewidth=1.2, zorder=4)
    style.label_axis(ax, "x", "keys summed, all of equal score", kind="tokens", log=2, ticks=keys[::2])
    style.label_axis(ax, "y", "the sum l", kind="tokens", log=2, ticks=keys[::2])
    ax.legend(loc="upper left")
    return GrowingSum(keys, sums)


@dataclass(frozen=True)
class StatisticsError:
    """Largest error of the output against the float64 oracle: dtype computed in -> one error per length.

    `rounding` is the error of the exact output rounded to float16, once: nobody who stores float16 can do better.
    """

    lengths: tuple[int, ...]
    error: dict[str, tuple[float, ...]]
    rounding: tuple[float, ...]


def statistics_error(
    lengths: Sequence[int], *, queries: int = 16, head_dim: int = 64, tile: int = 128
) -> StatisticsError:
    """Run `update` in each dtype: scores, weights, values and state are in it, as in a kernel without a wider type.

    The products q kᵀ are taken in float64 and rounded once. Inputs are normal draws with a mean of 1 in v, so that the
    output does not vanish as n grows.
    """
    errors: dict[str, list[float]] = {name: [] for name in DTYPES}
    rounding = []
    generator = torch.Generator().manual_seed(0)
    for n in lengths:
        q = torch.randn(queries, head_dim, generator=generator, dtype=torch.float64)
        k = torch.randn(n, head_dim, generator=generator, dtype=torch.float64)
        v = torch.randn(n, head_dim, generator=generator, dtype=torch.float64) + 1
        exact = naive_attention(q[None, :, None], k[None, :, None], v[None, :, None])[0, :, 0]  # [queries, head_dim]
        rounding.append(float((exact.half().double() - exact).abs().max()))
        scores = q @ k.T * head_dim**-0.5  # [queries, n]
        for name, dtype in DTYPES.items():
            state = SoftmaxState.empty([queries], head_dim, dtype=dtype)
            for start in range(0, n, tile):
                state = update(state, scores[:, start : start + tile], v[start : start + tile])
            errors[name].append(float((finish(state)[0].double() - exact).abs().max()))
    return StatisticsError(tuple(lengths), {name: tuple(e) for name, e in errors.items()}, tuple(rounding))


def draw_statistics_error(ax: Axes, data: StatisticsError) -> None:
    """Draw the errors against n, both axes logarithmic; changes `ax`."""
    for name, values in data.error.items():
        ax.plot(data.lengths, values, f"{_MARKERS[name]}-", color=style.colour(name), label=f"computed in {name}")
    ax.plot(data.lengths, data.rounding, "--", color=style.colour("ideal"), label="only the output in float16")
    style.label_axis(ax, "x", "keys n", kind="tokens", log=2, ticks=data.lengths[::2])
    style.label_axis(ax, "y", "largest error of the output", log=10)
    ax.legend(loc="center left", bbox_to_anchor=(0.0, 0.36))
