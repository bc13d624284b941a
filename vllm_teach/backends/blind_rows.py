"""Keep rows that see no key away from libraries that answer NaN for them."""

from collections.abc import Callable

import torch


def attend_seeing_rows(attend: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, blind: int) -> torch.Tensor:
    """Call `attend` on all but the first `blind` rows of q `[batch, q_len, q_heads, head_dim]`; give those 0.

    Softmax over nothing is 0/0, which libraries answer with NaN. `bands.blind_rows` counts such rows.
    """
    if blind == 0 and q.numel() > 0:
        return attend(q)
    out = torch.zeros_like(q)
    if blind < q.shape[1] and q.shape[0] > 0:
        out[:, blind:] = attend(q[:, blind:])
    return out
