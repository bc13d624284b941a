import json
from dataclasses import replace

import pytest

from vllm_teach.errors import InvalidArgumentError, ResourceNotFoundError
from vllm_teach.performance.quantization_bench import QuantizationBench, QuantizationRow, format_quantization
from vllm_teach.performance.quantization_result import provenance, read_quantization
from vllm_teach.performance.timing import Timing
from vllm_teach.quantization.bootstrap import PerplexityChange

ENVIRONMENT = {
    "device": "a processor",
    "cpu_capability": "AVX2",
    "torch_threads": 2,
    "vllm_teach": "0.1",
    "python": "3.11",
    "packages": {"torch": "2.9"},
}


@pytest.fixture
def bench():
    change = PerplexityChange(1.02, 1.01, 1.03, 0.95, 40)
    timing = Timing.of([0.1, 0.2, 0.3])
    row = QuantizationRow("bf16", 15.0, change, 100, 120, timing, timing, None, None)
    rows = [row, replace(row, name="awq4", error=0.01, rtn_error=0.02)]
    return QuantizationBench(
        "smollm2", 64, (128, 512), 10_000, 1024, 64, 5, rows, {"awq4 / rtn4": change}, dict(ENVIRONMENT)
    )


def test_read_back_as_written(bench, tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(bench.to_json()))
    found = read_quantization(file)
    assert found == bench
    assert format_quantization(found) == format_quantization(bench)


def test_provenance_names_file_device_versions_and_command(bench, tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps({**bench.to_json(), "command": "vllm-teach bench quantization --model smollm2"}))
    text = provenance(read_quantization(file), file)
    for part in ("result.json", "--model smollm2", "a processor", "2 threads", "torch 2.9", "Python 3.11", "128 x 512"):
        assert part in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rows": 3}', pytest.param("[" * 10**5, id="deep")])
def test_other_files_are_refused(text, tmp_path):
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"result\.json"):
        read_quantization(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(InvalidArgumentError, match=f"file='{path.name}' holds no result"):
            read_quantization(path)


def test_a_missing_data_file_is_named():
    with pytest.raises(ResourceNotFoundError, match="nowhere"):
        read_quantization("results/nowhere.json")
