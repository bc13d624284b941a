"""What others measured, beside what is modelled with nothing but data sheets and stated assumptions.

No figure here was used to choose an assumption. On one GPU the model must be within a fifth; on several it is too fast,
as its docstring says, by no more than 40 %.
"""

from typing import NamedTuple

import pytest

from vllm_teach.performance.simulator.deployment import deploy
from vllm_teach.performance.simulator.serving import serve
from vllm_teach.performance.simulator.traffic import draw_traffic

_A100, _H200 = "a100-80gb-sxm", "h200-141gb-sxm"
# Mean lengths of ShareGPT, as both throughputs of a row of LMDeploy's table say.
_SHAREGPT = (247, 233)


class Published(NamedTuple):
    """`requests` that came together, each of `lengths` tokens in and out, were done after `seconds`."""

    source: str
    model: str
    hardware: str
    devices: int
    lengths: tuple[int, int]
    requests: int
    seconds: float
    max_num_seqs: int = 256


_VLLM = "vLLM's own benchmark of latency, buildkite.com/vllm/performance-benchmark/builds/9515"
_NEMO = "NVIDIA NeMo, performance of Llama-2, docs.nvidia.com/nemo-framework/user-guide/latest/performance/llama.html"
_LMDEPLOY = "LMDeploy 0.2.0, docs/en/benchmark/a100_fp16.md of InternLM/lmdeploy: requests a second of 3,000"
_MUSGRAVE = "vLLM 0.23, 75 tokens a second, johnmusgrave.com/p/vllm-throughput-latency-sweep-on"
FIGURES = (
    Published(_VLLM, "llama-3-8b", _H200, 1, (32, 128), 8, 0.8334),
    Published(_VLLM, "llama-3-70b", _H200, 4, (32, 128), 8, 2.0775),
    Published(_NEMO, "llama-2-7b", _A100, 1, (128, 20), 1, 0.2340),
    Published(_NEMO, "llama-2-7b", _A100, 8, (128, 20), 1, 0.1365),
    Published(_MUSGRAVE, "llama-3-8b", "a100-40gb-sxm", 1, (1024, 128), 1, 128 / 75),
    Published(_LMDEPLOY, "llama-2-7b", _A100, 1, _SHAREGPT, 600, 600 / 14.556),
    Published(_LMDEPLOY, "llama-2-13b", _A100, 1, _SHAREGPT, 600, 600 / 7.950, max_num_seqs=128),
    Published(_LMDEPLOY, "llama-2-70b", _A100, 4, _SHAREGPT, 600, 600 / 7.231),
)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda each: f"{each.model}-{each.devices}x{each.hardware}")
def test_modelled_is_near_what_was_measured(figure: Published) -> None:
    deployment = deploy(
        figure.model, figure.hardware, tensor_parallel_size=figure.devices, max_num_seqs=figure.max_num_seqs
    )
    modelled = serve(deployment, draw_traffic(figure.requests, figure.lengths), max_events=1).run.seconds
    least, most = (0.8, 1.2) if figure.devices == 1 else (0.6, 1.0)
    assert least < modelled / figure.seconds < most
