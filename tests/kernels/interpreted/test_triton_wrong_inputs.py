"""What the kernels cannot take is refused with an error that names it: they would read beyond the tensors otherwise."""

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.triton_kernels.flash_function import flash_attention

Q, K = torch.zeros(2, 5, 4, 16), torch.zeros(2, 7, 2, 16)
CALLS = [
    ((Q[0], K, K), r"q has shape \[5, 4, 16\]; it must have 4 dimensions"),
    ((Q, K[0], K), r"k has shape \[7, 2, 16\]"),
    ((Q, K.half(), K), r"k is torch.float16 on cpu and q torch.float32 on cpu"),
    ((Q, K, K.to("meta")), r"v is torch.float32 on meta and q torch.float32 on cpu"),
    ((Q.double(), K.double(), K.double()), r"q has dtype torch.float64; the kernels take"),
    ((Q, K, K[:, :6]), r"v has shape \[2, 6, 2, 16\] and k \[2, 7, 2, 16\]"),
    ((Q, K[..., :8], K[..., :8]), r"q has head_dim 16 and k 8"),
    ((torch.zeros(1, 2, 1, 257),) * 3, r"q has head_dim 257 and k 257; they must be equal and from 1 to 256"),
    ((Q[:, :, :3], K, K), r"q has 3 heads and k 2"),
    ((Q, K[:, :, :0], K[:, :, :0]), r"q has 4 heads and k 0"),
    ((Q, K[:1], K[:1]), r"k has shape \[1, 7, 2, 16\] and q \[2, 5, 4, 16\]; make their batches equal"),
    ((Q.to("meta"), K.to("meta"), K.to("meta")), r"q is on meta; move it to a CUDA device"),
    ((Q.bfloat16(), K.bfloat16(), K.bfloat16()), r"torch.bfloat16, which Triton's interpreter rounds towards zero"),
]


@pytest.mark.parametrize(("tensors", "words"), CALLS, ids=[words for _, words in CALLS])
def test_it_is_refused(tensors, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        flash_attention(*tensors)
    assert str(caught.value).endswith(".")
