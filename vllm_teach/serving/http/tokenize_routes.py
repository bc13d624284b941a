"""`POST /tokenize` and `POST /detokenize`: text to the model's tokens and back, vLLM's bodies."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_teach.engine.prompts import encode_text
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.http.beside_the_loop import beside_the_loop
from vllm_teach.serving.http.openai_requests import ChatMessage
from vllm_teach.serving.http.prompt_reading import read_chat
from vllm_teach.serving.http.request_fields import Flag, Text, TokenIds
from vllm_teach.serving.http.service import ServiceOfApp

router = APIRouter()


class TokenizeRequest(BaseModel):
    """The body of `POST /tokenize`: a `prompt`, or `messages` to go through the model's chat template.

    `add_special_tokens`, True by default, puts around a prompt what the model wants there; a template does that itself.
    """

    model_config = ConfigDict(extra="forbid")
    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens is for a prompt: messages have them from the chat template")
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages is to be tokenised: give one of them")
        return self


class TokenizeResponse(BaseModel):
    """The tokens, how many they are, and how many fit with an answer."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """The body of `POST /detokenize`."""

    model_config = ConfigDict(extra="forbid")
    model: Text | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    """The text of the tokens, special ones included."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceOfApp) -> TokenizeResponse:
    """Return the tokens of a text or of a conversation."""
    service.check_model(body.model)
    engine = service.engine
    if body.messages is not None:
        messages = [message.for_template() for message in body.messages]
        read = await read_chat(messages, engine, any_length=True)
        token_ids = read["prompt_token_ids"]
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
        encode = partial(encode_text, text, engine.tokenizer, add_special_tokens=special)
        token_ids = await beside_the_loop(len(text), encode)
    texts = None
    if body.return_token_strs:
        decode = engine.tokenizer.decode
        texts = await beside_the_loop(
            len(token_ids), lambda: [decode([token_id], skip_special_tokens=False) for token_id in token_ids]
        )
    return TokenizeResponse(
        count=len(token_ids), max_model_len=engine.ready.max_model_len, tokens=token_ids, token_strs=texts
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: ServiceOfApp) -> DetokenizeResponse:
    """Return the text of tokens."""
    service.check_model(body.model)
    vocab_size = service.engine.ready.vocab_size
    for token_id in body.tokens:
        if token_id >= vocab_size:
            raise InvalidArgumentError(f"tokens holds {token_id}, which is no token id: use 0 to {vocab_size - 1}.")
    decode = service.engine.tokenizer.decode
    text = await beside_the_loop(len(body.tokens), lambda: decode(body.tokens, skip_special_tokens=False))
    return DetokenizeResponse(prompt=text)
