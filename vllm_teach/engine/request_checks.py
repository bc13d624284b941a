"""Whether a request can run at all: asked by the engine, and by a server before it sends the request there."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

from vllm_teach.engine.failure import shown
from vllm_teach.engine.field_checks import refuse
from vllm_teach.engine.prompts import Prompt, TokensPrompt, read_prompt
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.errors import InvalidArgumentError, PromptTooLongError


def check_request(
    prompt: Prompt, params: SamplingParams, tokenizer: EngineTokenizer, *, vocab_size: int, max_model_len: int
) -> TokensPrompt:
    """Return the prompt as checked token ids, if a request like this can run.

    Raises InvalidArgumentError for a prompt that is empty or no text or token ids of this model, PromptTooLongError
    for one that leaves no room for an answer, and EngineError when the tokenizer fails on it.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidArgumentError(f"sampling_params={shown(params)} is not valid: use a SamplingParams.")
    params.copy()  # checks it again: its fields may have changed since
    given = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(given, list | tuple):
        _check_length(len(given), max_model_len)  # before each of them, which may be millions, is looked at
    checked = read_prompt(prompt, tokenizer, vocab_size)
    _check_length(len(checked["prompt_token_ids"]), max_model_len)
    for name in ("stop_token_ids", "logit_bias"):
        token_ids = getattr(params, name) or ()
        if any(token_id >= vocab_size for token_id in token_ids):
            refuse(name, token_ids, f"this model's ids end at {vocab_size - 1}")
    return checked


def check_priority(priority: object) -> int:
    """Return `priority` as an int; InvalidArgumentError if it is no whole number."""
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise InvalidArgumentError(f"priority={shown(priority)} is not valid: use a whole number.")
    return int(priority)


def _check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_tokens} tokens, but with at least one new token max_model_len="
            f"{max_model_len} allows {max_model_len - 1}: shorten it."
        )
