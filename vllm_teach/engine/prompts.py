"""The forms in which a prompt may come (vLLM's): a text, token ids, or a dict with either; and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict

from vllm_teach.engine.failure import engine_error, shown
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.errors import InvalidArgumentError, VllmTeachError


class TokensPrompt(TypedDict):
    """A prompt as token ids, with the text they came from if there is one.

    A `cache_salt` parts the prefix cache: only prompts with the same salt share what is computed (None counts as one).
    """

    prompt_token_ids: list[int]
    prompt: str | None
    cache_salt: str | None


Prompt = str | Sequence[int] | Mapping[str, Any]
Message = dict[str, str]
Conversation = Sequence[Message]


def read_prompt(prompt: Prompt, tokenizer: EngineTokenizer, vocab_size: int) -> TokensPrompt:
    """Return the prompt as token ids, each checked.

    Raises InvalidArgumentError for one that is empty or no text or ids of this model, and EngineError when the
    tokenizer fails on it.
    """
    text, token_ids, salt = _parts(prompt)
    if token_ids is None:
        token_ids = encode_text(text, tokenizer) if text else []
    for token_id in token_ids:
        if not _is_whole(token_id) or not 0 <= token_id < vocab_size:
            mixed = not _is_whole(token_id) and any(map(_is_whole, token_ids))
            what = f"{'mixes token ids with' if mixed else 'holds'} {shown(token_id)}"
            raise InvalidArgumentError(
                f"the prompt {what}, which is no token id: use whole numbers from 0 to {vocab_size - 1}."
            )
    if not token_ids:
        raise InvalidArgumentError(f"prompt={shown(prompt)} is empty: give at least one token.")
    return {"prompt_token_ids": [int(token_id) for token_id in token_ids], "prompt": text, "cache_salt": salt}


def render_chat(conversation: Conversation, tokenizer: EngineTokenizer) -> TokensPrompt:
    """Return the prompt of a conversation, a list of dicts with `role` and `content`, by the model's chat template.

    Raises InvalidArgumentError for what is no conversation or what the template refuses, and EngineError when the
    tokenizer fails on it.
    """
    form = "use a list of dicts with 'role' and 'content', both strings"
    if not isinstance(conversation, list | tuple) or not conversation:
        raise InvalidArgumentError(f"messages={shown(conversation)} is not valid: {form}, at least one.")
    for message in conversation:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InvalidArgumentError(f"messages holds {shown(message)}, which is not valid: {form}.")
    try:
        token_ids = list(tokenizer.apply_chat_template(list(conversation)))
    except VllmTeachError:
        raise
    except Exception as error:
        raise _typed(error, "the conversation", [message["content"] for message in conversation]) from error
    return {"prompt_token_ids": token_ids, "prompt": None, "cache_salt": None}


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list; a text, a dict, or a list that holds only numbers, is a single prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InvalidArgumentError(
            f"prompts is of type {type(prompts).__name__}, which is not valid: use a text, token ids or a list of them."
        )
    single = bool(prompts) and all(isinstance(each, Real) for each in prompts)
    return [prompts] if single else list(prompts)


def list_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return the conversations as a list; a list of messages is a single one."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidArgumentError(
            f"messages={shown(messages)} is not valid: use a list of dicts with 'role' and 'content', or several "
            "such lists."
        )
    return list(messages) if any(isinstance(each, list | tuple) for each in messages) else [messages]


def _parts(prompt: Prompt) -> tuple[str | None, Sequence[int] | None, str | None]:
    """Return (text or None, token ids or None, cache salt or None): text or ids are there."""
    if isinstance(prompt, str):
        return prompt, None, None
    text, salt = None, None
    token_ids: object = prompt
    if isinstance(prompt, Mapping):
        text, token_ids, salt = (prompt.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
        known = prompt.keys() <= {"prompt", "prompt_token_ids", "cache_salt"}
        if not known or not isinstance(text, str | None) or (text is None and token_ids is None):
            raise InvalidArgumentError(
                f"the prompt has the keys {shown(sorted(map(str, prompt)))}, which is not valid: use 'prompt' with a "
                "text or 'prompt_token_ids' with a list of token ids, and 'cache_salt' with a string if you want one."
            )
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise InvalidArgumentError(f"cache_salt={shown(salt)} is not valid: use a string that is not empty.")
        if token_ids is None:
            return text, None, salt
    if not isinstance(token_ids, list | tuple):
        raise InvalidArgumentError(
            f"the prompt is of type {type(token_ids).__name__}, which is not valid: use a text or a list of token ids."
        )
    return text, token_ids, salt


def encode_text(text: str, tokenizer: EngineTokenizer, *, add_special_tokens: bool = True) -> list[int]:
    """Return the ids of `text`, with what the model wants around one unless `add_special_tokens` is False.

    Raises InvalidArgumentError for what is no text, and EngineError when the tokenizer fails on it.
    """
    try:
        # A tokenizer that knows no such tokens need not know the argument.
        ids = tokenizer.encode(text) if add_special_tokens else tokenizer.encode(text, add_special_tokens=False)
        return list(ids)
    except VllmTeachError:
        raise
    except Exception as error:
        raise _typed(error, "the prompt", [text]) from error


def _typed(error: Exception, what: str, texts: list[str]) -> VllmTeachError:
    """Return the typed error for a tokenizer's. Half of a surrogate pair is a str, but no text: the likeliest cause."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as broken:
            return InvalidArgumentError(
                f"{what} is no valid text: position {broken.start} of {shown(text)} is half of a surrogate pair, so "
                "remove it."
            )
    if isinstance(error, UnicodeError):
        return InvalidArgumentError(f"{what} is no valid text ({error}): remove what is broken.")
    return engine_error(f"the tokenizer failed on {what}", error, "check the tokenizer")


def _is_whole(value: object) -> bool:
    # Nearly always an int, and a prompt has many; what else is whole, as NumPy's numbers are, takes longer to see.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
