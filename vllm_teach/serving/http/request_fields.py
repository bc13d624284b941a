"""Types of the fields in request bodies, which accept what their JSON schemas say, and nothing else.

Numbers, flags and texts are taken as they are: "1" is no number and 1 no flag. Unions are read by hand, where pydantic
would try each member on each item of a long list and report what it is not.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
TokenId = Annotated[int, Strict(), Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
# What JSON's users take for a number's end; the engine counts in Python's whole numbers, which have none.
MOST = 2**63 - 1
Count = Annotated[Whole, Field(ge=0, le=MOST)]
Positive = Annotated[Whole, Field(ge=1, le=MOST)]

# What these cost is paid again at each token, and by everyone in the batch. The last two are vLLM's limits.
MOST_STOPS, MOST_STOP_LENGTH = 16, 1024
MOST_STOP_TOKENS, MOST_BIASES = 128, 1024


def refused_as(reason: str) -> WrapValidator:
    """Say `reason` of what the type does not take, where pydantic would only tell the few values that it does."""

    def check(value: Any, take: ValidatorFunctionWrapHandler) -> Any:
        try:
            return take(value)
        except ValidationError:
            raise ValueError(reason) from None

    return WrapValidator(check)


_SomeText = Annotated[str, Strict(), Field(min_length=1)]
_SomeIds = Annotated[list[TokenId], Field(min_length=1)]

_PROMPTS = "use a text, a list of texts, a list of token ids, or a list of such lists"
_EMPTY = "an empty prompt leaves nothing to go on from, so give at least one character or token"


def list_prompts(value: Any) -> list[str] | list[list[int]]:
    """Return OpenAI's `prompt`, in any of its four forms, as a list of prompts; ValueError for what is none."""
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if not all(isinstance(prompt, str) for prompt in prompts) and not all(map(_is_token_ids, prompts)):
        raise ValueError(_PROMPTS)
    if not all(prompts):
        raise ValueError(_EMPTY)
    return prompts


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _list_of_one(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(
        list_prompts,
        json_schema_input_type=_SomeText
        | Annotated[list[_SomeText], Field(min_length=1)]
        | _SomeIds
        | Annotated[list[_SomeIds], Field(min_length=1)],
    ),
]

_Stop = Annotated[str, Strict(), Field(min_length=1, max_length=MOST_STOP_LENGTH)]
_Stops = Annotated[list[_Stop], Field(fail_fast=True, max_length=MOST_STOPS)]
Stops = Annotated[_Stops, BeforeValidator(_list_of_one, json_schema_input_type=_Stop | _Stops)]
StopTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_STOP_TOKENS)]


def _with_numbers(value: Any) -> Any:
    """Return `logit_bias` with numbers for its keys, which JSON has only as strings."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 for key in value):
        raise ValueError("use an object whose keys are token ids, which are whole numbers from 0")
    return {int(key): bias for key, bias in value.items()}


_Bias = Annotated[float, Strict(), Field(ge=-100, le=100)]
_BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,19}$")]
_JsonBias = Annotated[dict[_BiasKey, _Bias], Field(max_length=MOST_BIASES)]
LogitBias = Annotated[
    dict[int, _Bias], Field(max_length=MOST_BIASES), BeforeValidator(_with_numbers, json_schema_input_type=_JsonBias)
]
