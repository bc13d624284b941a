"""Runs that others published with their settings: what the model of hardware that is not here is held against.

They are claims as well. What sets them apart is that they can be tested: batch, lengths and devices are given. No
figure here was used to choose an assumption of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

LMDEPLOY = "InternLM/lmdeploy, docs/en/benchmark/a100_fp16.md, static inference, v0.1.0a1, CUDA 11.8"
LMDEPLOY_REQUESTS = "the same page for 0.2.0, requests a second of 3,000; mean lengths as both throughputs of a row say"
LLM_BENCHMARK = "sfc-gh-zhwang/llm_benchmark, README.md; neither versions nor dates, seconds of a whole batch"
VLLM = "vLLM's own benchmark of latency, buildkite.com/vllm/performance-benchmark/builds/9515"
NEMO = "NVIDIA NeMo, performance of Llama-2, docs.nvidia.com/nemo-framework/user-guide/latest/performance/llama.html"
MUSGRAVE = "vLLM 0.23, 75 tokens a second, johnmusgrave.com/p/vllm-throughput-latency-sweep-on"


@dataclass(frozen=True)
class PublishedRun:
    """`batch` sequences of one length that come together, on `devices` cards of `hardware`; output tokens a second.

    `max_num_seqs` is the most of them that run at a time, None for all.
    """

    system: str
    hardware: str
    devices: int
    batch: int
    input_len: int
    output_len: int
    tokens_per_s: float
    source: str
    model: str = "llama-2-70b"
    max_num_seqs: int | None = None

    def modelled(self) -> float:
        """Return the output tokens a second that our simulator expects of a full system, with assumed efficiencies."""
        from vllm_teach.performance.simulator.serving import simulate_serving
        from vllm_teach.performance.simulator.traffic import draw_traffic

        report = simulate_serving(
            self.model,
            self.hardware,
            workload=draw_traffic(self.batch, (self.input_len, self.output_len)),
            tensor_parallel_size=self.devices,
            dtype="float16",
            max_num_seqs=self.max_num_seqs or self.batch,
            enable_prefix_caching=False,
            max_events=1,
        )
        return report.output_throughput


def _lmdeploy(batch: int, input_len: int, output_len: int, tokens_per_s: float) -> PublishedRun:
    return PublishedRun("lmdeploy", "a100-80gb-sxm", 4, batch, input_len, output_len, tokens_per_s, LMDEPLOY)


def _whole_batch(system: str, batch: int, input_len: int, output_len: int, seconds: float) -> PublishedRun:
    rate = batch * output_len / seconds
    return PublishedRun(system, "a100-40gb-sxm", 8, batch, input_len, output_len, rate, LLM_BENCHMARK)


def _seconds(
    source: str, model: str, hardware: str, devices: int, batch: int, lengths: tuple[int, int], seconds: float,
    system: str = "vLLM", max_num_seqs: int | None = None,
) -> PublishedRun:  # fmt: skip
    rate = batch * lengths[1] / seconds
    return PublishedRun(system, hardware, devices, batch, *lengths, rate, source, model, max_num_seqs)


def _requests(model: str, devices: int, a_second: float, max_num_seqs: int = 256) -> PublishedRun:
    """A fifth of the 3,000 requests that were served: by then the rate is steady."""
    return _seconds(
        LMDEPLOY_REQUESTS, model, "a100-80gb-sxm", devices, 600, (247, 233), 600 / a_second, "lmdeploy", max_num_seqs
    )


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
"""Llama-2-70B on A100s, as article A has it."""

OTHER_RUNS = (
    _seconds(VLLM, "llama-3-8b", "h200-141gb-sxm", 1, 8, (32, 128), 0.8334),
    _seconds(VLLM, "llama-3-70b", "h200-141gb-sxm", 4, 8, (32, 128), 2.0775),
    _seconds(NEMO, "llama-2-7b", "a100-80gb-sxm", 1, 1, (128, 20), 0.2340, "NeMo"),
    _seconds(NEMO, "llama-2-7b", "a100-80gb-sxm", 8, 1, (128, 20), 0.1365, "NeMo"),
    _seconds(MUSGRAVE, "llama-3-8b", "a100-40gb-sxm", 1, 1, (1024, 128), 128 / 75),
    _requests("llama-2-7b", 1, 14.556),
    _requests("llama-2-13b", 1, 7.950, max_num_seqs=128),
    _requests("llama-2-70b", 4, 7.231),
)
"""Other models, other hardware, and requests that replace each other."""
