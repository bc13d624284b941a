"""One check for each kernel that works on tiles, with a given tile, on a problem whose tiles are cut at every edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vllm_teach.attention.patterns import Causal, GlobalTokens, LocalWindow, Pattern
from vllm_teach.attention.patterns.base import TileKind
from vllm_teach.attention.patterns.tile_csr import tile_csr
from vllm_teach.attention.reference import naive_attention
from vllm_teach.kernels.triton_kernels.block_sparse_forward import TileLists, block_sparse_attention
from vllm_teach.kernels.triton_kernels.flash_backward import flash_backward
from vllm_teach.kernels.triton_kernels.flash_forward import flash_forward
from vllm_teach.kernels.triton_kernels.paged_decode import paged_attention
from vllm_teach.kernels.triton_kernels.problem import Options, Problem
from vllm_teach.validation.gpu.checks import compared
from vllm_teach.validation.gpu.result import Record
from vllm_teach.validation.gpu.setting import Setting

if TYPE_CHECKING:
    from vllm_teach.kernels.triton_kernels.tuning import Tile

_PATTERN = Causal() & (GlobalTokens(4) | LocalWindow(40))
_BLOCK_SIZE = 16


def check_forward(setting: Setting, head_dim: int, dtype: torch.dtype, tile: Tile) -> list[Record]:
    """The forward kernel under a causal mask."""
    q, k, v = _qkv(setting, head_dim, dtype)
    out, _ = flash_forward(Problem.of(q, k, v, Options(right=0)), tile)
    return [_forward_record(f"forward {tile}", out.view(q.shape), q, k, v, Causal())]


def check_keys(setting: Setting, head_dim: int, dtype: torch.dtype, tile: Tile) -> list[Record]:
    """The kernel for dk and dv under a causal mask."""
    return _gradient_records("backward_keys", setting, head_dim, dtype, key_tile=tile)[1:]


def check_queries(setting: Setting, head_dim: int, dtype: torch.dtype, tile: Tile) -> list[Record]:
    """The kernel for dq under a causal mask."""
    return _gradient_records("backward_queries", setting, head_dim, dtype, query_tile=tile)[:1]


def check_block_sparse(setting: Setting, head_dim: int, dtype: torch.dtype, tile: Tile) -> list[Record]:
    """The block-sparse kernel under a causal mask with a window and global tokens: all kinds of tiles."""
    q, k, v = _qkv(setting, head_dim, dtype)
    csr = tile_csr(_PATTERN, q.shape[1], k.shape[1], tile.q, tile.k)
    lists = TileLists.of(csr.row_ptr, csr.k_tile, csr.kind == TileKind.FULL, csr.mask_index, csr.masks, q.device)
    out, _ = block_sparse_attention(q, k, v, lists)
    return [_forward_record(f"block_sparse {tile}", out, q, k, v, _PATTERN)]


def check_paged(setting: Setting, head_dim: int, dtype: torch.dtype, tile: Tile) -> list[Record]:
    """The paged kernel, one query per sequence, in one split and in three, over blocks in reversed order."""
    q, k, v = _qkv(setting, head_dim, dtype)
    blocks = -(-k.shape[1] // _BLOCK_SIZE)
    room = torch.zeros(k.shape[0], blocks * _BLOCK_SIZE - k.shape[1], *k.shape[2:], dtype=dtype, device=k.device)
    whole = [torch.cat([x, room + torch.nan], dim=1) for x in (k, v)]  # what no sequence owns is NaN
    # [batch, blocks * block_size, …] -> [batch * blocks, block_size, …]
    caches = [x.unflatten(1, (blocks, _BLOCK_SIZE)).flatten(0, 1).flip(0) for x in whole]
    table = torch.arange(k.shape[0] * blocks, dtype=torch.int32, device=q.device).flip(0).view(-1, blocks)
    kv_lens = torch.full((k.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    last = q[:, -1:]  # [batch, 1, q_heads, head_dim]
    records = []
    for splits in (1, 3):
        out, _ = paged_attention(last[:, 0], *caches, table, kv_lens, options=Options(), splits=splits, tile=tile)
        records.append(_forward_record(f"paged {tile}, {splits} splits", out[:, None], last, k, v, None))
    return records


CHECKS: dict[str, Callable[[Setting, int, torch.dtype, Tile], list[Record]]] = {
    "forward": check_forward,
    "backward_keys": check_keys,
    "backward_queries": check_queries,
    "block_sparse": check_block_sparse,
    "paged": check_paged,
}


def _qkv(setting: Setting, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Two query heads on one key head; 300 tokens are more than two of the largest tiles, and no multiple of any."""
    length = setting.pick(300, 300, 70)
    q, k, v = setting.qkv(2, length, 2, head_dim, dtype=dtype)
    return q, k[:, :, :1].contiguous(), v[:, :, :1].contiguous()


def _forward_record(
    name: str, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern | None
) -> Record:
    exact = naive_attention(q.double(), k.double(), v.double(), pattern=pattern)
    plain = naive_attention(q, k, v, pattern=pattern)
    allowed = 2 * _error(plain, exact) + 1e-5
    return compared(f"{name}, head_dim {q.shape[-1]}, {q.dtype}", _error(out, exact), allowed)


def _gradient_records(
    name: str,
    setting: Setting,
    head_dim: int,
    dtype: torch.dtype,
    key_tile: Tile | None = None,
    query_tile: Tile | None = None,
) -> list[Record]:
    """Return the records of dq, dk, dv; a kernel without a tile here takes its first candidate."""
    from vllm_teach.kernels.triton_kernels.tuning import candidates

    q, k, v = _qkv(setting, head_dim, dtype)
    dout = setting.randn(*q.shape, dtype=dtype, seed=3)
    problem = Problem.of(q, k, v, Options(right=0))
    out, lse = flash_forward(problem, candidates("forward", head_dim, dtype)[0])
    key_tile = key_tile or candidates("backward_keys", head_dim, dtype)[0]
    query_tile = query_tile or candidates("backward_queries", head_dim, dtype)[0]
    found = flash_backward(problem, out, lse, dout.flatten(0, 1), key_tile, query_tile)
    exact = _plain_gradients(q.double(), k.double(), v.double(), dout.double())
    plain = _plain_gradients(q, k, v, dout)
    records = []
    for letter, grad, truth, rough in zip("qkv", found, exact, plain, strict=True):
        allowed = 3 * _error(rough, truth) + 1e-4 * float(truth.abs().max())
        label = f"{name} {query_tile if letter == 'q' else key_tile}, d{letter}, head_dim {head_dim}, {dtype}"
        records.append(compared(label, _error(grad.view(truth.shape), truth), allowed))
    return records


def _plain_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(naive_attention(*leaves, causal=True), leaves, dout)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; infinite where something is not finite, which a comparison with NaN would let pass."""
    difference = (found.double() - exact).abs()
    return float(difference.max()) if bool(difference.isfinite().all()) else 1e30
