"""From logits to tokens, for a whole batch at once, each row by its own request's parameters and random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_teach.engine import logits as change
from vllm_teach.engine.broken_rows import broken
from vllm_teach.engine.failure import engine_error
from vllm_teach.engine.plan import StepResult
from vllm_teach.engine.request import SampledToken, Sequence
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import EngineError

_ROWS_AT_ONCE = 8


def sample(logits: Tensor, sequences: list[Sequence]) -> StepResult:
    """Choose the next token of each sequence from its row of `logits` `[sequences, vocab]`.

    Sequences that fork off one prompt come with equal rows, and each draws by its own random numbers. Changes nothing:
    the same rows and sequences give the same tokens. A row that cannot be sampled (NaN, say) becomes that sequence's
    error and leaves the other rows alone.
    """
    logits = logits.float()
    result = StepResult()
    usable = []
    for row, finite in enumerate(change.finite_rows(logits)):
        if finite:
            usable.append(row)
        else:
            result.errors[sequences[row].seq_id] = broken("logits")
    try:
        _sample_rows(logits, sequences, usable, result)
    except Exception:  # noqa: BLE001 - whatever went wrong, find the row it belongs to and keep it from the others
        for row in usable:
            try:
                _sample_rows(logits, sequences, [row], result)
            except Exception as error:  # noqa: BLE001 - becomes this request's typed error
                failure = engine_error("sampling failed for this request", error, "check its parameters")
                result.errors[sequences[row].seq_id] = failure
    return result


def _sample_rows(logits: Tensor, sequences: list[Sequence], rows: list[int], result: StepResult) -> None:
    """Sample the given rows and put their tokens into `result`; an exception leaves `result` as it was."""
    if not rows:
        return
    if len(rows) < len(sequences):
        logits = logits[rows]
    chosen = [sequences[row] for row in rows]
    token_ids = _choose(logits, chosen)
    logprobs = _logprobs(logits, chosen, token_ids)
    for row, (sequence, token_id) in enumerate(zip(chosen, token_ids, strict=True)):
        top = logprobs.get(row, {})
        result.tokens[sequence.seq_id] = SampledToken(token_id, top[token_id][0] if top else None, top)


def _choose(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Bias and penalties, then argmax for greedy rows; temperature, min_p, top_k, top_p and a draw for the others."""
    changed = _change(logits, sequences)
    drawn = [row for row, each in enumerate(sequences) if not each.params.greedy]
    if drawn:
        settings = [sequences[row].params for row in drawn]
        scaled = changed[drawn] / _column(settings, changed, lambda each: each.temperature)[:, None]
        filtered = _check_some_token_is_left(_filter(scaled, settings))
    if len(drawn) == len(sequences):
        return _draw(filtered, sequences)
    token_ids = change.most_likely(changed).tolist()
    if drawn:
        for row, token_id in zip(drawn, _draw(filtered, [sequences[row] for row in drawn]), strict=True):
            token_ids[row] = token_id
    return token_ids


def _draw(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Draw by each sequence's own random numbers, for a few rows at a time: their float64 numbers stay in the cache."""
    token_ids: list[int] = []
    for first in range(0, len(sequences), _ROWS_AT_ONCE):
        few = sequences[first : first + _ROWS_AT_ONCE]
        noise = torch.stack([change.gumbel_noise(each.random_seed(), logits.shape[-1]) for each in few])
        token_ids += change.draw(logits[first : first + _ROWS_AT_ONCE], noise.to(logits.device)).tolist()
    return token_ids


def _change(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Return `logits` with what requests ask for on top; the same tensor, unchanged, when nobody does."""
    early = [row for row, each in enumerate(sequences) if _may_not_end_yet(each)]
    biases = {row: each.params.logit_bias for row, each in enumerate(sequences) if each.params.logit_bias}
    penalized = [row for row, each in enumerate(sequences) if _has_penalty(each.params)]
    if not early and not biases and not penalized:
        return logits
    logits = logits.clone()
    if biases:
        change.add_bias(logits, biases)
    for row in early:
        logits[row, sorted(sequences[row].stop_ids)] = -torch.inf
    if penalized:
        logits[penalized] = _penalize(logits[penalized], [sequences[row] for row in penalized])
    return _check_some_token_is_left(logits)


def _check_some_token_is_left(logits: Tensor) -> Tensor:
    # A maximum of -inf: every token is forbidden. NaN or inf: a setting so extreme that it left float32's range.
    if not torch.isfinite(logits.amax(-1)).all():
        raise EngineError("the request's parameters leave no token with a probability: use milder ones.")
    return logits


def _filter(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Apply min_p, then top_k, then top_p to the rows that ask for them (vLLM's order)."""
    vocab = logits.shape[-1]
    for wanted, apply, value in (
        (lambda each: each.min_p > 0, change.keep_min_p, lambda each: each.min_p),
        (lambda each: 0 < each.top_k < vocab, change.keep_top_k, lambda each: each.top_k),
        (lambda each: each.top_p < 1, change.keep_top_p, lambda each: each.top_p),
    ):
        rows = [row for row, each in enumerate(params) if wanted(each)]
        if rows:
            settings = _column([params[row] for row in rows], logits, value)
            settings = settings.long() if apply is change.keep_top_k else settings
            logits[rows] = apply(logits[rows], settings)
    return logits


def _may_not_end_yet(sequence: Sequence) -> bool:
    return len(sequence.output_token_ids) < sequence.params.min_tokens and bool(sequence.stop_ids)


def _penalize(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    params = [each.params for each in sequences]
    vocab, device = logits.shape[-1], logits.device
    return change.penalize(
        logits,
        change.count_tokens([each.prompt_token_ids for each in sequences], vocab, device),
        change.count_tokens([each.output_token_ids for each in sequences], vocab, device),
        _column(params, logits, lambda each: each.repetition_penalty),
        _column(params, logits, lambda each: each.presence_penalty),
        _column(params, logits, lambda each: each.frequency_penalty),
    )


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _column(params: list[SamplingParams], like: Tensor, value: Callable[[SamplingParams], float]) -> Tensor:
    return torch.tensor([float(value(each)) for each in params], dtype=like.dtype, device=like.device)


def _logprobs(
    logits: Tensor, sequences: list[Sequence], token_ids: list[int]
) -> dict[int, dict[int, tuple[float, int]]]:
    """Return, for rows that ask, the model's own log-probability and rank of the chosen token and of the top ones."""
    wanted = {row: each.params.logprobs for row, each in enumerate(sequences) if each.params.logprobs is not None}
    if not wanted:
        return {}
    rows = list(wanted)
    return dict(
        zip(rows, change.rank_tokens(logits[rows], [token_ids[r] for r in rows], list(wanted.values())), strict=True)
    )
