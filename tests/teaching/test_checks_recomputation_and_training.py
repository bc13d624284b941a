"""Lesson 03's checks: the right answers pass, and each known-wrong one is rejected."""

import math

import pytest
import torch

from vllm_teach.teaching import check
from vllm_teach.teaching.checks.recomputation_and_training import MeasureLimitError, divisors


def score_gradient(p, dout, v, delta):
    return p * (dout @ v.T - delta[:, None])


def score_gradient_by_jacobian(p, dout, v, delta):
    """Right, row by row: P_j dP_j less P_j times the row's sum."""
    dp = torch.einsum("rd,kd->rk", dout, v)
    return torch.stack([row * slopes - row * d for row, slopes, d in zip(p, dp, delta, strict=True)])


def by_the_tiles_own_sum(p, dout, v, delta):
    dp = dout @ v.T
    return p * (dp - (p * dp).sum(dim=-1, keepdim=True))


def changes_p(p, dout, v, delta):
    return p.mul_(dout @ v.T - delta[:, None])


def dropped_gradients(p, dout, v, rows, keys, keep, dropout_p):
    mask = keep(rows, keys).double() / (1 - dropout_p)
    return (p * mask).T @ dout, mask * (dout @ v.T)


def dropped_with_where(p, dout, v, rows, keys, keep, dropout_p):
    kept = keep(rows, keys)
    dv = torch.where(kept, p, 0.0).T @ dout / (1 - dropout_p)
    return dv, torch.where(kept, dout @ v.T, 0.0) / (1 - dropout_p)


def dropped_by_the_formula(p, dout, v, rows, keys, keep, dropout_p):
    mask = keep(rows, keys) / (1 - dropout_p)
    return (p * mask).T @ dout, mask * (dout @ v.T)


def dropped_with_scaled_mask(p, dout, v, rows, keys, keep, dropout_p):
    mask = torch.where(keep(rows, keys), 1 / (1 - dropout_p), 0.0)
    return (p * mask).T @ dout, mask * (dout @ v.T)


def dropped(*, local=False, swapped=False, scale_p=True, scale_dp=True, mask_p=True, mask_dp=True, power=1, flip=False):
    """The tile's gradients with switches for what can go wrong."""

    def answer(p, dout, v, rows, keys, keep, dropout_p):
        if local:
            rows, keys = (0, rows[1] - rows[0]), (0, keys[1] - keys[0])
        kept = keep(keys, rows).T if swapped else keep(rows, keys)
        kept = (~kept if flip else kept).double()
        scale = (1 - dropout_p) ** power
        weights = p * (kept if mask_p else 1) / (scale if scale_p else 1)
        dp = (dout @ v.T) * (kept if mask_dp else 1) / (scale if scale_dp else 1)
        return weights.T @ dout, dp

    return answer


def draws_its_own(p, dout, v, rows, keys, keep, dropout_p):
    """A stateful generator in the place of the replay."""
    return dropped_gradients(p, dout, v, rows, keys, lambda *_: torch.rand(p.shape) >= dropout_p, dropout_p)


def bytes_kept(batch, q_heads, kv_heads, n, head_dim, number_bytes):
    inputs = batch * n * (q_heads + 2 * kv_heads) * head_dim * number_bytes
    stored = inputs + batch * q_heads * n * n * number_bytes
    return stored, inputs + batch * q_heads * n * (head_dim * number_bytes + 4)


def kept(*, k_heads=None, p_heads=None, lse_bytes=4, out=True, lse=True, matrices=1, causal=False, qkv=True):
    """Both numbers with switches for what can go wrong."""

    def answer(batch, q_heads, kv_heads, n, head_dim, number_bytes):
        of_k = {None: kv_heads, "q": q_heads, "none": 0}[k_heads]
        of_p = {None: q_heads, "kv": kv_heads}[p_heads]
        inputs = batch * n * (q_heads + 2 * of_k) * head_dim * number_bytes if qkv else 0
        pairs = n * (n + 1) // 2 if causal else n * n
        stored = inputs + matrices * batch * of_p * pairs * number_bytes
        size = number_bytes if lse_bytes is None else lse_bytes
        recomputed = inputs + out * batch * q_heads * n * head_dim * number_bytes + lse * batch * q_heads * n * size
        return stored, recomputed

    return answer


