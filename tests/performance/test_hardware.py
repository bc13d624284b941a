"""Facts that hang together: rates, memory and links of the same generation of GPUs, and a machine that was measured."""

import json
import math
from types import SimpleNamespace

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.cost_model.links import LINKS
from vllm_teach.performance.hardware import HARDWARE, HardwareSpec, get_hardware, hardware_names
from vllm_teach.performance.machine import Machine, Rate
from vllm_teach.performance.multiprocessor import MULTIPROCESSORS


def test_every_spec_has_finite_rates_and_names_its_source() -> None:
    assert len(hardware_names()) == 9
    for name, spec in HARDWARE.items():
        assert get_hardware(name) is spec
        assert all(math.isfinite(rate) and rate > 0 for rate in spec.peak.values()), name
        assert {"float32", "tf32", "bfloat16", "float16", "int8"} <= set(spec.peak), name
        assert spec.source, name
        assert LINKS[spec.link.name] is spec.link, name
        # The number in a name is the data sheet's: NVML's is within 2 % of as many GiB.
        stated = [int(part[:-2]) for part in name.split("-") if part.endswith("gb")]
        for size in stated:
            assert spec.memory_bytes / 2**30 == pytest.approx(size, rel=0.02), name


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_rates_are_dense_tensor_cores_clock_times_width(name: str) -> None:
    """A tensor core doubles its width from tf32 to 16 and 8 bits: rates with sparsity in one of them would not fit."""
    peak = HARDWARE[name].peak
    assert peak["bfloat16"] == peak["float16"]
    assert peak["bfloat16"] / peak["tf32"] == pytest.approx(2, rel=0.01)
    # GeForce cards halve the rate of floats with float32 sums, so that integers are four times as fast.
    assert peak["int8"] / peak["bfloat16"] == pytest.approx(4 if name == "rtx-4090" else 2, rel=0.01)
    if "float8" in peak:
        assert peak["float8"] / peak["bfloat16"] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "cores_per_sm", "boost_hz"),
    [
        ("a100-80gb-sxm", 64, 1.410e9),
        ("h100-80gb-sxm", 128, 1.980e9),
        ("l4", 128, 2.040e9),
        ("rtx-4090", 128, 2.520e9),
    ],
)
def test_float32_is_two_flops_of_each_core_and_cycle(name: str, cores_per_sm: int, boost_hz: float) -> None:
    spec = HARDWARE[name]
    assert spec.peak["float32"] == pytest.approx(2 * cores_per_sm * spec.num_sms * boost_hz, rel=0.01)


def test_shared_memory_is_what_the_occupancy_table_says() -> None:
    assert HARDWARE["a100-80gb-sxm"].shared_memory_bytes == MULTIPROCESSORS["sm_80"].shared_bytes
    assert HARDWARE["h100-80gb-sxm"].shared_memory_bytes == MULTIPROCESSORS["sm_90"].shared_bytes


def test_the_ridge_point_of_an_a100() -> None:
    assert get_hardware("a100-80gb-sxm").ridge_point() == pytest.approx(153, abs=0.1)  # 312e12 / 2.039e12


def machine(**changes: object) -> Machine:
    def rate(value: float) -> Rate:
        return Rate(value, value, value, 1)

    values = {
        "device": "cpu",
        "name": "a processor",
        "threads": 2,
        "torch_version": "2.11",
        "matmul": {"float32": rate(1e11), "bfloat16": rate(3e11)},
        "skipped": {"float16": "slow"},
        "read_bandwidth": rate(2e10),
        "copy_bandwidth": rate(1e10),
        "caches": {"L1d": 32768, "L2": 2**20, "L3": 2**25},
    }
    return Machine(**(values | changes))  # type: ignore[arg-type]


def test_a_measured_machine_in_the_same_form() -> None:
    spec = HardwareSpec.of(machine())
    assert dict(spec.peak) == {"float32": 1e11, "bfloat16": 3e11}
    assert (spec.memory_bandwidth, spec.l2_bytes, spec.kernel_launch) == (2e10, 2**25, 0.0)
    assert spec.title == "a processor, 2 threads"
    assert spec.source.startswith("measured")
    assert HardwareSpec.of(machine(caches={})).l2_bytes == 0
    with pytest.raises(InvalidArgumentError, match=r"dtype='float16' has no rate on .* float32, bfloat16"):
        spec.peak_of("float16")


def test_a_measured_gpu_has_its_own_facts_and_no_link_as_fast_as_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its swaps cross PCIe: a copy within its memory says nothing about them."""
    found = SimpleNamespace(
        total_memory=2**37,
        L2_cache_size=50 * 2**20,
        shared_memory_per_multiprocessor=233_472,
        multi_processor_count=132,
    )
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: found)
    spec = HardwareSpec.of(machine(device="cuda", caches={}))
    assert (spec.memory_bytes, spec.l2_bytes) == (2**37, 50 * 2**20)
    assert (spec.shared_memory_bytes, spec.num_sms) == (228 * 1024, 132)
    assert spec.link is spec.host_link is LINKS["pcie4"]
    assert spec.kernel_launch > 0


def test_json_brings_back_the_same() -> None:
    for spec in (*HARDWARE.values(), HardwareSpec.of(machine())):
        assert HardwareSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_an_unknown_name_lists_all() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        get_hardware("a100")
    for name in HARDWARE:
        assert name in str(caught.value)
