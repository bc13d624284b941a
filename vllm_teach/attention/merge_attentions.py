"""Merge attention over some keys with attention over others, as xFormers' `merge_attentions` does.

With out_i = N_i / Z_i and lse_i = log Z_i, the whole is sum N_i / sum Z_i = sum out_i exp(lse_i) / sum exp(lse_i). So
outputs and log-sum-exps are enough, and a prefix that many sequences share can be attended to once for all of them
(Juravsky et al., "Hydragen", arXiv 2402.05099).
"""

from collections.abc import Sequence

import torch

from vllm_teach.attention.chunk_summaries import finite
from vllm_teach.errors import InvalidArgumentError


def merge_attentions(
    attn_split: torch.Tensor | Sequence[torch.Tensor],
    lse_split: torch.Tensor | Sequence[torch.Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (out, lse) over the union of keys that the parts attended to, which must not overlap.

    Each part's attention is `[batch, q_len, heads, head_dim]` and its lse `[batch, heads, q_len]`, or with groups
    `[batch, q_len, groups, heads, head_dim]` and `[batch, groups, heads, q_len]`; the parts are a list, or stacked in a
    first dimension. out is of `output_dtype` or the parts'; lse is None without `write_lse`. A row that sees no key in
    any part gives 0 and -inf. Differentiable.

    Raises InvalidArgumentError when there is no part or the shapes do not fit together.
    """
    outs, lses = list(attn_split), list(lse_split)
    if not outs or len(outs) != len(lses):
        raise InvalidArgumentError(
            f"attn_split holds {len(outs)} parts and lse_split {len(lses)}; give equally many, and at least 1."
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        wanted = (out.shape[0], *out.shape[2:-1], out.shape[1]) if out.dim() in (4, 5) else ()
        if out.shape != outs[0].shape or lse.shape != wanted:
            raise InvalidArgumentError(
                f"attn_split[{i}] has shape {list(out.shape)} and lse_split[{i}] {list(lse.shape)}; give "
                "[batch, q_len, heads, head_dim] and [batch, heads, q_len], or both with groups before the heads, in "
                "all parts alike."
            )
    whole = torch.stack(lses)  # [parts, batch, …, q_len]
    shift = finite(whole.detach().amax(dim=0))
    shares = torch.exp(whole - shift)  # each part's denominator, relative to the largest
    total = shares.sum(dim=0)
    some = torch.where(total == 0, 1, total)  # 0 where no part saw a key; 0 / 1 and log(1) then have gradients, too
    lse = torch.where(total == 0, float("-inf"), shift + torch.log(some))
    weights = (shares / some).movedim(-1, 2)[..., None]  # [parts, batch, q_len, …, 1]
    merged = torch.zeros_like(outs[0], dtype=weights.dtype)
    for part, weight in zip(outs, weights, strict=True):
        merged = merged + part * weight
    return merged.to(output_dtype or outs[0].dtype), lse if write_lse else None
