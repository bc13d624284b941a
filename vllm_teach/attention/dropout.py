"""Dropout whose mask is a function of (seed, batch, head, query, key), so that it need not be kept.

A generator that walks through a sequence must draw all numbers to know the last one, so a mask made with it must be
stored for the backward pass: n² of them. Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
has no state: it scrambles a counter and a key. Any tile's mask can be made at any time, in any order, on any device.
"""

import torch

from vllm_teach.errors import InvalidArgumentError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # table 2 of the paper, Philox4x32
_WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key grows by in each round
_ROUNDS = 10
_LOW_32 = 0xFFFFFFFF


def philox(seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor) -> torch.Tensor:
    """Return the first of Philox4x32-10's four words for the counter (c0, c1, c2, 0), int64 in [0, 2³²).

    The counters are int64 in [0, 2³²) and broadcast against each other; the 64-bit `seed` is the key.
    """
    x0, x1, x2, x3 = torch.broadcast_tensors(c0, c1, c2, torch.zeros_like(c0))
    key0, key1 = seed & _LOW_32, seed >> 32 & _LOW_32
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], x0)
        high1, low1 = _multiply(_MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
        key0, key1 = key0 + _WEYL[0] & _LOW_32, key1 + _WEYL[1] & _LOW_32
    return x0


def _multiply(a: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low 32 bits of a * x, by halves of x, as int64 cannot hold the product."""
    low, high = a * (x & 0xFFFF), a * (x >> 16)  # each below 2**48
    middle = (low >> 16) + high
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF


def dropout_threshold(p: float) -> int:
    """Return the t for which a 24-bit number is below t with probability `p`; a pair is kept when it is not."""
    return round(p * (1 << 24))


def keep_mask(
    seed: int,
    p: float,
    batch_heads: torch.Tensor,
    rows: tuple[int, int],
    keys: tuple[int, int],
) -> torch.Tensor:
    """Return bool `[batch_heads, rows, keys]`, True where dropout with probability `p` keeps a pair.

    `batch_heads` is int64 `[batch_heads]`, each batch * q_heads + head; `rows` and `keys` are (first, end) indices of
    queries and keys. The counter is (key, query, batch_head, 0), and the word's upper 24 bits are compared.
    """
    device = batch_heads.device
    query = torch.arange(*rows, device=device)[None, :, None]
    key = torch.arange(*keys, device=device)[None, None, :]
    word = philox(seed, key, query, batch_heads[:, None, None])
    return (word >> 8) >= dropout_threshold(p)


def check_dropout(p: float, seed: int | None) -> int:
    """Return the seed to use: `seed`, or one drawn from PyTorch's default generator for None.

    Raises InvalidArgumentError when `p` is not in [0, 1) or `seed` is not in [0, 2⁶⁴).
    """
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise InvalidArgumentError(f"dropout_p is {p!r}; give a probability from 0 up to, but not, 1.")
    if seed is None:
        return int(torch.randint(0, 2**62, ()).item()) if p > 0 else 0
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidArgumentError(f"dropout_seed is {seed!r}; give a whole number from 0 to 2**64 - 1, or None.")
    return seed
