"""Runs of Llama-2-70B on A100s that others published with their settings: what the model of an A100 is held against.

They are claims as well. What sets them apart is that they can be tested: batch, lengths and devices are given.
"""

from __future__ import annotations

from dataclasses import dataclass

LMDEPLOY = "InternLM/lmdeploy, docs/en/benchmark/a100_fp16.md, static inference, v0.1.0a1, CUDA 11.8"
LLM_BENCHMARK = "sfc-gh-zhwang/llm_benchmark, README.md; neither versions nor dates, seconds of a whole batch"


@dataclass(frozen=True)
class PublishedRun:
    """Sequences of one length at a time, `batch` of them, on `devices` cards of `hardware`; output tokens a second."""

    system: str
    hardware: str
    devices: int
    batch: int
    input_len: int
    output_len: int
    tokens_per_s: float
    source: str

    def modelled(self) -> float:
        """Return the output tokens a second that our simulator expects of a full system, with assumed efficiencies."""
        from vllm_teach.performance.simulator.serving import simulate_serving
        from vllm_teach.performance.simulator.traffic import draw_traffic

        report = simulate_serving(
            "llama-2-70b",
            self.hardware,
            workload=draw_traffic(self.batch, (self.input_len, self.output_len)),
            tensor_parallel_size=self.devices,
            dtype="float16",
            max_num_seqs=self.batch,
            enable_prefix_caching=False,
            max_events=1,
        )
        return report.output_throughput


def _lmdeploy(batch: int, input_len: int, output_len: int, tokens_per_s: float) -> PublishedRun:
    return PublishedRun("lmdeploy", "a100-80gb-sxm", 4, batch, input_len, output_len, tokens_per_s, LMDEPLOY)


def _whole_batch(system: str, batch: int, input_len: int, output_len: int, seconds: float) -> PublishedRun:
    rate = batch * output_len / seconds
    return PublishedRun(system, "a100-40gb-sxm", 8, batch, input_len, output_len, rate, LLM_BENCHMARK)


PUBLISHED_RUNS = (
    _lmdeploy(1, 128, 128, 33.63),
    _lmdeploy(1, 128, 2048, 32.38),
    _lmdeploy(1, 2048, 128, 28.32),
    _lmdeploy(1, 2048, 2048, 31.9),
    _lmdeploy(16, 128, 128, 439.77),
    _lmdeploy(16, 128, 2048, 482.99),
    _lmdeploy(16, 2048, 128, 189.34),
    _lmdeploy(16, 2048, 2048, 399.42),
    _lmdeploy(32, 128, 128, 746.36),
    _lmdeploy(32, 128, 2048, 853.56),
    _lmdeploy(32, 2048, 128, 232.6),
    _lmdeploy(32, 2048, 2048, 636.23),
    _lmdeploy(64, 128, 128, 1159.84),
    _lmdeploy(64, 128, 2048, 1391.8),
    _lmdeploy(64, 2048, 128, 270.47),
    _lmdeploy(64, 2048, 2048, 930.46),
    _whole_batch("TensorRT-LLM", 24, 1024, 1024, 38.97),
    _whole_batch("vLLM", 24, 1024, 1024, 76.12),
    _whole_batch("transformers", 24, 1024, 1024, 439.02),
)
