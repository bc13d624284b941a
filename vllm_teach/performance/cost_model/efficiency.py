"""What share of a device's rates its operators attain, and what a step costs beside them.

Either assumed, for GPUs that are not here, or fitted to measured steps (`fit`). `source` says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.cost_model.attention_work import Work
from vllm_teach.performance.cost_model.operators import OPERATORS
from vllm_teach.performance.hardware import HardwareSpec

# Seconds between two kernels that a CUDA graph launches together: an assumption, a fraction of a launch.
GRAPH_LAUNCH = 1e-6


@dataclass(frozen=True)
class Attained:
    """One kind of operator: the shares of peak arithmetic and of memory bandwidth that it attains, above 0.

    A share above 1 is a rate beyond the ceiling, as from a cache; infinity says that this part costs no time.
    `overlap`, 0 to 1, is the share of the shorter of the two, arithmetic and memory, that hides behind the longer: 1 is
    the roofline, 0 their sum.
    """

    compute: float = 1.0
    bandwidth: float = 1.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute", "bandwidth"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"{name}={getattr(self, name)!r} is no share: use a number above 0.")
        if not 0 <= self.overlap <= 1:
            raise InvalidArgumentError(f"overlap={self.overlap!r} is no share: use a number from 0 to 1.")

    def seconds(self, work: Work, peak: float, bandwidth: float) -> float:
        """Return the seconds of `work` but for its calls; `peak` is in FLOP/s, `bandwidth` in bytes/s."""
        compute, memory = work.flops / (peak * self.compute), work.num_bytes / (bandwidth * self.bandwidth)
        return max(compute, memory) + (1 - self.overlap) * min(compute, memory)


@dataclass(frozen=True)
class Efficiency:
    """`attained` for each of `operators.OPERATORS`, and seconds: of each `call` of one, of each `step`, of each
    `sequence` in it (scheduling, sampling, text). `link` is the attained share of the links' bandwidth.

    Raises InvalidArgumentError for a missing or unknown kind, and for numbers that cannot be.
    """

    attained: Mapping[str, Attained]
    call: float
    step: float
    sequence: float
    link: float
    source: str

    def __post_init__(self) -> None:
        if set(self.attained) != set(OPERATORS):
            raise InvalidArgumentError(
                f"attained has {', '.join(self.attained) or 'nothing'}: give each of {', '.join(OPERATORS)}."
            )
        for name in ("call", "step", "sequence"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidArgumentError(
                    f"{name}={getattr(self, name)!r} is no cost: use a number of seconds from 0."
                )
        if not 0 < self.link <= 1:
            raise InvalidArgumentError(f"link={self.link!r} is no share: use a number above 0 and at most 1.")

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain dicts, strings and numbers; an infinite share is null."""
        shares = {kind: asdict(each) for kind, each in self.attained.items()}
        for share in shares.values():
            share |= {name: None for name, value in share.items() if value == math.inf}
        return {**{name: getattr(self, name) for name in _NUMBERS}, "source": self.source, "attained": shares}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Efficiency:
        """Return what `to_json` was called on. Raises KeyError, TypeError or InvalidArgumentError for anything else."""
        shares = {
            kind: Attained(**{name: math.inf if value is None else value for name, value in share.items()})
            for kind, share in values["attained"].items()
        }
        return cls(attained=shares, source=values["source"], **{name: values[name] for name in _NUMBERS})


_NUMBERS = ("call", "step", "sequence", "link")


def assumed_efficiency(hardware: HardwareSpec, *, eager: bool = False) -> Efficiency:
    """Return what well-made kernels on a GPU attain. Assumptions, each from published figures, for no model measured.

    - Matrix products 70 % of peak and 80 % of bandwidth: large ones alone reach 80 to 90 % (Dao 2023, arXiv 2307.08691,
      section 1), those of a layer are smaller.
    - Attention over a prompt 50 % of peak: FlashAttention 2 reaches 50 to 73 % on an A100 (ibid.).
    - Attention while decoding 60 % of bandwidth, and what goes element by element 80 %.
    - Quantised weights are unpacked for nothing, and multiplied at the 16-bit rate: Marlin does so up to batches of
      16 to 32 (Frantar et al. 2024, arXiv 2408.11743); most kernels are slower, in a prompt slower than plain ones.
    - A step 1 ms and a sequence 15 microseconds on the host: vLLM 0.5 spent 29 % of its time on scheduling, 38 % on the
      GPU, for Llama 3 8B on an H100 (https://blog.vllm.ai/2024/09/05/perf-update.html); of a decode step of 6 ms that
      are 4.6 ms for 250 sequences.
    - A call takes `hardware.kernel_launch` with `eager`, else GRAPH_LAUNCH; links give 70 % of their bandwidth.

    Of published tokens a second (`tests/performance/simulator/test_published.py`) what follows gives 0.93 to 1.21 times
    those on one GPU, 1.0 to 1.35 times on four and up to 1.6 times on eight: how their processes wait for each other is
    not modelled.
    """
    products, element_wise = Attained(0.7, 0.8), Attained(1.0, 0.8)
    attained = dict.fromkeys(OPERATORS, element_wise) | {
        "linear layers": products,
        "logits": products,
        "decode attention": Attained(0.5, 0.6),
        "prefill attention": Attained(0.5, 0.8),
    }
    return Efficiency(
        attained=attained,
        call=hardware.kernel_launch if eager else min(GRAPH_LAUNCH, hardware.kernel_launch),
        step=1e-3,
        sequence=15e-6,
        link=0.7,
        source="assumed (see cost_model.efficiency.assumed_efficiency)",
    )
