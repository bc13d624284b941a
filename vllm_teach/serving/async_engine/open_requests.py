"""The requests that the engine has accepted and not yet said the last word about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from vllm_teach.errors import VllmTeachError
from vllm_teach.serving.async_engine.messages import RequestDelta
from vllm_teach.serving.async_engine.request_stream import OpenRequest


class OpenRequests:
    """Those that `wait` for their first step and those that run, by name; `on_last` gets the last word about each.

    One whose reader is gone, or that timed out, stays until the engine has confirmed its end: it holds blocks until
    then, and its name must not mean two requests. `idle` is set while there is none.
    """

    def __init__(self, on_last: Callable[[RequestDelta], None]) -> None:
        self.waiting: dict[str, OpenRequest] = {}
        self.running: dict[str, OpenRequest] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self._on_last = on_last

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting or request_id in self.running

    def has_room(self, max_queue: int) -> bool:
        """Whether one more may wait beside those whose readers still do.

        The engine drops the others before it takes what is sent after them; as it may be long in a step until then,
        they are allowed no more room than these.
        """
        if len(self.waiting) < max_queue:
            return True
        wanted = sum(not each.ended for each in self.waiting.values())
        return wanted < max_queue and len(self.waiting) < 2 * max_queue

    def add(self, request: OpenRequest) -> None:
        """Add a request that has just been accepted."""
        self.waiting[request.request_id] = request
        self.idle.clear()

    def take(self, delta: RequestDelta) -> None:
        """Give what is new to its request's reader, and forget the request if it was the last."""
        name = delta.request_id
        if name in self.waiting:
            self.running[name] = self.waiting.pop(name)
        request = self.running.get(name)
        if request is None:
            return
        request.put(delta)
        if delta.finished:
            del self.running[name]
            if not self:
                self.idle.set()
            self._on_last(delta if request.error is None else replace(delta, error=request.error))

    def fail_all(self, error: VllmTeachError) -> None:
        """End all with `error`: the engine will say nothing more."""
        failed = [*self.waiting.values(), *self.running.values()]
        self.waiting.clear()
        self.running.clear()
        self.idle.set()
        for request in failed:
            request.fail(error)
        for request in failed:
            count = len(request.prompt["prompt_token_ids"])
            why = request.error or error
            self._on_last(RequestDelta(request.request_id, finished=True, error=why, num_prompt_tokens=count))
