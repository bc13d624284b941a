"""How long tensors take between devices: a latency for each hop, and bytes over the bandwidth.

The alpha-beta model of a ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009, section 3): each of p devices sends its data in p parts, around the ring once to add them up and
once more to hand out the sums, 2 (p - 1) hops of 1/p of the bytes each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class Link:
    """What connects a device with the others: `bandwidth` in bytes/s out of one device, one way; `latency` of a hop.

    A bandwidth is half of what a data sheet calls "bidirectional". Latencies, in seconds, are assumptions: those that
    NVIDIA's NCCL plans its rings with (src/graph/tuning.cc; LL128 on NVLink, Simple elsewhere).
    """

    name: str
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        for name, least in (("bandwidth", "above 0"), ("latency", "from 0")):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (least == "above 0" and value == 0):
                raise InvalidArgumentError(f"{name}={value!r} is none a link can have: use a number {least}.")

    def all_reduce_seconds(self, num_bytes: float, num_devices: int, calls: int = 1) -> float:
        """Return the modelled seconds of `calls` all-reduces over `num_devices`, of tensors of `num_bytes` in all."""
        hops, share = 2 * (num_devices - 1), 2 * (num_devices - 1) / num_devices
        return calls * hops * self.latency + share * num_bytes / self.bandwidth

    def gather_seconds(self, num_bytes: float, num_devices: int) -> float:
        """Return the modelled seconds until one of `num_devices` has the parts, `num_bytes` each, of all others.

        They come over its one link, one after the other.
        """
        others = num_devices - 1
        return others * self.latency + others * num_bytes / self.bandwidth if others else 0.0


_LINKS = (
    Link("nvlink3", 300e9, 1.9e-6),
    Link("nvlink4", 450e9, 1.9e-6),
    Link("pcie4", 32e9, 5.7e-6),
    Link("pcie5", 64e9, 5.7e-6),
    Link("rdma-100g", 12.5e9, 14e-6),
    Link("rdma-400g", 50e9, 14e-6),
    # No entry of NCCL's: about what a round trip through two kernels' TCP stacks takes, halved.
    Link("ethernet-10g", 1.25e9, 30e-6),
)
LINKS = {link.name: link for link in _LINKS}


def get_link(name: str) -> Link:
    """Return the link called `name`. Raises InvalidArgumentError, listing all, when there is none."""
    if name not in LINKS:
        raise InvalidArgumentError(f"link={name!r} is not known: use one of {', '.join(LINKS)}.")
    return LINKS[name]
