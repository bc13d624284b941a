"""Dropout whose mask is a function of (seed, batch, head, query, key), so that it need not be kept.

A generator that walks through a sequence must draw all numbers to know the last one, so a mask made with it must be
stored for the backward pass: n² of them. Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
has no state: it scrambles a counter and a key. Any tile's mask can be made at any time, in any order, on any device.
"""

from numbers import Integral

import torch

from vllm_teach.attention.shapes import check_count, check_real
from vllm_teach.errors import InvalidArgumentError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # table 2 of the paper, Philox4x32
_WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key grows by in each round
_ROUNDS = 10
_LOW_32 = 0xFFFFFFFF

# How many pairs are drawn in one go: their int64 words then stay in a CPU's cache.
_PAIRS_AT_ONCE = 1 << 17


def philox(seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor) -> torch.Tensor:
    """Return the first of Philox4x32-10's four words for the counter (c0, c1, c2, 0), int64 in [0, 2³²).

    The counters are int64 in [0, 2³²) and broadcast against each other; the 64-bit `seed` is the key. They are
    broadcast only as the rounds mix them, so the first two rounds cost little where each varies along its own axis.
    """
    x0, x1, x2, x3 = c0, c1, c2, torch.zeros_like(c2)
    key0, key1 = seed & _LOW_32, seed >> 32 & _LOW_32
    for _ in range(_ROUNDS - 1):
        high0, low0 = _multiply(_MULTIPLIERS[0], x0)
        high1, low1 = _multiply(_MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = _xor(high1, x1, key0), low1, _xor(high0, x3, key1), low0
        key0, key1 = key0 + _WEYL[0] & _LOW_32, key1 + _WEYL[1] & _LOW_32
    return _xor(_multiply(_MULTIPLIERS[1], x2)[0], x1, key0)  # all that the first word needs of the last round


def _multiply(a: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low 32 bits of a * x, both new.

    int64 cannot hold the product, but it holds (a - 2³²) * x, as both multipliers are at least 2³¹. That has the same
    low half, and a high half that is smaller by x.
    """
    product = (a - (1 << 32)) * x
    low = product & _LOW_32
    return product.bitwise_right_shift_(32).add_(x), low


def _xor(fresh: torch.Tensor, x: torch.Tensor, key: int) -> torch.Tensor:
    """Return fresh ^ x ^ key, broadcast; in the place of `fresh` where that has the result's shape."""
    mixed = fresh.bitwise_xor_(x) if x.shape == fresh.shape else fresh ^ x
    return mixed.bitwise_xor_(key)


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
    pairs = (rows[1] - rows[0]) * (keys[1] - keys[0])
    parts = batch_heads.split(max(1, _PAIRS_AT_ONCE // max(1, pairs)))
    least = dropout_threshold(p) << 8  # of the whole word: its upper 24 bits are not below the threshold
    return torch.cat([philox(seed, key, query, part[:, None, None]) >= least for part in parts])


def number_heads(first_batch: int, batch: int, q_heads: int, device: torch.device) -> torch.Tensor:
    """Return what `keep_mask` calls each head of a batch: int64 `[batch * q_heads]`, from first_batch * q_heads on.

    Raises InvalidArgumentError when one has no place in the counter, a word of which has 32 bits.
    """
    first = check_count("first_batch", first_batch, 0) * q_heads
    end = first + batch * q_heads
    if end > 1 << 32:
        raise InvalidArgumentError(
            f"first_batch is {first_batch}, and with {batch} sequences of {q_heads} heads behind it there are {end} "
            "heads; dropout tells 2**32 apart."
        )
    return torch.arange(first, end, device=device)


def check_probability(name: str, p: float) -> float:
    """Return `p`, the argument `name`; raise InvalidArgumentError unless it is a number from 0 up to, but not, 1."""
    wanted = "a probability from 0 up to, but not, 1"
    if not 0 <= (value := check_real(name, p, wanted)) < 1:
        raise InvalidArgumentError(f"{name} is {p!r}; give {wanted}.")
    return value


def check_dropout(p: float, seed: int | None) -> int:
    """Return the seed to use: `seed`, or one drawn from PyTorch's default generator for None.

    Raises InvalidArgumentError when `p` is not in [0, 1) or `seed` is not in [0, 2⁶⁴).
    """
    p = check_probability("dropout_p", p)
    if seed is None:
        return int(torch.randint(0, 2**62, (), device="cpu").item()) if p > 0 else 0
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**64:
        raise InvalidArgumentError(f"dropout_seed is {seed!r}; give a whole number from 0 to 2**64 - 1, or None.")
    return int(seed)
