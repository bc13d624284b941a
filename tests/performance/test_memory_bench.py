"""The memory benchmark: paging beside reservation in the same memory."""

import json

import pytest

from vllm_teach import cli
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.memory_bench import bench_memory, format_memory


def test_paging_holds_over_twice_as_many_sequences_at_95_percent_utilisation() -> None:
    paged, reserved_8192, reserved_own, *_ = bench_memory(num_requests=400, num_slots=32_768).occupancies
    assert paged.mean_utilization >= 0.95
    assert reserved_8192.name == "max (8192)"
    assert paged.mean_in_flight >= 2 * reserved_own.mean_in_flight >= 2 * reserved_8192.mean_in_flight


def test_the_command_prints_the_table_and_writes_it(tmp_path, capsys) -> None:
    file = tmp_path / "memory.json"
    arguments = ["--mix", "alpaca", "--requests", "600", "--slots", "16384", "--block-size", "4", "--json", str(file)]
    assert cli.main(["bench", "memory", *arguments]) == 0
    bench = bench_memory("alpaca", 600, 16_384, 4)
    assert capsys.readouterr().out == format_memory(bench) + "\n"
    assert json.loads(file.read_text()).items() >= bench.to_json().items()
    assert bench.to_json()["rows"][0]["memory"] == "paged, scattered, block_size 4"


def test_an_unknown_mix_and_a_cache_without_demand_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="mix='code' is not known"):
        bench_memory("code")
    for slots in (65_536, 10**15):
        with pytest.raises(InvalidArgumentError, match=rf"num_slots={slots} holds all requests at once, \d+ slots, so"):
            bench_memory(num_requests=3, num_slots=slots)


def test_a_cache_without_a_block_and_requests_without_end_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"block_size=16 is not valid: use 1 to num_slots=15\."):
        bench_memory(num_slots=15)
    with pytest.raises(InvalidArgumentError, match=r"num_requests=100001 would take hours: use at most 100000\."):
        bench_memory(num_requests=100_001)
