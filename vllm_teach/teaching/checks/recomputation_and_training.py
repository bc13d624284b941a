"""Checks of lesson 03: a tile of dS, a mask that is drawn again, the bytes that wait for the backward pass, a chunk."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from vllm_teach.teaching.exercises import Case, Check, MadeAnew

LESSON = "03_recomputation_and_training"


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _score_gradient_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "dS = P * (dP - D), where D is the sum of dO * O over the whole row: a tile cannot find it by itself."
    sizes = (  # rows, keys, head_dim, the tile's keys
        (3, 8, 4, (0, 4)),
        (5, 9, 2, (6, 9)),
        (4, 12, 3, (4, 8)),
        (1, 4, 1, (2, 4)),
        (6, 7, 5, (3, 4)),
        (2, 6, 8, (0, 6)),
    )
    for rows, n, head_dim, (first, end) in sizes:
        scores = 2 * _normal(generator, rows, n)
        label = f"{rows} queries, keys {first} to {end - 1} of {n}"
        yield _score_gradient_case(label, scores, _normal(generator, n, head_dim), generator, (first, end), rule)
    rule = "A hidden key has P = 0, and so its score has no gradient: dS is 0 there."
    scores = _normal(generator, 4, 8)
    scores[:, 5:] = -torch.inf
    yield _score_gradient_case("keys 5 to 7 are hidden", scores, _normal(generator, 8, 3), generator, (4, 8), rule)


def _score_gradient_case(
    label: str, scores: torch.Tensor, v: torch.Tensor, generator: torch.Generator, keys: tuple[int, int], rule: str
) -> Case:
    """The tile's inputs, and autograd's gradient of the whole row, cut to the tile."""
    leaf = scores.clone().requires_grad_()
    p = torch.softmax(leaf, dim=-1)
    out = p @ v  # [rows, head_dim]
    dout = _normal(generator, *out.shape)
    (ds,) = torch.autograd.grad(out, leaf, dout)
    delta = (dout * out.detach()).sum(dim=-1)  # [rows]
    tile = slice(*keys)
    return Case(label, (p.detach()[:, tile].clone(), dout, v[tile].clone(), delta), ds[:, tile].clone(), rule)


def mask_drawer(mask: torch.Tensor) -> Callable[[tuple[int, int], tuple[int, int]], torch.Tensor]:
    """Return keep(rows, keys), which gives any tile of `mask` as often as it is asked for."""

    def keep(rows: tuple[int, int], keys: tuple[int, int]) -> torch.Tensor:
        return mask[slice(*rows), slice(*keys)].clone()

    return keep


def _dropped_gradients_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "The mask is that of this tile's own queries and keys, and it scales what it keeps by 1 / (1 - dropout_p)."
    cases = (  # n, head_dim, rows, keys, dropout_p
        (8, 4, (0, 4), (0, 4), 0.5),
        (12, 3, (4, 8), (8, 12), 0.25),
        (9, 2, (6, 9), (0, 3), 0.5),
        (10, 5, (5, 10), (2, 6), 0.4),
        (6, 1, (3, 6), (3, 6), 0.75),
        (8, 4, (2, 3), (1, 8), 0.125),
    )
    for n, head_dim, rows, keys, dropout_p in cases:
        mask = torch.rand((n, n), generator=generator) >= dropout_p
        tile = slice(*rows), slice(*keys)
        p = torch.softmax(_normal(generator, n, n), dim=-1)[tile].clone()
        v, dout = _normal(generator, keys[1] - keys[0], head_dim), _normal(generator, rows[1] - rows[0], head_dim)
        p_leaf, v_leaf = p.clone().requires_grad_(), v.clone().requires_grad_()
        out = torch.where(mask[tile], p_leaf / (1 - dropout_p), 0.0) @ v_leaf
        dp, dv = torch.autograd.grad(out, (p_leaf, v_leaf), dout)
        label = f"queries {rows[0]} to {rows[1] - 1}, keys {keys[0]} to {keys[1] - 1}, dropout_p {dropout_p}"
        drawer = MadeAnew(partial(mask_drawer, mask))
        yield Case(label, (p, dout, v, rows, keys, drawer, dropout_p), (dv, dp), rule)


def _nbytes(dtype: torch.dtype, *shape: int) -> int:
    """Let PyTorch count, on a tensor that has a shape and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


def _bytes_kept_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "k and v have kv_heads heads; P has a number, and lse one of 4 bytes, for each query head."
    sizes = [
        (1, 1, 1, 4096, 64, 2),
        (1, 32, 32, 4096, 128, 2),
        (8, 16, 16, 2048, 128, 4),
        (2, 9, 3, 1000, 64, 2),
        (3, 8, 1, 777, 80, 4),
    ]
    for _ in range(4):
        batch, kv_heads, group = (int(torch.randint(1, 5, (), generator=generator)) for _ in range(3))
        n = int(torch.randint(1, 3000, (), generator=generator))
        sizes.append((batch, kv_heads * group, kv_heads, n, 32, 2))
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    for batch, q_heads, kv_heads, n, head_dim, number_bytes in sizes:
        of = partial(_nbytes, dtypes[number_bytes])
        inputs = of(batch, n, q_heads, head_dim) + 2 * of(batch, n, kv_heads, head_dim)
        stored = inputs + of(batch, q_heads, n, n)
        recomputed = inputs + of(batch, n, q_heads, head_dim) + _nbytes(torch.float32, batch, q_heads, n)
        label = f"batch {batch}, {q_heads} heads on {kv_heads}, n {n:,}, head_dim {head_dim}, {number_bytes} bytes"
        yield Case(label, (batch, q_heads, kv_heads, n, head_dim, number_bytes), (stored, recomputed), rule)


