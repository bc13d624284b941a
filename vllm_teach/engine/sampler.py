"""From logits to tokens, for a whole batch at once, each row by its own request's parameters and random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_teach.engine import logits as change
from vllm_teach.engine.failure import engine_error
from vllm_teach.engine.request import SampledToken, Sequence
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler import StepResult
from vllm_teach.errors import EngineError


def sample(logits: Tensor, sequences: list[Sequence]) -> StepResult:
    """Choose the next token of each sequence from its row of `logits` `[sequences, vocab]`.

    Changes nothing: the same rows and sequences give the same tokens. A row that cannot be sampled (NaN, say) becomes
    that sequence's error and leaves the other rows alone.
    """
    logits = logits.float()
    result = StepResult()
    usable = []
    for row, finite in enumerate(torch.isfinite(logits).all(-1).tolist()):
        if finite:
            usable.append(row)
        else:
            result.errors[sequences[row].seq_id] = EngineError(
                "the model's logits hold NaN or infinite values for this request: check the weights and the dtype."
            )
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
    for sequence, token_id, top in zip(chosen, token_ids, logprobs, strict=True):
        result.tokens[sequence.seq_id] = SampledToken(token_id, top[token_id][0] if top else None, top)


def _choose(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Penalties, then argmax for greedy rows; temperature, min_p, top_k, top_p and a draw for the others."""
    logits = logits.clone()
    _forbid_early_stop(logits, sequences)
    _penalize(logits, sequences)
    drawn = [row for row, each in enumerate(sequences) if not each.params.greedy]
    if drawn:
        settings = [sequences[row].params for row in drawn]
        scaled = logits[drawn] / _column(settings, logits, lambda each: each.temperature)[:, None]
        logits[drawn] = _filter(scaled, settings)
    # A maximum of -inf: every token is forbidden. NaN or inf: a setting so extreme that it left float32's range.
    if not torch.isfinite(logits.amax(-1)).all():
        raise EngineError("the request's parameters leave no token with a probability: use milder ones.")
    token_ids = logits.argmax(-1)
    if drawn:
        noise = torch.stack([change.gumbel_noise(sequences[row].random_seed(), logits.shape[-1]) for row in drawn])
        token_ids[drawn] = change.draw(logits[drawn], noise.to(logits.device))
    return token_ids.tolist()


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


def _forbid_early_stop(logits: Tensor, sequences: list[Sequence]) -> None:
    """Set the tokens that would end a sequence before its min_tokens to -inf, in place."""
    for row, each in enumerate(sequences):
        if len(each.output_token_ids) < each.params.min_tokens and each.stop_ids:
            logits[row, sorted(each.stop_ids)] = -torch.inf


def _penalize(logits: Tensor, sequences: list[Sequence]) -> None:
    """Apply the penalties to the rows that ask for them, in place."""
    rows = [row for row, each in enumerate(sequences) if _has_penalty(each.params)]
    if not rows:
        return
    chosen = [sequences[row] for row in rows]
    params = [each.params for each in chosen]
    vocab, device = logits.shape[-1], logits.device
    logits[rows] = change.penalize(
        logits[rows],
        change.count_tokens([each.prompt_token_ids for each in chosen], vocab, device),
        change.count_tokens([each.output_token_ids for each in chosen], vocab, device),
        _column(params, logits, lambda each: each.repetition_penalty),
        _column(params, logits, lambda each: each.presence_penalty),
        _column(params, logits, lambda each: each.frequency_penalty),
    )


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _column(params: list[SamplingParams], like: Tensor, value: Callable[[SamplingParams], float]) -> Tensor:
    return torch.tensor([float(value(each)) for each in params], dtype=like.dtype, device=like.device)


def _logprobs(logits: Tensor, sequences: list[Sequence], token_ids: list[int]) -> list[dict[int, tuple[float, int]]]:
    """Return, for rows that ask, the model's own log-probability and rank of the chosen token and of the top ones."""
    found: list[dict[int, tuple[float, int]]] = [{} for _ in sequences]
    vocab = logits.shape[-1]
    for row, sequence in enumerate(sequences):
        wanted = sequence.params.logprobs
        if wanted is None:
            continue
        values = logits[row].log_softmax(-1)
        chosen = values[token_ids[row]]
        found[row][token_ids[row]] = (chosen.item(), int((values > chosen).sum()) + 1)
        top = values.topk(vocab if wanted == -1 else min(wanted, vocab))
        for rank, (value, token_id) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True), start=1):
            found[row].setdefault(token_id, (value, rank))
    return found
