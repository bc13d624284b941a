import math

import pytest
import torch

from vllm_teach.attention.rotary import apply_rotary
from vllm_teach.errors import InvalidArgumentError


def tables(positions: int, pairs: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(positions)[:, None] * 10.0 ** -torch.arange(pairs, dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned_as_complex_numbers(x, cos, sin, positions, interleaved):
    """A pair is a complex number, and turning it a product with cos + i sin; one number at a time."""
    out = x.clone()
    batch, length, heads, _ = x.shape
    pairs = cos.shape[1]
    for b in range(batch):
        for i in range(length):
            for h in range(heads):
                for pair in range(pairs):
                    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
                    position = int(positions[b, i])
                    number = complex(x[b, i, h, first], x[b, i, h, second])
                    number *= complex(cos[position, pair], sin[position, pair])
                    out[b, i, h, first], out[b, i, h, second] = number.real, number.imag
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (10, 6), (7, 2), (5, 0)])
def test_it_is_a_product_of_complex_numbers(interleaved, head_dim, rotary_dim):
    x = torch.randn(2, 3, 2, head_dim, dtype=torch.float64)
    cos, sin = tables(20, rotary_dim // 2)
    positions = torch.tensor([[0, 1, 2], [19, 7, 7]])
    before = x.clone()
    actual = apply_rotary(x, cos, sin, positions, interleaved=interleaved)
    expected = turned_as_complex_numbers(x, cos, sin, positions, interleaved)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)
    assert torch.equal(x, before)
    assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_product_depends_on_the_distance_alone(interleaved):
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    cos, sin = tables(200, 8)

    def product(q_pos: int, k_pos: int) -> float:
        turned = [
            apply_rotary(x, cos, sin, torch.tensor([[position]]), interleaved=interleaved)
            for x, position in ((q, q_pos), (k, k_pos))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert product(9, 2) == pytest.approx(product(150, 143), abs=1e-12)
    assert product(9, 2) != pytest.approx(product(9, 3), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_rounds_once(dtype):
    x = torch.randn(1, 50, 2, 32).to(dtype)
    cos, sin = tables(50, 16, dtype)
    positions = torch.arange(50)[None]
    exact = apply_rotary(x.double(), cos.double(), sin.double(), positions)
    actual = apply_rotary(x, cos, sin, positions)
    assert actual.dtype == dtype
    # Half a unit in the last place, and the float32 arithmetic's own error.
    assert ((actual.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-6).all()


def test_empty_inputs():
    cos, sin = tables(0, 2)
    x = torch.randn(2, 0, 3, 8)
    assert apply_rotary(x, cos, sin, torch.zeros(2, 0, dtype=torch.long)).shape == x.shape


@pytest.mark.parametrize(
    ("cos", "sin", "position", "words"),
    [
        (torch.ones(9, 2), torch.ones(9, 3), 0, ["rotary_sin", "[9, 3]", "[9, 2]"]),
        (torch.ones(9, 5), torch.ones(9, 5), 0, ["rotary_cos", "10", "8"]),
        (torch.ones(9), torch.ones(9), 0, ["rotary_cos", "[9]"]),
        (torch.ones(9, 2).int(), torch.ones(9, 2), 0, ["rotary_cos", "int32"]),
        ([1.0], torch.ones(9, 2), 0, ["rotary_cos", "list"]),
        (torch.ones(9, 2), torch.ones(9, 2), 9, ["rotary_cos", "[9, 2]", "position 9"]),
        (torch.ones(9, 2), torch.ones(9, 2), -1, ["position -1"]),
        (torch.ones(9, 2, device="meta"), torch.ones(9, 2), 0, ["rotary_cos", "meta"]),
    ],
)
def test_tables_that_do_not_fit_are_refused(cos, sin, position, words):
    with pytest.raises(InvalidArgumentError) as raised:
        apply_rotary(torch.randn(1, 1, 1, 8), cos, sin, torch.tensor([[position]]))
    assert all(word in str(raised.value) for word in words)


def test_the_angle_of_position_zero_turns_nothing():
    x = torch.randn(1, 4, 2, 8, dtype=torch.float64)
    cos, sin = tables(1, 4)
    assert torch.equal(apply_rotary(x, cos, sin, torch.zeros(1, 4, dtype=torch.long)), x)
    half_turn = torch.full((1, 4), math.pi, dtype=torch.float64)
    turned = apply_rotary(x, half_turn.cos(), half_turn.sin(), torch.zeros(1, 4, dtype=torch.long))
    torch.testing.assert_close(turned, -x, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": "x"}, r"^x is of type str"),
        ({"x": torch.randn(1, 2, 8)}, r"^x has dtype torch.float32 and shape \[1, 2, 8\]"),
        ({"x": torch.ones(1, 2, 1, 8).long()}, r"^x has dtype torch.int64"),
        ({"positions": None}, r"^positions is of type NoneType"),
        ({"positions": torch.zeros(1, 2)}, r"^positions has dtype torch.float32"),
        ({"positions": torch.zeros(1, 2, dtype=torch.bool)}, r"^positions has dtype torch.bool"),
        ({"positions": torch.zeros(3, 2).long()}, r"^positions has dtype torch.int64 and shape \[3, 2\]; .*\[1, 2\]"),
        ({"positions": torch.zeros(1, 2, device="meta").long()}, r"^positions is on meta and x on cpu;"),
    ],
)
def test_tokens_and_positions_that_cannot_be_turned_are_refused(changes, message):
    arguments = {"x": torch.randn(1, 2, 1, 8), "cos": torch.ones(4, 2), "sin": torch.zeros(4, 2)}
    arguments |= {"positions": torch.zeros(1, 2).long()} | changes
    with pytest.raises(InvalidArgumentError, match=message):
        apply_rotary(**arguments)
