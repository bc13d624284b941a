"""Merge attention over some keys with attention over others, as xFormers' `merge_attentions` does.

With out_i = N_i / Z_i and lse_i = log Z_i, the whole is sum N_i / sum Z_i = sum out_i exp(lse_i) / sum exp(lse_i). So
outputs and log-sum-exps are enough, and a prefix that many sequences share can be attended to once for all of them
(Juravsky et al., "Hydragen", arXiv 2402.05099).
"""

from collections.abc import Sequence

import torch

from vllm_teach.attention.chunked import check_output_dtype
from vllm_teach.attention.online_softmax import finite
from vllm_teach.attention.shapes import check_tensor
from vllm_teach.errors import InvalidArgumentError

Parts = torch.Tensor | Sequence[torch.Tensor]


def merge_attentions(
    attn_split: Parts, lse_split: Parts, write_lse: bool = True, output_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (out, lse) over the union of keys that the parts attended to, which must not overlap.

    Each part's attention is `[batch, q_len, heads, head_dim]` and its lse `[batch, heads, q_len]`, or with groups
    `[batch, q_len, groups, heads, head_dim]` and `[batch, groups, heads, q_len]`; the parts are a list, or stacked in a
    first dimension. out is of `output_dtype` or the parts'; lse is None without `write_lse`. A row that sees no key in
    any part gives 0 and -inf. Differentiable.

    Raises InvalidArgumentError when there is no part or the shapes, dtypes or devices do not fit together.
    """
    outs, lses = check_parts("attn_split", attn_split, "lse_split", lse_split)
    out, lse = merge_parts(outs, lses)
    return out.to(check_output_dtype(output_dtype, outs[0].dtype)), lse if write_lse else None


def merge_parts(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the merged (out, lse), both in the dtype of `lses`, of parts that `check_parts` has seen."""
    whole = torch.stack(list(lses))  # [parts, batch, …, q_len]
    shift = finite(whole.detach().amax(dim=0))
    shares = torch.exp(whole - shift)  # each part's denominator, relative to the largest
    total = shares.sum(dim=0)
    some = torch.where(total == 0, 1, total)  # 0 where no part saw a key; 0 / 1 and log(1) then have gradients, too
    lse = torch.where(total == 0, float("-inf"), shift + torch.log(some))
    weights = (shares / some).movedim(-1, 2)[..., None]  # [parts, batch, q_len, …, 1]
    merged = torch.zeros_like(outs[0], dtype=weights.dtype)
    for part, weight in zip(outs, weights, strict=True):
        merged = merged + part * weight
    return merged, lse


def check_parts(
    outs_name: str, outs: Parts, lses_name: str, lses: Parts
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return both arguments as lists; raise InvalidArgumentError unless they hold parts of one attention."""
    lists = [_as_list(outs_name, outs), _as_list(lses_name, lses)]
    if not lists[0] or len(lists[0]) != len(lists[1]):
        raise InvalidArgumentError(
            f"{outs_name} holds {len(lists[0])} parts and {lses_name} {len(lists[1])}; give one or more, as many of "
            "both."
        )
    for i, (out, lse) in enumerate(zip(*lists, strict=True)):
        wanted = (out.shape[0], *out.shape[2:-1], out.shape[1]) if out.dim() in (4, 5) else ()
        if lse.device != out.device:
            raise InvalidArgumentError(
                f"{lses_name}[{i}] is on {lse.device} and {outs_name}[{i}] on {out.device}; move one to the other."
            )
        if out.shape != lists[0][0].shape or lse.shape != wanted:
            raise InvalidArgumentError(
                f"{outs_name}[{i}] has shape {list(out.shape)} and {lses_name}[{i}] {list(lse.shape)}; give "
                "[batch, q_len, heads, head_dim] and [batch, heads, q_len], or both with groups before the heads, in "
                "all parts alike."
            )
    return lists[0], lists[1]


def _as_list(name: str, parts: Parts) -> list[torch.Tensor]:
    """Return the parts of one kind, which must be floats of one dtype on one device."""
    if not isinstance(parts, list | tuple) and not (isinstance(parts, torch.Tensor) and parts.dim()):
        raise InvalidArgumentError(f"{name} is of type {type(parts).__name__}; give a list of tensors, one for a part.")
    for i, part in enumerate(tensors := list(parts)):
        check_tensor(f"{name}[{i}]", part)
        if not part.dtype.is_floating_point or (part.dtype, part.device) != (tensors[0].dtype, tensors[0].device):
            raise InvalidArgumentError(
                f"{name}[{i}] has dtype {part.dtype} on {part.device} and {name}[0] {tensors[0].dtype} on "
                f"{tensors[0].device}; give floats, of one dtype and on one device."
            )
    return tensors
