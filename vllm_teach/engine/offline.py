"""Offline use: many requests given at once, and run until all have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from tqdm.auto import tqdm

from vllm_teach.engine.failure import shown
from vllm_teach.engine.field_checks import check_choice
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.outputs import RequestOutput
from vllm_teach.engine.prompts import Prompt
from vllm_teach.engine.request import Request
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import InvalidArgumentError, VllmTeachError


def run_all(
    engine: LLMEngine,
    kind: str,
    items: Sequence[Any],
    *,
    render: Callable[[Any], Prompt] | None = None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    use_tqdm: bool,
    on_error: str,
    priority: Sequence[int] | None = None,
) -> list[RequestOutput]:
    """Queue the prompt of each of `items`, step until all ended, and return their outputs; see `LLM.generate`.

    `render` makes an item's prompt, which it is itself otherwise. Errors name an item by `kind` and its index. Whatever
    interrupts this, none of the requests stays in the engine.
    """
    check_choice("on_error", on_error, ("raise", "return"))
    params = _one_each(sampling_params, len(items))
    priorities = [0] * len(items) if priority is None else priority
    if not isinstance(priorities, list | tuple) or len(priorities) != len(items):
        raise InvalidArgumentError(
            f"priority={shown(priority)} is not valid: give a list with a number for each of {len(items)} prompts."
        )
    refused: dict[int, RequestOutput] = {}
    requests: dict[int, Request] = {}
    # Leaving the block calls every abort, also when one of them is interrupted. Other threads stay out until then.
    with engine.exclusive.one_thread(), ExitStack() as cleanup:
        for index, item in enumerate(items):
            try:
                with engine.exclusive.hold():  # a Ctrl-C comes when the abort is registered
                    prompt = item if render is None else render(item)
                    name = engine.add_request(prompt, params[index], priority=priorities[index])
                    request = engine.get_request(name)
                    cleanup.callback(engine.abort, request)
                    requests[index] = request
            except VllmTeachError as error:
                named = type(error)(f"{kind}[{index}]: {error}")
                if on_error == "raise":
                    raise named from error
                text = item if isinstance(item, str) else None
                refused[index] = RequestOutput(f"{kind}[{index}]", text, [], finished=True, error=named)
        _step_until_done(engine, list(requests.values()), use_tqdm, on_error)
    return [refused[index] if index in refused else requests[index].output() for index in range(len(items))]


def progress_bar(total: int, what: str, shown: bool) -> tqdm:
    """Return a bar for `total` of `what`; saying disable=False would overrule the environment's TQDM_DISABLE."""
    quiet: dict[str, Any] = {} if shown else {"disable": True}
    return tqdm(total=total, desc=what, **quiet)


def _step_until_done(engine: LLMEngine, requests: list[Request], use_tqdm: bool, on_error: str) -> None:
    with progress_bar(len(requests), "requests", use_tqdm) as bar:
        while not all(request.finished for request in requests):
            engine.step()
            newly = sum(request.finished for request in requests) - bar.n
            if newly:
                bar.update(newly)
            failed = next((each.error for each in requests if each.error is not None), None)
            if failed is not None and on_error == "raise":
                raise failed


def _one_each(sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if not isinstance(sampling_params, list | tuple):
        raise InvalidArgumentError(
            f"sampling_params is of type {type(sampling_params).__name__}, which is not valid: use SamplingParams."
        )
    if len(sampling_params) != count:
        raise InvalidArgumentError(
            f"sampling_params has {len(sampling_params)} entries for {count} prompts: give one, or one for each."
        )
    return list(sampling_params)
