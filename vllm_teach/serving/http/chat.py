"""`POST /v1/chat/completions`: the model takes its turn in a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from vllm_teach.engine.outputs import CompletionOutput
from vllm_teach.serving.async_engine.messages import CompletionDelta
from vllm_teach.serving.http.answering import AnswerWriter, answer
from vllm_teach.serving.http.generation import Generation
from vllm_teach.serving.http.openai_logprobs import chat_logprobs
from vllm_teach.serving.http.openai_requests import ChatRequest
from vllm_teach.serving.http.openai_responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
)
from vllm_teach.serving.http.prompt_reading import choose_max_tokens, read_chat
from vllm_teach.serving.http.request_ids import new_id
from vllm_teach.serving.http.service import FINGERPRINT, Service, ServiceOfApp
from vllm_teach.serving.http.sse import DESCRIBED

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=DESCRIBED)
async def create_chat_completion(body: ChatRequest, request: Request, service: ServiceOfApp) -> Response:
    """Answer a conversation, in the form that the model's chat template gives it."""
    service.check_model(body.model)
    service.check_choices(body.n)
    service.check_logprobs("top_logprobs", body.top_logprobs)
    messages = [message.for_template() for message in body.messages]
    prompt = await read_chat(messages, service.engine, cache_salt=body.cache_salt)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = choose_max_tokens(asked, [prompt], service.engine, service.settings.max_output_tokens, None)
    params = body.sampling_params(max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    stream, rank = bool(body.stream), body.priority or 0
    generation = await Generation.start(service.engine, new_id("chatcmpl"), [prompt], params, rank, whole=not stream)
    return await answer(request, service, generation, ChatWriter(service, body, generation), stream)


class ChatWriter(AnswerWriter):
    """Writes what a generation brings in the form of `/v1/chat/completions`.

    In a stream the role comes first, for each answer, with the first token of any; then the pieces of the contents; and
    for each answer a last event, empty but for its finish_reason.
    """

    def __init__(self, service: Service, body: ChatRequest, generation: Generation) -> None:
        self._service, self._body, self._generation = service, body, generation
        self._begun = False

    def chunks(self, number: int, new: CompletionDelta) -> Iterator[BaseModel]:
        """Yield the events for what is new of an answer."""
        if not self._begun:
            self._begun = True
            for index in range(self._body.n or 1):
                yield self._chunk(index, ChatDelta(role="assistant", content=""), **self._prompt_token_ids())
        wanted = self._body.logprobs or self._body.return_token_ids
        if new.text or (wanted and new.token_ids):
            yield self._chunk(new.index, ChatDelta(content=new.text), new)
        if new.finish_reason is not None:
            yield self._end(new)

    def last_chunks(self) -> Iterator[BaseModel]:
        """Yield the count of tokens, if it was asked for."""
        if self._body.include_usage:
            yield ChatChunk(**self._head("chat.completion.chunk"), choices=[], usage=self._generation.usage())

    def whole(self) -> BaseModel:
        """Return the whole answer."""
        [answered] = self._generation.answers
        head = self._head("chat.completion") | self._prompt_token_ids()
        choices = [
            ChatChoice(
                index=output.index,
                message=AnswerMessage(role="assistant", content=output.text, refusal=None),
                logprobs=self._logprobs(output),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                **self._token_ids(output),
            )
            for output in answered.outputs
        ]
        return ChatCompletion(**head, choices=choices, usage=self._generation.usage())

    def _chunk(self, index: int, delta: ChatDelta, new: CompletionDelta | None = None, **more: Any) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=None if new is None else self._logprobs(new),
            finish_reason=None,
            **({} if new is None else self._token_ids(new)),
        )
        return self._with_choice(choice, **more)

    def _end(self, new: CompletionDelta) -> ChatChunk:
        choice = ChatChunkChoice(
            index=new.index,
            delta=ChatDelta(),
            logprobs=None,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
        )
        return self._with_choice(choice)

    def _with_choice(self, choice: ChatChunkChoice, **more: Any) -> ChatChunk:
        head = self._head("chat.completion.chunk") | more
        if self._body.include_usage:
            head["usage"] = None
        return ChatChunk(**head, choices=[choice])

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._generation.request_id,
            "object": kind,
            "created": self._generation.created,
            "model": self._service.model_names[0],
            "system_fingerprint": FINGERPRINT,
        }

    def _logprobs(self, new: CompletionDelta | CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(new.token_ids, new.logprobs or (), self._body.top_logprobs or 0)

    def _prompt_token_ids(self) -> dict[str, Any]:
        [answered] = self._generation.answers
        return {"prompt_token_ids": answered.prompt_token_ids} if self._body.return_token_ids else {}

    def _token_ids(self, new: CompletionDelta | CompletionOutput) -> dict[str, Any]:
        return {"token_ids": list(new.token_ids)} if self._body.return_token_ids else {}
