"""How full a KV cache is over time, and how many sequences are in it: reservation beside paging."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.occupancy import Occupancy
from vllm_teach.teaching import style

# In the order of the legend; paging is the cure, reservation by max length the problem.
_LOOKS = {"max": "naive", "power_of_two": "xformers", "oracle": "sdpa", "paged": "paged"}
_DASHES = ("-", "--", ":")


@dataclass(frozen=True)
class OccupancyLine:
    """One way to keep the cache: utilisation (tokens stored / slots held) and sequences in flight, step by step."""

    name: str
    kind: str
    utilization: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def label(self) -> str:
        """Its name in the legend."""
        return self.name if self.kind == "paged" else f"reserved: {self.name.replace('_', ' ')}"


def occupancy_lines(occupancies: Sequence[Occupancy]) -> list[OccupancyLine]:
    """Return a line for each, of the kind "paged", "max", "power_of_two" or "oracle" that its name begins with.

    Raises InvalidArgumentError for a name of no kind, and for one without a step.
    """
    lines = []
    for each in occupancies:
        kind = next((kind for kind in _LOOKS if each.name.startswith(kind)), None)
        if kind is None or not each.num_steps:
            raise InvalidArgumentError(
                f"occupancies has {each.name!r} with {each.num_steps} steps: give names that begin with one of "
                f"{', '.join(_LOOKS)}, and at least one step."
            )
        lines.append(OccupancyLine(each.name, kind, tuple(each.utilization), tuple(each.in_flight)))
    return lines


def draw_occupancy(lines: Sequence[OccupancyLine]) -> Figure:
    """Draw utilisation above and sequences in flight below, over the steps; returns the figure."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8.4, 5.2), sharex=True)
    seen: dict[str, int] = {}
    for line in lines:
        dash = _DASHES[seen.get(line.kind, 0) % len(_DASHES)]
        seen[line.kind] = seen.get(line.kind, 0) + 1
        look = {"color": style.colour(_LOOKS[line.kind]), "linestyle": dash, "label": line.label}
        steps = range(1, len(line.utilization) + 1)
        top.plot(steps, [100 * share for share in line.utilization], **look)
        bottom.plot(steps, line.in_flight, **look)
    style.label_axis(top, "y", "utilisation", unit="% of slots held")
    top.set_ylim(0, 104)
    top.set_title("Paging wastes next to nothing, so more sequences fit at a time")
    style.label_axis(bottom, "y", "sequences in flight")
    bottom.set_ylim(bottom=0)
    style.label_axis(bottom, "x", "step", kind="tokens")
    top.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), borderaxespad=0)
    return figure
