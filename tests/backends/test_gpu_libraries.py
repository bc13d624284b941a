"""Every backend on the conformance table on a GPU: the real libraries, where the other tests have stand-ins."""

import pytest
import torch

from vllm_teach import backends
from vllm_teach.backends.conformance import ROWS, check_forward, check_gradients


@pytest.mark.parametrize("name", backends.names())
def test_it_passes_what_it_supports_on_a_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device, so the GPU libraries cannot run")
    backend = backends.get(name)
    if (reason := backend.unavailable()) is not None:
        pytest.skip(reason)
    for row in ROWS:
        if backend.supports(row.spec("cuda")) is None:
            check_forward(backend.run, row, "cuda")
        if row.has_gradients and backend.supports(row.spec("cuda", requires_grad=True)) is None:
            check_gradients(backend.run, row, "cuda")
