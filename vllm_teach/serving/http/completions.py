"""`POST /v1/completions`: a prompt, or several, goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from vllm_teach.engine.outputs import CompletionOutput
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.async_engine.messages import CompletionDelta
from vllm_teach.serving.http.answering import AnswerWriter, answer
from vllm_teach.serving.http.generation import Generation
from vllm_teach.serving.http.openai_logprobs import CompletionLogprobsWriter
from vllm_teach.serving.http.openai_requests import CompletionRequest
from vllm_teach.serving.http.openai_responses import Completion, CompletionChoice, Usage
from vllm_teach.serving.http.prompt_reading import choose_max_tokens, read_prompts
from vllm_teach.serving.http.request_ids import new_id
from vllm_teach.serving.http.service import FINGERPRINT, Service, ServiceOfApp
from vllm_teach.serving.http.sse import DESCRIBED

router = APIRouter()

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/v1/completions", response_model=Completion, responses=DESCRIBED)
async def create_completion(body: CompletionRequest, request: Request, service: ServiceOfApp) -> Response:
    """Continue each prompt `n` times; choice number i*n + j is the j-th of prompt i."""
    service.check_model(body.model)
    service.check_choices(body.n, len(body.prompt))
    service.check_logprobs("logprobs", body.logprobs)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidArgumentError("max_tokens=0 is not valid: without echo nothing would come, so use at least 1.")
    prompts = await read_prompts(body.prompt, service.engine, cache_salt=body.cache_salt)
    most = service.settings.max_output_tokens
    max_tokens = choose_max_tokens(body.max_tokens, prompts, service.engine, most, _DEFAULT_MAX_TOKENS)
    params = body.sampling_params(
        # The engine always draws one token; with 0 it is not handed out.
        max_tokens=max_tokens or 1,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    stream, rank = bool(body.stream), body.priority or 0
    generation = await Generation.start(service.engine, new_id("cmpl"), prompts, params, rank, whole=not stream)
    return await answer(request, service, generation, CompletionWriter(service, body, generation), stream)


class CompletionWriter(AnswerWriter):
    """Writes what a generation brings in the form of `/v1/completions`."""

    def __init__(self, service: Service, body: CompletionRequest, generation: Generation) -> None:
        self._service, self._body, self._generation = service, body, generation
        self._choices: dict[int, _ChoiceWriter] = {}

    def chunks(self, number: int, new: CompletionDelta) -> Iterator[BaseModel]:
        """Return an event with what is new of a choice, if a client can see anything of it."""
        choice = self._write(number, new)
        if choice is not None:
            yield self._completion([choice], usage=None)

    def last_chunks(self) -> Iterator[BaseModel]:
        """Return the count of tokens, if it was asked for."""
        if self._body.include_usage:
            yield self._completion([], usage=self._usage())

    def whole(self) -> BaseModel:
        """Return the whole answer."""
        choices = [
            self._write(number, _as_delta(output))
            for number, answered in enumerate(self._generation.answers)
            for output in answered.outputs
        ]
        return self._completion([choice for choice in choices if choice is not None], usage=self._usage())

    def _write(self, number: int, new: CompletionDelta) -> CompletionChoice | None:
        index = number * len(self._generation.answers[number].outputs) + new.index
        if index not in self._choices:
            self._choices[index] = _ChoiceWriter(self._service, self._body, self._generation, number, index)
        return self._choices[index].write(new)

    def _usage(self) -> Usage:
        return self._generation.usage(0 if self._body.max_tokens == 0 else None)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        fields: dict[str, Any] = {}
        if usage is not None or self._body.include_usage:
            fields["usage"] = usage
        return Completion(
            id=self._generation.request_id,
            object="text_completion",
            created=self._generation.created,
            model=self._service.model_names[0],
            system_fingerprint=FINGERPRINT,
            choices=choices,
            **fields,
        )


@dataclass
class _ChoiceWriter:
    """Writes one choice, in one piece or in several; the first has the prompt, if it is to be echoed."""

    service: Service
    body: CompletionRequest
    generation: Generation
    number: int
    index: int

    def __post_init__(self) -> None:
        self._logprobs = CompletionLogprobsWriter()
        self._begun = False

    def write(self, new: CompletionDelta) -> CompletionChoice | None:
        """Return the choice with what is new, None where that is nothing."""
        text, token_ids, logprobs, texts = "", list[int](), list[Any](), list[str]()
        first, self._begun = not self._begun, True
        answer = self.generation.answers[self.number]
        tokenizer = self.service.engine.tokenizer
        if first and self.body.echo:
            token_ids += answer.prompt_token_ids
            text = answer.prompt or tokenizer.decode(token_ids, skip_special_tokens=False)
            if self.body.logprobs is not None:
                logprobs += answer.prompt_logprobs or ()
                texts = [tokenizer.decode(token_ids[:1], skip_special_tokens=False)]
        if self.body.max_tokens != 0:
            text += new.text
            token_ids += new.token_ids
            logprobs += new.logprobs or ()
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["token_ids"] = token_ids
            if first:
                fields["prompt_token_ids"] = answer.prompt_token_ids
        visible = text or new.finish_reason or (token_ids and (self.body.logprobs is not None or fields))
        if not visible:
            return None
        written = None if self.body.logprobs is None else self._logprobs.write(token_ids, logprobs, texts)
        return CompletionChoice(
            index=self.index,
            text=text,
            logprobs=written,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            **fields,
        )


def _as_delta(output: CompletionOutput) -> CompletionDelta:
    """Return a whole completion as what is new of it."""
    return CompletionDelta(
        output.index,
        output.text,
        tuple(output.token_ids),
        None if output.logprobs is None else tuple(output.logprobs),
        output.finish_reason,
        output.stop_reason,
    )
