"""FlashAttention's functions: the names, argument order, defaults and semantics of FlashAttention 2.8, on any device.

What holds for all of them:

- Masks are aligned bottom-right: with `causal`, the last query sees the last key. `window_size` = (left, right) shows
  query i the keys from i + kv_len - q_len - left to i + kv_len - q_len + right, both inclusive; -1 is no limit.
- `softmax_scale` is 1/sqrt(head_dim) by default. `softcap` and `alibi_slopes`: see `Variant`.
- `dropout_p` drops probabilities, by a seed that is drawn from PyTorch's default generator.
- out, and the log-sum-exp too, can be differentiated in q, k and v; the backward recomputes the scores tile by tile.
- `deterministic` is accepted and changes nothing: this backward always adds in the same order.
- With `return_attn_probs` the result is (out, softmax_lse, S_dmask). softmax_lse is float32 (float64 for float64
  input). S_dmask holds, with dropout, the probabilities before dropout, negative where dropped; without dropout it is
  an empty tensor, as in FlashAttention: a caller who wants only the log-sum-exp need not pay for n² numbers. It has no
  gradient.

Differences from FlashAttention 2, of which all but the first three only allow more:

- The log-sum-exp of a row that sees no key is -inf here and +inf there. Its output is 0 in both.
- S_dmask has the sizes of the scores; there its sides are rounded up to multiples of 128, and its scaling may differ.
- A window that reaches kv_len or more keys to the right is no limit there: of more queries than keys, also the first,
  which stand before key 0, then see every key.
- Any floating-point dtype of 16 bits or more and any head size; there float16 and bfloat16, up to 256.
- softcap with dropout, a gradient of the log-sum-exp, a gradient through a paged cache, blocks of any size (there
  multiples of 256).

Source: `flash_attn/flash_attn_interface.py` of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_teach.attention.dropout import check_dropout, keep_mask, number_heads
from vllm_teach.attention.layout import Layout, Paged, Varlen
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.sequencewise import DenseArguments, sequence_calls
from vllm_teach.attention.shapes import check_count, check_ints, check_real, check_tensor, compute_dtype
from vllm_teach.attention.tiled import flash_attention
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.errors import InvalidArgumentError

WithProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | WithProbs:
    """Return softmax(q k^T * softmax_scale) v; the module says what the arguments mean.

    Shapes: q `[batch, q_len, q_heads, head_dim]`, k and v `[batch, kv_len, kv_heads, head_dim]`, where q_heads is a
    multiple of kv_heads; out like q. With `return_attn_probs` also softmax_lse `[batch, q_heads, q_len]` and S_dmask
    `[batch, q_heads, q_len, kv_len]`.

    Raises InvalidArgumentError when the arguments do not fit together.
    """
    arguments = flash_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    out, lse = flash_attention(q, k, v, return_lse=True, **arguments)
    if not return_attn_probs:
        return out
    return out, lse, _signed_probs(q, k, v, {**arguments}) if dropout_p else q.new_empty(0)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | WithProbs:
    """Return `flash_attn_func` of q and the two in kv `[batch, kv_len, 2, kv_heads, head_dim]`.

    Raises InvalidArgumentError when the arguments do not fit together.
    """
    k, v = _unpack("kv", kv, 2)
    variant = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_func(q, k, v, *variant, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | WithProbs:
    """Return `flash_attn_func` of the three in qkv `[batch, length, 3, heads, head_dim]`.

    Raises InvalidArgumentError when the arguments do not fit together.
    """
    q, k, v = _unpack("qkv", qkv, 3)
    variant = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_func(q, k, v, *variant, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | WithProbs:
    """Return the attention of sequences of different lengths, which lie behind one another without padding.

    Shapes: q `[total_q, q_heads, head_dim]`, k and v `[total_k, kv_heads, head_dim]`; out like q. Sequence i owns the
    rows from cu_seqlens_q[i] to before cu_seqlens_q[i + 1] of q, and likewise of k and v; both are int32
    `[batch + 1]`. A sequence may be empty on either side. No sequence may be longer than `max_seqlen_q` and
    `max_seqlen_k`, which may be larger than needed.

    With `block_table`, int32 `[batch, most blocks of one]`, k and v are the blocks of a cache `[num_blocks,
    block_size, kv_heads, head_dim]`, and `cu_seqlens_k` only says how many keys each sequence has.

    With `return_attn_probs` also softmax_lse `[q_heads, total_q]` and S_dmask `[batch, q_heads, max_seqlen_q,
    max_seqlen_k]`, which is 0 outside of a sequence. ALiBi slopes may be `[q_heads]` or `[batch, q_heads]`.

    Raises InvalidArgumentError when the arguments do not fit together, a sequence is longer than its maximum or than
    the block table covers, or a block is not there.
    """
    layout = _layout(k, cu_seqlens_q, cu_seqlens_k, block_table)
    longest = (check_count("max_seqlen_q", max_seqlen_q, 0), check_count("max_seqlen_k", max_seqlen_k, 0))
    for name, starts, most in (("q", cu_seqlens_q, longest[0]), ("k", cu_seqlens_k, longest[1])):
        if len(starts) > 1 and (length := int(starts.diff().max())) > most:
            raise InvalidArgumentError(
                f"max_seqlen_{name} is {most} and a sequence of cu_seqlens_{name} has length {length}; "
                "give the longest length or more."
            )
    arguments = flash_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    outs, lses, probs = [], [], []
    for call in sequence_calls(q, k, v, layout, **arguments):
        out, lse = flash_attention(*call[:3], return_lse=True, **call.arguments)
        outs.append(out[0])  # [q_len, q_heads, head_dim]
        lses.append(lse[0])  # [q_heads, q_len]
        if return_attn_probs and dropout_p:
            probs.append(_pad(_signed_probs(*call[:3], call.arguments), longest))
    out = torch.cat([q[:0], *outs])  # q[:0]: there may be no sequence
    if not return_attn_probs:
        return out
    dtype = compute_dtype(q)
    lse = torch.cat([q.new_empty(q.shape[1], 0, dtype=dtype), *lses], dim=1)
    return out, lse, torch.cat([q.new_empty(0, q.shape[1], *longest), *probs]) if dropout_p else q.new_empty(0)


def flash_arguments(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float = 0.0,
) -> VariantArguments:
    """Return FlashAttention's arguments under this project's names, with the dropout seed drawn.

    `Variant.of` checks them; here only those whose names it does not know. Raises InvalidArgumentError for these.
    """
    if softmax_scale is not None:
        check_real("softmax_scale", softmax_scale, "a finite number, or None for 1/sqrt(head_dim)")
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        "dropout_seed": check_dropout(dropout_p, None),
    }


def _layout(
    k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, block_table: torch.Tensor | None
) -> Layout:
    """Return the layout that the arguments describe, checked as far as `check_layout` does not know their names."""
    check_ints("cu_seqlens_q", cu_seqlens_q, (None,))
    check_ints("cu_seqlens_k", cu_seqlens_k, (None,))
    if block_table is None:
        return Varlen(cu_seqlens_q, cu_seqlens_k)
    check_ints("block_table", block_table, (None, None))
    if len(cu_seqlens_k) != len(cu_seqlens_q):
        raise InvalidArgumentError(
            f"cu_seqlens_k has shape {list(cu_seqlens_k.shape)} and cu_seqlens_q {list(cu_seqlens_q.shape)}; "
            "make them equal."
        )
    kv_lens = cu_seqlens_k.diff()  # [batch]
    if len(cu_seqlens_k) and (int(cu_seqlens_k[0]) != 0 or bool((kv_lens < 0).any())):
        raise InvalidArgumentError(f"cu_seqlens_k is {cu_seqlens_k.tolist()}; it must start with 0 and never fall.")
    if isinstance(k, torch.Tensor) and k.dim() == 4 and len(kv_lens):
        room = block_table.shape[1] * k.shape[1]
        if int(kv_lens.max()) > room:
            raise InvalidArgumentError(
                f"cu_seqlens_k gives a sequence {int(kv_lens.max())} keys; block_table has room for {room} "
                f"({block_table.shape[1]} blocks of {k.shape[1]})."
            )
    return Paged(cu_seqlens_q, block_table, kv_lens)


def _unpack(name: str, packed: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """Return the `parts` tensors `[batch, length, heads, head_dim]` of `packed` `[batch, length, parts, heads, d]`."""
    check_tensor(name, packed)
    if packed.dim() != 5 or packed.shape[2] != parts:
        raise InvalidArgumentError(
            f"{name} has shape {list(packed.shape)}; it must be [batch, length, {parts}, heads, head_dim]."
        )
    return packed.unbind(2)


@torch.no_grad()
def _signed_probs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: DenseArguments) -> torch.Tensor:
    """Return P before dropout, `[batch, q_heads, q_len, kv_len]`, negative where dropout drops it."""
    p, first_batch = arguments["dropout_p"], arguments.get("first_batch", 0)
    seed = check_dropout(p, arguments["dropout_seed"])
    plain: DenseArguments = {**arguments, "dropout_p": 0.0}
    _, probs = naive_attention(q, k, v, return_probs=True, **plain)
    batch, q_heads, q_len, kv_len = probs.shape
    heads = number_heads(first_batch, batch, q_heads, q.device)
    kept = keep_mask(seed, p, heads, (0, q_len), (0, kv_len))  # [batch * q_heads, q_len, kv_len]
    return torch.where(kept.view_as(probs), probs, -probs)


def _pad(probs: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return `probs` `[1, q_heads, q_len, kv_len]` with its last two sizes filled up with zeros to `size`."""
    return torch.nn.functional.pad(probs, (0, size[1] - probs.shape[3], 0, size[0] - probs.shape[2]))
