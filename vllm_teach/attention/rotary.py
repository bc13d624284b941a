"""Rotary position embedding from tables of cosines and sines, as FlashAttention's kv-cache function takes them.

RoFormer (Su et al. 2021, section 3.2): a pair of channels is a point in the plane and is turned by an angle that grows
with the position. The product of a turned query and a turned key then depends on the distance of the two alone.
"""

import torch

from vllm_teach.attention.shapes import check_real_device, check_tensor, compute_dtype
from vllm_teach.errors import InvalidArgumentError


def apply_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool = True
) -> torch.Tensor:
    """Return `x` with its first rotary_dim channels turned by the angles of `positions`; the others stay as they are.

    Shapes: x `[batch, length, heads, head_dim]`, `cos` and `sin` `[table_len, rotary_dim // 2]`, `positions` int64
    `[batch, length]`, rows of the tables. `interleaved` pairs the channels (0, 1), (2, 3), … as the paper does; else
    channel i is paired with i + rotary_dim // 2, as GPT-NeoX and Hugging Face do. Computed in float32 (float64 for
    float64 input) and rounded to x's dtype once. x is not changed.

    Raises InvalidArgumentError when the tables do not fit each other or x, or end before a position.
    """
    _check_turned(x, positions)
    check_rotary_tables(cos, sin, x)
    check_rotary_positions(positions, cos)
    dtype = compute_dtype(x)
    half = cos.shape[1]
    c = cos[positions].to(dtype)[:, :, None]  # [batch, length, 1, half]
    s = sin[positions].to(dtype)[:, :, None]  # [batch, length, 1, half]
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    # [batch, length, heads, half, 2] or [batch, length, heads, 2, half]: the axis of size 2 is a pair's.
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)  # [batch, length, heads, half] each
    pairs = torch.stack((a * c - b * s, b * c + a * s), dim=axis)
    return torch.cat((pairs.flatten(-2).to(x.dtype), rest), dim=-1)


def _check_turned(x: torch.Tensor, positions: torch.Tensor) -> None:
    """Raise InvalidArgumentError unless `x` can be turned and `positions` has one for each of its tokens."""
    check_tensor("x", x, " [batch, length, heads, head_dim]")
    if x.dim() != 4 or not x.dtype.is_floating_point:
        raise InvalidArgumentError(
            f"x has dtype {x.dtype} and shape {list(x.shape)}; give floats [batch, length, heads, head_dim]."
        )
    check_tensor("positions", positions, " of int64, [batch, length]")
    if positions.dtype not in (torch.int64, torch.int32) or positions.shape != x.shape[:2]:
        raise InvalidArgumentError(
            f"positions has dtype {positions.dtype} and shape {list(positions.shape)}; it must be int64 or int32 of "
            f"shape {list(x.shape[:2])}, as x has {list(x.shape)}."
        )
    if positions.device != x.device:
        raise InvalidArgumentError(f"positions is on {positions.device} and x on {x.device}; move one to the other.")
    check_real_device("x", x)


def check_rotary_tables(cos: torch.Tensor, sin: torch.Tensor, x: torch.Tensor) -> None:
    """Raise InvalidArgumentError unless `cos` and `sin` are equally shaped tables for the channels of `x`."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, table, " [positions, pairs]")
        if table.dim() != 2 or not table.dtype.is_floating_point:
            raise InvalidArgumentError(
                f"{name} has dtype {table.dtype} and shape {list(table.shape)}; "
                "give floating-point numbers [positions, rotary_dim / 2]."
            )
        if table.device != x.device:
            raise InvalidArgumentError(f"{name} is on {table.device} and q on {x.device}; move one to the other.")
    if sin.shape != cos.shape:
        raise InvalidArgumentError(
            f"rotary_sin has shape {list(sin.shape)} and rotary_cos {list(cos.shape)}; the two must be equal."
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise InvalidArgumentError(
            f"rotary_cos has shape {list(cos.shape)}, so rotary_dim is {2 * cos.shape[1]}; "
            f"it must be at most head_dim, {x.shape[-1]}."
        )


def check_rotary_positions(positions: torch.Tensor, cos: torch.Tensor) -> None:
    """Raise InvalidArgumentError unless every one of `positions` is a row of the table `cos`."""
    if positions.numel() == 0:
        return
    lowest, highest = int(positions.min()), int(positions.max())
    if lowest < 0 or highest >= len(cos):
        beyond = lowest if lowest < 0 else highest
        raise InvalidArgumentError(
            f"rotary_cos has shape {list(cos.shape)} and position {beyond} is asked of it; give one row per position."
        )
