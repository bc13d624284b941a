"""Which backend the articles' rule chooses, over batch and length, on several machines at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_teach.attention.patterns import Causal
from vllm_teach.backends import AttentionSpec, Hardware, Selection, select_backend
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

BATCHES = tuple(2**power for power in range(9))  # 1 to 256
LENGTHS = tuple(2**power for power in range(5, 15))  # 32 to 16,384 tokens


@dataclass(frozen=True)
class Machine:
    """A machine to ask about: its name, what the selection knows of it, and what its calls are computed in."""

    name: str
    hardware: Hardware
    device: str = "cuda"
    dtype: torch.dtype = torch.float16

    def spec(self, batch: int, length: int) -> AttentionSpec:
        """A causal prefill of `batch` sequences of `length` tokens, 8 heads of 64."""
        return AttentionSpec(batch, length, length, 8, 8, 64, dtype=self.dtype, device=self.device, pattern=Causal())


# Hypothetical machines with every library installed: the same on whatever machine this is asked.
MACHINES = (
    Machine("T4, float16", Hardware(cuda_capability=(7, 5))),
    Machine("A100, float16", Hardware(cuda_capability=(8, 0))),
    Machine(
        "CPU with AVX-512, float32", Hardware(cpu_isa=frozenset({"avx2", "avx512"})), device="cpu", dtype=torch.float32
    ),
)


@dataclass(frozen=True)
class ChoicePlane:
    """The selection for each machine, batch and length."""

    machines: tuple[Machine, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    threshold: int
    selections: Mapping[tuple[str, int, int], Selection]

    def at(self, machine: str, batch: int, length: int) -> Selection:
        """The selection of one point. Raises InvalidArgumentError for a point that is not on the plane."""
        try:
            return self.selections[machine, batch, length]
        except KeyError:
            raise InvalidArgumentError(
                f"machine={machine!r}, batch={batch}, length={length} is not on the plane: use its own values."
            ) from None

    @property
    def chosen(self) -> list[str]:
        """Every backend that is chosen somewhere, in the order in which they are met."""
        return list(dict.fromkeys(one.choice for one in self.selections.values()))

    def describe(self, batch: int, length: int) -> str:
        """The choice of each machine for one call, in a line."""
        found = "; ".join(f"{one.name}: {self.at(one.name, batch, length).choice}" for one in self.machines)
        return f"batch {batch}, {length:,} tokens, {batch * length**2:,} scores a head: {found}"


def choice_plane(
    machines: Sequence[Machine] = MACHINES,
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = LENGTHS,
    threshold: int = 1024,
) -> ChoicePlane:
    """Ask `select_backend`, with the policy "threshold", about every point."""
    selections = {
        (machine.name, batch, length): select_backend(
            machine.spec(batch, length), threshold=threshold, hardware=machine.hardware
        )
        for machine in machines
        for batch in batches
        for length in lengths
    }
    return ChoicePlane(tuple(machines), tuple(batches), tuple(lengths), threshold, selections)


def draw_choice_plane(data: ChoicePlane, batch: int, length: int) -> Figure:
    """Draw a panel per machine: a cell is a call, its colour the choice, the frame the call at hand."""
    figure, axes = plt.subplots(1, len(data.machines), figsize=(8.4, 3.7), sharey=True, squeeze=False)
    column, row = data.batches.index(batch), data.lengths.index(length)
    for ax, machine in zip(axes[0], data.machines, strict=True):
        _draw_machine(ax, data, machine)
        for ink, width in ((style.INK, 5.0), (style.PAPER, 2.2)):  # seen on dark and on light fills
            frame = Rectangle((column, row), 1, 1, fill=False, edgecolor=ink, linewidth=width, zorder=5)
            ax.add_patch(frame)
        choice = data.at(machine.name, batch, length).choice
        ax.set_title(f"{machine.name}:\n{choice}", size=10.5)
        style.label_axis(ax, "x", "batch", unit="sequences")
        _set_ticks(ax, data)
    axes[0][0].set_ylabel("length (tokens)")
    fills = [Patch(facecolor=style.colour(name), label=name) for name in data.chosen]
    figure.legend(handles=fills, loc="outside lower center", ncols=len(fills))
    return figure


def _draw_machine(ax: Axes, data: ChoicePlane, machine: Machine) -> None:
    for column, batch in enumerate(data.batches):
        for row, length in enumerate(data.lengths):
            fill = style.colour(data.at(machine.name, batch, length).choice)
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=fill, edgecolor=style.PAPER, linewidth=0.8))
    ax.set(xlim=(0, len(data.batches)), ylim=(0, len(data.lengths)))
    ax.grid(False)


def _set_ticks(ax: Axes, data: ChoicePlane) -> None:
    columns = range(0, len(data.batches), 2)
    ax.set_xticks([column + 0.5 for column in columns], [f"{data.batches[column]}" for column in columns])
    rows = range(len(data.lengths))
    ax.set_yticks([row + 0.5 for row in rows], [f"{length:,}" for length in data.lengths])
    ax.tick_params(length=0)
