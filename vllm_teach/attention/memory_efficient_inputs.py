"""The shapes that `memory_efficient_attention` takes, checked and made into this project's one shape.

xFormers writes BMK, BMHK and BMGHK: batch, length (M), groups, heads, head_dim (K). The scores of BMGHK are
`[batch, groups, heads, q_len, kv_len]`.
"""

import torch

from vllm_teach.attention.chunked import check_bias
from vllm_teach.attention.shapes import check_real_device, check_tensor
from vllm_teach.errors import InvalidArgumentError

_KINDS = "[batch, length, heads, head_dim], [batch, length, groups, heads, head_dim] or [batch, length, head_dim]"


def check_inputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise InvalidArgumentError, naming the argument and both shapes, unless the three fit together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor, f" {_KINDS}")
        if tensor.dtype != query.dtype:
            raise InvalidArgumentError(f"{name} has dtype {tensor.dtype} and query {query.dtype}; make them equal.")
        if tensor.device != query.device:
            raise InvalidArgumentError(f"{name} is on {tensor.device} and query on {query.device}; move one there.")
    check_real_device("query", query)
    if not query.dtype.is_floating_point or query.element_size() < 2:
        raise InvalidArgumentError(f"query has dtype {query.dtype}; use float16, bfloat16, float32 or float64.")
    if query.dim() not in (3, 4, 5) or 0 in query.shape[2:]:
        raise InvalidArgumentError(
            f"query has shape {list(query.shape)}; give {_KINDS}, with no head or head_dim of 0."
        )
    # All sizes but the length are query's; nothing is broadcast, as in xFormers.
    if key.dim() != query.dim() or key.shape[0] != query.shape[0] or key.shape[2:] != query.shape[2:]:
        raise InvalidArgumentError(
            f"key has shape {list(key.shape)} and query {list(query.shape)}; all sizes but the second must be equal. "
            "Expand shared heads yourself, which copies nothing."
        )
    if value.dim() != key.dim() or value.shape[:-1] != key.shape[:-1] or value.shape[-1] == 0:
        raise InvalidArgumentError(
            f"value has shape {list(value.shape)} and key {list(key.shape)}; all sizes but the last must be equal, and "
            "the last not 0."
        )


def heads_together(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the three as `[batch, length, heads, head_dim]`; key and value with fewer heads where a group shares one.

    A head that was expanded over its group (stride 0) is one in memory, and is taken once. Not of a leaf of autograd:
    it keeps a gradient for each of its entries, and no one sums them up.
    """
    if query.dim() == 3:
        return query[:, :, None], key[:, :, None], value[:, :, None]
    if query.dim() == 4:
        return query, key, value
    q = query.flatten(2, 3)  # [batch, q_len, groups * heads, head_dim]
    leaf = any(x.requires_grad and (x.is_leaf or x.retains_grad) for x in (key, value))
    if (key.stride(3) == value.stride(3) == 0 and not leaf) or key.shape[3] == 1:
        return q, key[:, :, :, 0], value[:, :, :, 0]  # [batch, kv_len, groups, head_dim]
    return q, key.flatten(2, 3), value.flatten(2, 3)


def heads_apart(out: torch.Tensor, lse: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out in the dimensions of `query`, and lse `[batch, heads, q_len]` or `[batch, groups, heads, q_len]`."""
    if query.dim() == 3:
        return out.squeeze(2), lse
    if query.dim() == 4:
        return out, lse
    groups, heads = query.shape[2:4]
    return out.unflatten(2, (groups, heads)), lse.unflatten(1, (groups, heads))


def score_shape(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the scores: `[batch, heads, q_len, kv_len]`, with groups before the heads or without both."""
    return (query.shape[0], *query.shape[2:-1], query.shape[1], key.shape[1])


def bias_over_heads(bias: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return `bias`, which must fit scores of `shape`, as `[1 or batch, 1 or heads, 1 or q_len, 1 or kv_len]`."""
    check_bias("attn_bias", bias, shape, device)
    if bias.dim() == 3:
        return bias[:, None]
    if bias.dim() == 4:
        return bias
    if bias.shape[1] != bias.shape[2]:  # one may be 1 and the other not: flattened, each head needs its own
        bias = bias.expand(-1, *shape[1:3], -1, -1)
    return bias.flatten(1, 2)
