"""The bodies of OpenAI's requests, with what vLLM adds to them.

A field that would change the answer and is not built is declared with the only values that mean the same as leaving it
out, so that others are refused by name: tools, formats other than text, several modalities. Fields that change nothing
in an answer (whose request it is, how it is to be stored, billed or cached) are taken and ignored. Any other name is
refused: it is misspelt, or its sender counts on something that does not happen.

Null stands for the default, as with OpenAI.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WrapValidator, model_validator

from vllm_teach.engine.sampling_params import (
    LEAST_PENALTY,
    MOST_COMPLETIONS,
    MOST_PENALTY,
    MOST_TEMPERATURE,
    SamplingParams,
)
from vllm_teach.serving.http.request_fields import (
    MOST,
    Count,
    Flag,
    LogitBias,
    Number,
    Positive,
    Prompts,
    Stops,
    StopTokenIds,
    Text,
    Whole,
    refused_as,
)

_Empty = Annotated[list[Any], Field(max_length=0)]
_TextFormat = dict[Literal["type"], Literal["text"]]
_TextAlone = Annotated[list[Literal["text"]], Field(max_length=1)]


def _not_built(what: str) -> WrapValidator:
    return refused_as(f"{what} not built here, so leave the field out")


_TOOLS = _not_built("tools are")
_FUNCTIONS = _not_built("functions are")
_AUDIO = _not_built("audio is")


class StreamOptions(BaseModel):
    """With `include_usage` the last event before the end counts the tokens. `include_obfuscation` is ignored."""

    model_config = ConfigDict(extra="forbid")
    include_usage: Flag | None = None
    include_obfuscation: Flag | None = None


class SamplingFields(BaseModel):
    """How tokens are chosen: `SamplingParams`' fields of the same names, which says what they do."""

    model_config = ConfigDict(extra="forbid")
    n: Annotated[Whole, Field(ge=1, le=MOST_COMPLETIONS)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=MOST_TEMPERATURE)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MOST)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=LEAST_PENALTY, le=MOST_PENALTY)] | None = None
    logit_bias: LogitBias | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: Flag | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None

    def sampling_params(self, **others: Any) -> SamplingParams:
        """Return the parameters that were given, and `others`; InvalidArgumentError where they do not fit."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None}, **others)


class SharedFields(SamplingFields):
    """What requests for completions and for chats have in common.

    `priority` (the smallest first) counts with `--scheduling-policy priority`. Only requests with the same `cache_salt`
    share computed prefixes. With `return_token_ids` each choice has its `token_ids`.
    """

    model: Text | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[Whole, Field(ge=-(2**63), le=MOST)] | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    return_token_ids: Flag | None = None
    user: Any = Field(None, description="Ignored.")

    @model_validator(mode="after")
    def _check_stream_options(self) -> SharedFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true, or leave stream_options out")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with the count of its tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(SharedFields):
    """The body of `POST /v1/completions`. `max_tokens` is 16 by default; 0, with `echo`, rates the prompt."""

    prompt: Prompts
    max_tokens: Count | None = None
    echo: Flag | None = None
    logprobs: Annotated[Whole, Field(ge=0)] | None = None
    best_of: Whole | None = Field(None, description="Only what `n` is, too.")
    suffix: Annotated[Literal[""] | None, _not_built("a text to end on is")] = None

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of has to be n here: draw more with n, and choose by their logprobs")
        return self


class ContentPart(BaseModel):
    """A piece of a message. Only text is read here."""

    model_config = ConfigDict(extra="forbid")
    type: Annotated[Literal["text"], refused_as("only text is read here, so send parts of type 'text'")]
    text: Text


_PARTS = TypeAdapter(Annotated[list[ContentPart], Field(fail_fast=True)])


def _join_parts(value: Any) -> Any:
    """Return a message's content as one text, its parts, if there are any, on lines of their own, as in vLLM."""
    return "\n".join(part.text for part in _PARTS.validate_python(value)) if isinstance(value, list) else value


class ChatMessage(BaseModel):
    """One turn of a conversation. What a client gets back as a `message` can be sent again as it is."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_join_parts, json_schema_input_type=str | list[ContentPart])]
    name: Text | None = Field(None, description="Ignored.")
    refusal: Annotated[None, _not_built("refusals are")] = None
    audio: Annotated[None, _AUDIO] = None
    function_call: Annotated[None, _FUNCTIONS] = None
    tool_calls: Annotated[_Empty | None, _TOOLS] = None
    annotations: Annotated[_Empty | None, _not_built("annotations are")] = None

    def for_template(self) -> dict[str, str]:
        """Return what chat templates read; they know the developer's role by its older name."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(SharedFields):
    """The body of `POST /v1/chat/completions`. `max_tokens` is the old name of `max_completion_tokens`.

    Without either an answer may be as long as the context allows.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = None

    response_format: Annotated[_TextFormat | None, _not_built("formats other than text are")] = None
    modalities: Annotated[_TextAlone | None, _not_built("answers other than text are")] = None
    tools: Annotated[_Empty | None, _TOOLS] = None
    tool_choice: Annotated[Literal["none", "auto"] | None, _TOOLS] = None
    functions: Annotated[_Empty | None, _FUNCTIONS] = None
    function_call: Annotated[Literal["none", "auto"] | None, _FUNCTIONS] = None
    verbosity: Annotated[Literal["medium"] | None, _not_built("degrees of verbosity are")] = None
    audio: Annotated[None, _AUDIO] = None
    moderation: Annotated[None, _not_built("moderation is")] = None
    web_search_options: Annotated[None, _not_built("web search is")] = None

    metadata: Any = Field(None, description="Ignored.")
    parallel_tool_calls: Any = Field(None, description="Ignored.")
    prediction: Any = Field(None, description="Ignored.")
    prompt_cache_key: Any = Field(None, description="Ignored.")
    prompt_cache_options: Any = Field(None, description="Ignored.")
    prompt_cache_retention: Any = Field(None, description="Ignored.")
    reasoning_effort: Any = Field(None, description="Ignored.")
    safety_identifier: Any = Field(None, description="Ignored.")
    service_tier: Any = Field(None, description="Ignored.")
    store: Any = Field(None, description="Ignored.")

    @model_validator(mode="after")
    def _check_fit(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is of use with logprobs only: set logprobs to true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens is the old name of max_completion_tokens: give one of them")
        return self
