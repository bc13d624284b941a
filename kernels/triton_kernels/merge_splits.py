"""The second half of Flash-Decoding: the results of a sequence's splits become one, weighted by their log-sum-exps."""

import torch
import triton
import triton.language as tl

from .tile_math import LN2, LOG2E, padded


def merge_splits_spec(parts: torch.Tensor, part_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of `parts` float32 `[splits, rows, head_dim]` with `part_lse` `[splits, rows]`, finite here."""
    lse = part_lse.logsumexp(dim=0)  # [rows]
    return ((part_lse - lse).exp()[..., None] * parts).sum(dim=0), lse


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_splits_kernel(
    parts_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Write one row of out `[rows, HEAD_DIM]`, in its dtype, and of lse `[rows]`; a split without keys has lse -inf."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    there = split < splits
    lse = tl.load(part_lse_ptr + split.to(tl.int64) * rows + row, mask=there, other=float("-inf")) * LOG2E
    m = tl.max(lse, axis=0)
    shift = tl.where(m == float("-inf"), 0.0, m)
    weights = tl.exp2(lse - shift)  # [SPLITS]
    total = tl.sum(weights, axis=0)
    offsets = (split.to(tl.int64) * rows + row)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(parts_ptr + offsets, mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)  # [SPLITS, DIM]
    out = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    tl.store(lse_ptr + row, (m + tl.log2(total)) * LN2)


def merge_splits(parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge `parts` float32 `[splits, …, head_dim]` and `part_lse` `[splits, …]` into `out` and `lse`, in place.

    All are contiguous and on one device; a row whose splits are all -inf becomes 0 and -inf.
    """
    splits, head_dim = len(parts), parts.shape[-1]
    with torch.cuda.device_of(out):
        merge_splits_kernel[(lse.numel(),)](
            parts, part_lse, out, lse, lse.numel(), splits,
            HEAD_DIM=head_dim, DIM=padded(head_dim), SPLITS=triton.next_power_of_2(splits),
        )  # fmt: skip
