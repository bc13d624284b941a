"""`bench simulate`: which steps it counts; how long they take is nobody's claim here."""

import json

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.simulator import speed
from vllm_teach.performance.simulator.speed import bench_simulator, format_simulator_bench


def test_each_batch_size_decodes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_TOKENS", 512)
    bench = bench_simulator("tiny", "l4", 1, rounds=2)
    assert [(row.num_seqs, row.num_steps) for row in bench.rows] == [(1, 496), (64, 8), (256, 2)]
    assert all(len(row.rates) == 2 and min(row.rates) > 0 for row in bench.rows)
    plain = json.loads(json.dumps(bench.to_json()))
    assert [row["num_seqs"] for row in plain["rows"]] == [1, 64, 256]
    assert plain["environment"]["python"]
    lines = format_simulator_bench(bench).splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["1", "64", "256"]


def test_no_rounds() -> None:
    with pytest.raises(InvalidArgumentError, match="rounds=0"):
        bench_simulator("tiny", "l4", 1, rounds=0)