class MeasureLimitError(Exception):
    """More measurements than the exercise allows."""


MOST_MEASUREMENTS = 3


def divisors(layers: int) -> list[int]:
    """The chunks that cut `layers` evenly."""
    return [chunk for chunk in range(1, layers + 1) if layers % chunk == 0]


def peak_meter(layers: int, boundary: int, inside: int, always: int) -> Callable[[int], int]:
    """Return peak(chunk) of a step with such costs, in bytes; a closure, with nothing to read.

    `peak` raises ValueError for a chunk that does not cut the layers evenly, MeasureLimitError beyond 3 calls.
    """
    calls = 0

    def peak(chunk: int) -> int:
        nonlocal calls
        if chunk not in divisors(layers):
            raise ValueError(f"chunk={chunk} does not cut {layers} layers evenly.")
        calls += 1
        if calls > MOST_MEASUREMENTS:
            raise MeasureLimitError(f"{MOST_MEASUREMENTS} measurements are allowed: predict the others from them.")
        return layers // chunk * boundary + chunk * inside + always

    return peak


def _best_chunk_cases(_generator: torch.Generator) -> Iterator[Case]:
    rule = "peak(chunk) = layers / chunk * boundary + chunk * inside + always: three measurements give the three costs."
    costs = [  # layers, boundary, inside, always
        (24, 100, 110, 0),
        (12, 40, 700, 5_000),
        (32, 900, 50, 1_000_000),
        (36, 500, 90, 12_345),
        (48, 64, 60, 300_000),
        (48, 3_000, 7, 10),
        (64, 1, 20, 0),
        (30, 700, 100, 90_000),
        (24, 90, 50, 2_000),
        (48, 310, 100, 4_000),
    ]
    for number, (layers, boundary, inside, always) in enumerate(costs, start=1):
        peaks = {chunk: layers // chunk * boundary + chunk * inside for chunk in divisors(layers)}
        meter = MadeAnew(partial(peak_meter, layers, boundary, inside, always))
        yield Case(f"model {number}, {layers} layers", (layers, meter), min(peaks, key=lambda c: peaks[c]), rule)


CHECKS = [
    Check(
        name="score_gradient",
        lesson=LESSON,
        task="Return dS of one tile [rows, keys], from its P [rows, keys], dO [rows, head_dim], V [keys, head_dim] and "
        "D [rows].",
        lesson_learnt="D holds what the tile cannot see of its row: so dS needs no other tile.",
        cases=_score_gradient_cases,
        hints=(
            "dP is the derivative of the loss by each probability: dO Vᵀ, [rows, keys].",
            "A score pulls its own probability up and all others of the row down; both together: P * (dP - D).",
            "D has one number a row: delta[:, None] makes it a column.",
        ),
    ),
    Check(
        name="dropped_gradients",
        lesson=LESSON,
        task="Return (dv, dp) of one tile under dropout: dv [keys, head_dim] and dp [rows, keys], the derivative by P "
        "before dropout. keep(rows, keys) draws the bool mask of any tile again; rows and keys are (first, end).",
        lesson_learnt="A mask that is a function of its indices costs no memory between forward and backward.",
        cases=_dropped_gradients_cases,
        hints=(
            "The forward pass computed out = (P * M) V with M = keep / (1 - dropout_p). Write M first.",
            "Ask for this tile's own mask: keep(rows, keys), not keep((0, …), (0, …)).",
            "dv = (P * M)ᵀ dO: the weights that V met. dp = M * (dO Vᵀ): what was dropped has no influence.",
        ),
        rtol=1e-6,  # PyTorch divides a bool by a number in float32, and keep / (1 - dropout_p) is the formula itself
    ),
    Check(
        name="bytes_kept",
        lesson=LESSON,
        task="Return (stored, recomputed): the bytes that one attention layer keeps for its backward pass, if it keeps "
        "q, k, v and P, and if it keeps q, k, v, out and lse. Numbers have number_bytes bytes, those of lse 4.",
        lesson_learnt="One grows with n², the other with n.",
        cases=_bytes_kept_cases,
        hints=(
            "q and out are [batch, n, q_heads, head_dim]; k and v are [batch, n, kv_heads, head_dim].",
            "P is [batch, q_heads, n, n]: every query head has its own weights, whoever it shares its keys with.",
            "lse is [batch, q_heads, n], in float32 whatever the others are.",
        ),
    ),
    Check(
        name="best_chunk",
        lesson=LESSON,
        task="Return the chunk, a divisor of layers, at which a checkpointed step's peak memory is lowest, with at "
        "most 3 calls of peak(chunk).",
        lesson_learnt="Measure a few, model, predict the rest: no one can afford to measure every setting.",
        cases=_best_chunk_cases,
        hints=(
            "layers / chunk inputs of chunks are kept, and one chunk's inside; something is there at any chunk.",
            "peak = layers / chunk * a + chunk * b + c. Three measurements are three equations: chunks 1, layers and "
            "one between.",
            "The difference of two measurements is free of c. Solve for a and b, then compare all divisors by the "
            "model.",
        ),
    ),
]
