"""Keep rows that see no key away from libraries that answer NaN for them."""

from collections.abc import Callable

import torch


def attend_seeing_rows(
    attend: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blind: int
) -> torch.Tensor:
    """Call `attend` on all but the first `blind` rows of q `[batch, q_len, q_heads, head_dim]`; give those 0.

    Softmax over nothing is 0/0, which libraries answer with NaN. `bands.blind_rows` counts such rows.
    """
    if blind == q.shape[1] or q.shape[0] == 0:
        return nothing_seen(q, k, v)
    if blind == 0:
        return attend(q)
    out = torch.zeros_like(q)
    out[:, blind:] = attend(q[:, blind:])
    return out


def nothing_seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the output of queries without a key: 0 of q's shape, which autograd knows to depend on all three."""
    return torch.zeros_like(q) + (q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum())
