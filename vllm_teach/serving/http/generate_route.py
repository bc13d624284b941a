"""`POST /generate`: a prompt in, texts out, in the short form of vLLM's first server and of many an article."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from vllm_teach.engine.sampling_params import MOST_TEMPERATURE
from vllm_teach.serving.async_engine.messages import CompletionDelta
from vllm_teach.serving.http.answering import AnswerWriter, answer
from vllm_teach.serving.http.generation import Generation
from vllm_teach.serving.http.openai_requests import SamplingFields
from vllm_teach.serving.http.prompt_reading import choose_max_tokens, read_prompts
from vllm_teach.serving.http.request_fields import Flag, Number, Positive, Text
from vllm_teach.serving.http.request_ids import new_id
from vllm_teach.serving.http.service import ServiceOfApp
from vllm_teach.serving.http.sse import DESCRIBED

router = APIRouter()

_DEFAULT_MAX_TOKENS = 16  # that of `SamplingParams`


class GenerateRequest(SamplingFields):
    """The body. `temp` and `max_len` are other names of `temperature` and `max_tokens`, which is 16 by default."""

    prompt: Annotated[Text, Field(min_length=1)]
    max_tokens: Positive | None = None
    stream: Flag | None = None
    temp: Annotated[Number, Field(ge=0, le=MOST_TEMPERATURE)] | None = None
    max_len: Positive | None = None

    @model_validator(mode="after")
    def _take_other_names(self) -> GenerateRequest:
        for other, name in (("temp", "temperature"), ("max_len", "max_tokens")):
            value = getattr(self, other)
            if value is not None and getattr(self, name) not in (None, value):
                raise ValueError(f"{other} is another name of {name}: give one of them")
            if value is not None:
                setattr(self, name, value)
        return self


class GenerateResponse(BaseModel):
    """A text for each completion, without the prompt. In a stream, what is new of each."""

    text: list[str]


@router.post("/generate", response_model=GenerateResponse, responses=DESCRIBED)
async def generate(body: GenerateRequest, request: Request, service: ServiceOfApp) -> Response:
    """Continue a prompt `n` times."""
    service.check_choices(body.n)
    prompts = await read_prompts([body.prompt], service.engine)
    most = service.settings.max_output_tokens
    max_tokens = choose_max_tokens(body.max_tokens, prompts, service.engine, most, _DEFAULT_MAX_TOKENS)
    params = body.sampling_params(max_tokens=max_tokens)
    stream = bool(body.stream)
    generation = await Generation.start(service.engine, new_id("gen"), prompts, params, whole=not stream)
    return await answer(request, service, generation, GenerateWriter(body.n or 1, generation), stream)


class GenerateWriter(AnswerWriter):
    """Writes what a generation brings in the form of `/generate`."""

    def __init__(self, n: int, generation: Generation) -> None:
        self._n, self._generation = n, generation

    def chunks(self, number: int, new: CompletionDelta) -> Iterator[BaseModel]:
        """Yield an event with what is new at the place of its completion."""
        if new.text:
            yield GenerateResponse(text=[new.text if index == new.index else "" for index in range(self._n)])

    def last_chunks(self) -> Iterator[BaseModel]:
        """Yield nothing: all is said."""
        yield from ()

    def whole(self) -> BaseModel:
        """Return the texts."""
        [answered] = self._generation.answers
        return GenerateResponse(text=[output.text for output in answered.outputs])
