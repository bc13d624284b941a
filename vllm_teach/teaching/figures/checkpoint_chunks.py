"""Peak memory of a training step whose layers are checkpointed in chunks, against the chunk: measured and modelled."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


@dataclass(frozen=True)
class ChunkModel:
    """peak(chunk) = layers / chunk · boundary + chunk · inside: bytes of a layer's input and of what it saves."""

    layers: int
    boundary: float
    inside: float

    def peak(self, chunk: float) -> float:
        """Bytes at the worst moment: every chunk's input, and all that one chunk's layers save."""
        return self.layers / chunk * self.boundary + chunk * self.inside

    @property
    def best(self) -> float:
        """The chunk at which the peak is lowest, were fractions of a layer possible; below 1 it is 1."""
        return max(1.0, (self.layers * self.boundary / self.inside) ** 0.5)


def fit_chunk_model(layers: int, peaks: Mapping[int, float]) -> ChunkModel:
    """Solve the model for the peaks measured at a chunk of 1 and of all `layers`; InvalidArgumentError without them."""
    if layers < 2 or not {1, layers} <= set(peaks):
        raise InvalidArgumentError(f"peaks holds the chunks {sorted(peaks)}: the fit needs 1 and layers={layers}.")
    one, whole = peaks[1], peaks[layers]  # layers · boundary + inside, and boundary + layers · inside
    boundary = (layers * one - whole) / (layers**2 - 1)
    return ChunkModel(layers, boundary, one - layers * boundary)


def draw_checkpoint_chunks(
    ax: Axes, layers: int, peaks: Mapping[str, Mapping[int, float]], without: Mapping[str, float]
) -> dict[str, ChunkModel]:
    """Draw measured peaks (markers), the fitted model (lines) and the peak without checkpoints (dashed) by name.

    Changes `ax`; returns the model of each name.
    """
    models = {name: fit_chunk_model(layers, measured) for name, measured in peaks.items()}
    for name, measured in peaks.items():
        colour, chunks = style.colour(name), sorted(measured)
        fine = [1 + (layers - 1) * i / 60 for i in range(61)]
        ax.plot(fine, [models[name].peak(chunk) for chunk in fine], "-", color=colour, linewidth=1.4)
        ax.plot(chunks, [measured[chunk] for chunk in chunks], "o", color=colour, label=f"{name} attention inside")
        ax.axhline(without[name], color=colour, linestyle="--", linewidth=1.2)
        ax.annotate(
            f"{name}, everything kept",
            (chunks[0], without[name]),
            (0, 3),
            textcoords="offset points",
            color=colour,
            size=10,
        )
    top = max(without.values())
    step = 1 << max(int(top).bit_length() - 3, 0)
    style.label_axis(ax, "x", "layers in a chunk", kind="tokens", ticks=sorted(next(iter(peaks.values()))))
    style.label_axis(ax, "y", "peak memory of a step", kind="bytes", ticks=range(0, int(top) + 1, step))
    ax.set_ylim(0, 1.12 * top)
    ax.legend(loc="lower right")
    return models
