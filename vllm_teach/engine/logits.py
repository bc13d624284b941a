"""Changes to a batch of logits before a token is drawn: pure functions on `[rows, vocab]`, one setting per row.

Each row's result depends on that row alone. Where a cut falls between equal values all of them stay in, so that the
result does not depend on the order in which a sort happens to leave them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_TILE = 128
_NUCLEUS = 256


def finite_rows(logits: Tensor) -> list[bool]:
    """Return for each row whether all its values are finite.

    The largest and the smallest value tell: NaN is both where there is one. Reading the rows twice costs a twentieth
    of `isfinite`, which writes an answer for each value first.
    """
    return (logits.amax(-1).isfinite() & logits.amin(-1).isfinite()).tolist()


def most_likely(logits: Tensor) -> Tensor:
    """Return the place of each row's largest value, the first of equals: int64 `[rows]`. NaN is not allowed.

    On a CPU PyTorch finds a maximum without its place many times faster than with it (it uses vector instructions for
    the one only), so look for the place only in the tile of the row that holds the maximum.
    """
    rows, vocab = logits.shape
    if vocab % _TILE:
        return logits.argmax(-1)
    tiles = logits.unflatten(-1, (-1, _TILE))
    tile = tiles.amax(-1).argmax(-1)
    return tile * _TILE + tiles[torch.arange(rows, device=logits.device), tile].argmax(-1)


def rank_tokens(logits: Tensor, token_ids: Sequence[int], wanted: Sequence[int]) -> list[dict[int, tuple[float, int]]]:
    """Return for each row the log-probability and rank (1: most likely) of its token and of the `wanted` likeliest.

    `logits` is `[rows, vocab]`; `wanted` -1 means all of the vocabulary. The row's own token stands first; the others
    follow by rank.
    """
    vocab = logits.shape[-1]
    counts = [vocab if count == -1 else min(count, vocab) for count in wanted]
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((logits > own).sum(-1) + 1).tolist()
    top = logits.topk(max(counts), dim=-1)
    total = logits.logsumexp(-1, keepdim=True)  # a log-probability is the logit less this
    values, indices = (top.values - total).tolist(), top.indices.tolist()
    found = []
    for row, (token_id, value) in enumerate(zip(token_ids, (own - total)[:, 0].tolist(), strict=True)):
        entries = {token_id: (value, ranks[row])}
        for place in range(counts[row]):
            entries.setdefault(indices[row][place], (values[row][place], place + 1))
        found.append(entries)
    return found


def add_bias(logits: Tensor, biases: Mapping[int, Mapping[int, float]]) -> Tensor:
    """Add `biases[row][token]` to the logit of `token` in `row`, in place."""
    rows = torch.tensor([row for row, bias in biases.items() for _ in bias], device=logits.device)
    columns = torch.tensor([token for bias in biases.values() for token in bias], device=logits.device)
    values = [value for bias in biases.values() for value in bias.values()]
    added = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits.index_put_((rows, columns), added, accumulate=True)


def count_tokens(token_lists: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Return how often each token stands in each list: float32 `[rows, vocab_size]`."""
    rows = [row for row, tokens in enumerate(token_lists) for _ in tokens]
    columns = [token for tokens in token_lists for token in tokens]
    counts = torch.zeros(len(token_lists), vocab_size, device=device)
    index = (
        torch.tensor(rows, device=device, dtype=torch.long),
        torch.tensor(columns, device=device, dtype=torch.long),
    )
    return counts.index_put_(index, torch.ones(len(rows), device=device), accumulate=True)


def penalize(
    logits: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return logits with the three penalties, each `[rows]`; the counts are `[rows, vocab]`.

    Repetition (Keskar et al. 2019, CTRL) divides a positive logit and multiplies a negative one, for tokens of prompt
    and output; presence and frequency (OpenAI's) are subtracted for tokens of the output.
    """
    seen = (prompt_counts > 0) | (output_counts > 0)
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * output_counts - presence[:, None] * (output_counts > 0)


def keep_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Set all but each row's `k` largest logits to -inf; `k` is int64 `[rows]`, from 1 to vocab."""
    largest = logits.topk(int(k.max()), dim=-1).values
    return logits.masked_fill(logits < largest.gather(1, k[:, None] - 1), -torch.inf)


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep each row's fewest most likely tokens whose probability reaches `p` (`[rows]`, in (0, 1]), at least one.

    Nucleus sampling (Holtzman et al. 2019). Mostly a few tokens reach p, so only the most likely ones are sorted, and
    all of a row only where these are not enough.
    """
    probabilities = logits.softmax(-1)
    few = min(_NUCLEUS, logits.shape[-1])
    smallest, reached = _smallest_kept(probabilities.topk(few, dim=-1).values, p)
    if few < logits.shape[-1] and not reached.all():
        wide = ~reached
        smallest[wide], _ = _smallest_kept(probabilities[wide].sort(dim=-1, descending=True).values, p[wide])
    return logits.masked_fill(probabilities < smallest, -torch.inf)


def _smallest_kept(ordered: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least probability that is kept, `[rows, 1]`, and whether the cut lies within `ordered`, `[rows]`."""
    sums = ordered.cumsum(-1)
    kept = (sums - ordered < p[:, None]).sum(-1, keepdim=True)
    # A tiny p rounds to zero in float32: the most likely token stays in all the same.
    return ordered.gather(1, kept.clamp(min=1) - 1), sums[:, -1] >= p


def keep_min_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the tokens at least `p` (`[rows]`, 0 to 1) times as likely as the row's most likely one."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + p[:, None].log(), -torch.inf)


def gumbel_noise(seed: int, size: int) -> Tensor:
    """Return `size` independent numbers from Gumbel's distribution, float64 on the CPU: the same for the same `seed`.

    A generator of its own, so that nothing but the seed counts; on the CPU, so that every device draws the same. A
    float32 has too few numbers near 1: over a large vocabulary the largest of them would be ties.
    """
    uniforms = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(-uniforms.clamp_(min=2.0**-54).log_()).log_()


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Return a token per row, int64 `[rows]`, drawn by the softmax of `logits`; `noise` is Gumbel's, `[rows, vocab]`.

    The Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, section 2): the place of the largest logit + noise is
    distributed as softmax(logits). Batch-mates change a row's logits in the last bits, since a matrix product of other
    size sums in another order. Here that decides only between two tokens that tie. Inverse transform sampling, where a
    number in [0, 1) is looked up among the running sums of all probabilities, would need one number instead of a
    vocabulary of them, but the errors add up along the vocabulary and every token behind moves: another seeded text.
    """
    return most_likely(noise + logits)
