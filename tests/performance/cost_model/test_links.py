"""The formulas against a ring that is played through, hop by hop."""

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.cost_model.links import LINKS, Link, get_link


def play_ring(link: Link, num_bytes: int, devices: int) -> float:
    """Everybody sends a part to the next at the same time, until everybody has every part of all."""
    have = [[{device} for _ in range(devices)] for device in range(devices)]  # [device][part]: whose summands
    seconds, hops = 0.0, 0
    while any(part != set(range(devices)) for parts in have for part in parts):
        sent = [(device, (device - hops) % devices) for device in range(devices)]
        for device, part, summands in [(device, part, set(have[device][part])) for device, part in sent]:
            have[(device + 1) % devices][part] |= summands
        hops += 1
        seconds += link.latency + num_bytes / devices / link.bandwidth
    assert hops == 2 * (devices - 1)
    return seconds


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_an_all_reduce_is_two_rounds_of_a_ring(devices: int) -> None:
    link = Link("slow", 1e6, 1e-3)
    assert link.all_reduce_seconds(24_000, devices) == pytest.approx(play_ring(link, 24_000, devices))
    assert link.all_reduce_seconds(48_000, devices, calls=2) == pytest.approx(2 * play_ring(link, 24_000, devices))


def test_one_device_sends_nothing() -> None:
    assert Link("slow", 1e6, 1e-3).all_reduce_seconds(1000, 1) == 0
    assert Link("slow", 1e6, 1e-3).gather_seconds(1000, 1) == 0


def test_a_gather_brings_the_others_parts_over_one_link() -> None:
    assert Link("slow", 1e6, 1e-3).gather_seconds(1000, 4) == pytest.approx(3 * (1e-3 + 1e-3))


def test_links_are_listed_from_their_names() -> None:
    assert get_link("nvlink3").bandwidth == 600e9 / 2  # a data sheet counts both directions
    assert get_link("rdma-100g").bandwidth == 100e9 / 8
    with pytest.raises(InvalidArgumentError) as caught:
        get_link("string")
    assert all(name in str(caught.value) for name in LINKS)


@pytest.mark.parametrize("wrong", [{"bandwidth": 0.0}, {"bandwidth": float("nan")}, {"latency": -1.0}])
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}="):
        Link("bad", **({"bandwidth": 1.0, "latency": 0.0} | wrong))
