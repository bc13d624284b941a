"""The sliding window of a call: which keys it hides, and how a backend without one says so.

With `window` w, a query sees the last w of the keys that the causal mask shows it, its own token's included: query i
sees key j when i + kv_len - q_len - w < j <= i + kv_len - q_len, aligned bottom-right like the mask.
"""

import torch

from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError


def hiding_window(window: int | None, causal: bool, kv_len: int) -> int | None:
    """Return `window`, or None if it hides none of the `kv_len` keys.

    Raises InvalidArgumentError when it is not positive, or without a causal mask to narrow.
    """
    if window is None:
        return None
    check_count("window", window, 1)
    if not causal:
        raise InvalidArgumentError(f"window is {window} and causal False; a window narrows a causal mask: set causal.")
    return window if window < kv_len else None


def windowed_mask(q_len: int, kv_len: int, window: int, device: torch.device) -> torch.Tensor:
    """Return bool `[q_len, kv_len]`, True where a query sees a key under the causal mask and the window."""
    last = kv_len - q_len  # the last key that query 0 sees
    return torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril(last).triu(last - window + 1)


def no_window(name: str, window: int | None, kv_len: int) -> str | None:
    """Return why the backend `name`, which has no sliding window, cannot serve a call; None if it hides no key."""
    if window is None or window >= kv_len:
        return None
    return f"{name} has no sliding window, and one of {window} keys hides some of {kv_len}; naive and sdpa have one."


def refuse_window(name: str, window: int | None, causal: bool, kv_len: int) -> None:
    """Raise InvalidArgumentError for a window that the backend `name`, which has none, would have to apply."""
    if reason := no_window(name, hiding_window(window, causal, kv_len), kv_len):
        raise InvalidArgumentError(reason)
