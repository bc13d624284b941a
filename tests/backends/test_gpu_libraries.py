"""Every backend against the float64 formula on a GPU: the real libraries, where the other tests have stand-ins."""

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.backends.windows import windowed_mask

# (rtol, atol): P and V are rounded to 16 bits, and some float32 kernels multiply in three TF32 products.
TOLERANCE = {torch.float16: (1e-3, 4e-3), torch.bfloat16: (1e-2, 2e-2), torch.float32: (1e-5, 3e-4)}
CALLS = [(64, 64, None), (1, 200, None), (40, 150, None), (150, 40, None), (129, 257, None), (40, 150, 30)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", backends.names())
def test_it_equals_the_formula_on_a_gpu(name, dtype, heads, causal):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device, so the GPU libraries cannot run")
    if (reason := backends.availability()[name]) is not None:
        pytest.skip(reason)
    backend, (rtol, atol) = backends.get(name), TOLERANCE[dtype]
    generator = torch.Generator("cuda").manual_seed(0)
    for q_len, kv_len, window in CALLS if causal else CALLS[:-1]:
        spec = AttentionSpec(2, q_len, kv_len, *heads, 64, dtype, "cuda", causal, window)
        if window is not None and backend.supports(spec) is not None:
            continue  # it serves the same call without a window, which has run
        if (reason := backend.supports(spec)) is not None:
            pytest.skip(reason)
        sizes = [(q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1])]
        q, k, v = (torch.randn(2, n, h, 64, device="cuda", generator=generator).to(dtype) for n, h in sizes)
        mask = None if window is None else windowed_mask(q_len, kv_len, window, q.device)
        exact = naive_attention(q.double(), k.double(), v.double(), causal=causal, mask=mask)
        out = backend.run(q, k, v, causal=causal, window=window)
        assert (out.dtype, out.device, out.shape) == (dtype, q.device, q.shape)
        error = (out.double() - exact).abs()
        assert (error <= atol + rtol * exact.abs()).all(), f"{q_len} x {kv_len}, {window=}: {error.max()}"