def best_chunk(layers, peak):
    middle = divisors(layers)[1]
    one, some, whole = peak(1), peak(middle), peak(layers)
    # one - whole = (layers - 1) (a - b); one - some = (layers - layers / middle) a - (middle - 1) b
    difference = (one - whole) / (layers - 1)
    a = (one - some - (middle - 1) * difference) / (layers - layers / middle - middle + 1)
    b = a - difference
    return min(divisors(layers), key=lambda chunk: layers / chunk * a + chunk * b)


def best_chunk_by_solving(layers, peak):
    """Right, with a linear solver."""
    chunks = divisors(layers)
    tried = [chunks[0], chunks[len(chunks) // 2], chunks[-1]]
    rows = torch.tensor([[layers / chunk, chunk, 1.0] for chunk in tried], dtype=torch.float64)
    costs = torch.linalg.solve(rows, torch.tensor([float(peak(chunk)) for chunk in tried], dtype=torch.float64))
    return min(chunks, key=lambda chunk: float(costs[0]) * layers / chunk + float(costs[1]) * chunk)


def without_the_constant(layers, peak):
    one, whole = peak(1), peak(layers)
    a = (layers * one - whole) / (layers**2 - 1)
    b = one - layers * a
    return min(divisors(layers), key=lambda chunk: layers / chunk * a + chunk * b)


def nearest_to_the_optimum(layers, peak):
    """Solves for the costs, and then rounds instead of comparing."""
    middle = divisors(layers)[1]
    one, some, whole = peak(1), peak(middle), peak(layers)
    difference = (one - whole) / (layers - 1)
    a = (one - some - (middle - 1) * difference) / (layers - layers / middle - middle + 1)
    optimum = (layers * a / (a - difference)) ** 0.5
    return min(divisors(layers), key=lambda chunk: abs(chunk - optimum))


def the_root_of_layers(layers, peak):
    """The rule for chains whose layers save as much inside as at their boundary."""
    return min(divisors(layers), key=lambda chunk: abs(chunk - math.sqrt(layers)))


def walks_downhill(layers, peak):
    chunks = divisors(layers)
    best, lowest = chunks[0], peak(chunks[0])
    for chunk in chunks[1:]:
        found = peak(chunk)
        if found >= lowest:
            break
        best, lowest = chunk, found
    return best


RIGHT = {
    "score_gradient": [score_gradient, score_gradient_by_jacobian],
    "dropped_gradients": [
        dropped_gradients,
        dropped_with_where,
        dropped_by_the_formula,
        dropped_with_scaled_mask,
        dropped(),
    ],
    "bytes_kept": [bytes_kept, kept()],
    "best_chunk": [best_chunk, best_chunk_by_solving],
}
WRONG = {
    "score_gradient": {
        "the tile's own sum": by_the_tiles_own_sum,
        "no D": lambda p, dout, v, delta: p * (dout @ v.T),
        "D not weighted by P": lambda p, dout, v, delta: p * (dout @ v.T) - delta[:, None],
        "no P": lambda p, dout, v, delta: dout @ v.T - delta[:, None],
        "the wrong sign": lambda p, dout, v, delta: p * (delta[:, None] - dout @ v.T),
        "D added": lambda p, dout, v, delta: p * (dout @ v.T + delta[:, None]),
        "the diagonal alone": lambda p, dout, v, delta: p * (1 - p) * (dout @ v.T),
        "D along the keys": lambda p, dout, v, delta: p * (dout @ v.T - delta),
        "P in place of dP": lambda p, dout, v, delta: p * (p - delta[:, None]),
        "one D for all": lambda p, dout, v, delta: p * (dout @ v.T - delta.mean()),
        "transposed": lambda p, dout, v, delta: score_gradient(p, dout, v, delta).T,
        "float32": lambda *a: score_gradient(*a).float(),
        "float32 inside": lambda *a: score_gradient(*(x.float() for x in a)).double(),
        "inputs changed": changes_p,
        "a scale too many": lambda p, dout, v, delta: score_gradient(p, dout, v, delta) * v.shape[1] ** -0.5,
    },
    "dropped_gradients": {
        "the mask of the first tile": dropped(local=True),
        "queries and keys swapped": dropped(swapped=True),
        "P not scaled": dropped(scale_p=False),
        "dP not scaled": dropped(scale_dp=False),
        "nothing scaled": dropped(scale_p=False, scale_dp=False),
        "scaled twice": dropped(power=2),
        "multiplied, not divided": dropped(power=-1),
        "P not masked": dropped(mask_p=False),
        "dP not masked": dropped(mask_dp=False),
        "no mask": dropped(mask_p=False, mask_dp=False),
        "what was dropped": dropped(flip=True),
        "another mask": draws_its_own,
        "dp before dv": lambda *a: dropped_gradients(*a)[::-1],
        "dv alone": lambda *a: dropped_gradients(*a)[0],
        "dP times P": lambda p, *a: (dropped_gradients(p, *a)[0], p * dropped_gradients(p, *a)[1]),
        "float32": lambda *a: tuple(x.float() for x in dropped_gradients(*a)),
    },
    "bytes_kept": {
        "k and v for every query head": kept(k_heads="q"),
        "k and v forgotten": kept(k_heads="none"),
        "P for key heads": kept(p_heads="kv"),
        "lse in the numbers' dtype": kept(lse_bytes=None),
        "lse in float64": kept(lse_bytes=8),
        "no out": kept(out=False),
        "no lse": kept(lse=False),
        "S and P": kept(matrices=2),
        "half of P": kept(causal=True),
        "no q, k, v": kept(qkv=False),
        "swapped": lambda *a: bytes_kept(*a)[::-1],
        "what is saved": lambda *a: bytes_kept(*a)[0] - bytes_kept(*a)[1],
        "numbers, not bytes": lambda *a: bytes_kept(*a[:-1], 1),
        "MiB": lambda *a: tuple(size / 2**20 for size in bytes_kept(*a)),
    },
    "best_chunk": {
        "one": lambda layers, peak: 1,
        "all layers": lambda layers, peak: layers,
        "the root of layers": lambda layers, peak: min(
            divisors(layers), key=lambda chunk: abs(chunk - math.sqrt(layers))
        ),
        "no constant": without_the_constant,
        "rounded, not compared": nearest_to_the_optimum,
        "step by step": walks_downhill,
        "the best of three": lambda layers, peak: min(divisors(layers)[:3], key=peak),
        "all tried": lambda layers, peak: min(divisors(layers), key=peak),
        "no divisor": lambda layers, peak: min(range(1, layers + 1), key=peak),
        "its peak": lambda layers, peak: peak(best_chunk(layers, lambda chunk: peak(chunk))),
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    for answer in RIGHT[name]:
        result = getattr(check, name)(answer)
        assert result.solved, result


@pytest.mark.parametrize(
    ("name", "answer"),
    [pytest.param(name, a, id=f"{name}: {what}") for name, wrong in WRONG.items() for what, a in wrong.items()],
)
def test_wrong(name, answer):
    result = getattr(check, name)(answer)
    assert result.status in ("wrong", "error")
    assert "Hint" in result.message


def test_every_wrong_answer_is_told_the_rule_or_the_error():
    result = check.score_gradient(by_the_tiles_own_sum)
    assert result.status == "wrong"
    assert "a tile cannot find it by itself" in result.message
    assert "3 measurements are allowed" in check.best_chunk(walks_downhill).message


def test_each_hidden_model_has_one_best_chunk_and_they_differ():
    best = []
    for case in check.best_chunk.cases():
        layers = case.arguments[0]
        peaks = {}
        for chunk in divisors(layers):
            meter = case.fresh_arguments()[1]
            peaks[chunk] = meter(chunk)
        lowest = [chunk for chunk, value in peaks.items() if value == min(peaks.values())]
        assert lowest == [case.expected]
        best.append(case.expected / layers)
    assert min(best) < 0.05
    assert max(best) == 1.0
    assert len(set(best)) >= 5


def test_the_meter_counts_and_refuses():
    (_, peak) = check.best_chunk.cases()[0].fresh_arguments()
    with pytest.raises(ValueError, match="does not cut 24 layers evenly"):
        peak(5)
    for chunk in (1, 2, 3):
        peak(chunk)
    with pytest.raises(MeasureLimitError, match="3 measurements"):
        peak(4)


def test_what_the_learner_gets_has_nothing_to_read():
    for name, place in (("best_chunk", 1), ("dropped_gradients", 5)):
        for case in getattr(check, name).cases():
            assert vars(case.fresh_arguments()[place]) == {}
