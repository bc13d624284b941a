"""Is it faster to compute a number again or to keep it? One probability of attention, against the head dimension."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class BreakEven:
    """Seconds for one element of P: to write it and read it back, and to compute its score again at each head_dim."""

    head_dims: tuple[int, ...]
    keep: float
    recompute: tuple[float, ...]
    even: float

    def ratio(self, head_dim: int) -> float:
        """How many times longer keeping takes than computing again; below 1 keeping is the faster one."""
        return self.keep / self.recompute[self.head_dims.index(head_dim)]


def break_even(
    head_dims: Sequence[int], *, flops_per_second: float, bytes_per_second: float, input_bytes: int
) -> BreakEven:
    """Divide work by rate: 2 · head_dim FLOPs against one write and one read of `input_bytes`.

    A model, and a kind one to keeping: both at full rate, neither overlapped with anything; the exponential (one
    a number) is left out. `even` is the head_dim at which both take as long. InvalidArgumentError for a rate or a size
    that is not positive.
    """
    for name, value in (("flops_per_second", flops_per_second), ("bytes_per_second", bytes_per_second)):
        if not value > 0:
            raise InvalidArgumentError(f"{name}={value} is no rate: use a number above 0.")
    if input_bytes < 1 or min(head_dims, default=0) < 1:
        raise InvalidArgumentError(f"input_bytes={input_bytes}, head_dims={list(head_dims)}: all must be 1 or more.")
    keep = 2 * input_bytes / bytes_per_second
    recompute = tuple(2 * head_dim / flops_per_second for head_dim in head_dims)
    return BreakEven(tuple(head_dims), keep, recompute, keep * flops_per_second / 2)


def draw_break_even(ax: Axes, data: BreakEven) -> None:
    """Draw both times in picoseconds against head_dim, both axes logarithmic, and where they cross; changes `ax`."""
    pico = [seconds * 1e12 for seconds in data.recompute]
    ax.plot(data.head_dims, pico, "s-", color=style.colour("tiled"), label="compute it again")
    ax.plot(
        data.head_dims, [data.keep * 1e12] * len(pico), "-", color=style.colour("naive"), label="write it, read it back"
    )
    if data.head_dims[0] <= data.even <= data.head_dims[-1]:
        ax.axvline(data.even, color=style.colour("limit"), linestyle=":", linewidth=1.5)
        ax.annotate(
            f"even at {data.even:.0f}",
            (data.even, min(pico)),
            (4, 2),
            textcoords="offset points",
            color=style.colour("limit"),
            size=10,
        )
    style.label_axis(ax, "x", "head_dim", kind="tokens", log=2, ticks=data.head_dims)
    style.label_axis(ax, "y", "time per element of P", unit="ps", log=10)
    ax.set_ylim(0.6 * min(pico), 4 * max(*pico, data.keep * 1e12))
    ax.legend(loc="upper left")
