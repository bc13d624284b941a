"""Keep rows that see no key away from libraries that answer NaN for them."""

from collections.abc import Callable

import torch


def attend_seeing_rows(
    attend: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, kv_len: int, causal: bool
) -> torch.Tensor:
    """Call `attend` on the rows of q `[batch, q_len, q_heads, head_dim]` that see a key, and give the others 0.

    Under the bottom-right causal mask the first q_len - kv_len queries come before every key; without a mask a row
    sees no key only when there is none. Softmax over nothing is 0/0, which libraries answer with NaN.
    """
    q_len = q.shape[1]
    blind = max(0, q_len - kv_len) if causal else 0
    if kv_len == 0:
        blind = q_len
    if blind == 0 and q_len > 0:
        return attend(q)
    out = torch.zeros_like(q)
    if blind < q_len:
        out[:, blind:] = attend(q[:, blind:])
    return out
