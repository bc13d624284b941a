"""Sends the requests of a `LoadPlan` to a server, over as many connections as are in flight, and records each.

One event loop does it all. It never holds more tasks than the plan has requests in flight, and nothing of a request
once it is recorded. It retries nothing: a retry hides what it was to measure.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_teach.performance.load_test.answer import Answer, BadAnswerError, error_class, error_message, parse
from vllm_teach.performance.load_test.plan import LoadPlan, PlannedRequest
from vllm_teach.performance.load_test.record import ABORTED, ANSWERED, FAILED, REFUSED, RequestRecord
from vllm_teach.performance.load_test.requests import Prompt, RequestForm
from vllm_teach.performance.load_test.sse_reader import EventTooLongError
from vllm_teach.performance.load_test.target import Target

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_LONGEST_BODY = 64 * 2**20
_LONGEST_ERROR = 64 * 2**10
# Seconds for the end of a stream that has said [DONE]; it comes at once, and without it the connection is of no use.
_LINGER = 1.0
# What a server says when it is too busy, or does not let this client in: no judgement of the request.
_NOT_ABOUT_THE_REQUEST = (401, 403, 408, 429)


@dataclass
class LoadClient:
    """`prompt` returns a request's prompt and how many tokens it has; `on_record` is told each request that has ended.

    `timeout` in seconds is for a whole request, from when it is sent. `keep_text` records what was answered, and
    `count_tokens` counts the tokens of such a text, for servers that do not. `started` is the clock when the first
    measured request could be sent, None before; `unfinished` counts requests that a cancelled `run` left behind.
    """

    session: ClientSession
    target: Target
    form: RequestForm
    plan: LoadPlan
    prompt: Callable[[PlannedRequest], tuple[Prompt, int]]
    on_record: Callable[[RequestRecord], None]
    timeout: float = 600.0
    keep_text: bool = False
    count_tokens: Callable[[str], int] | None = None
    started: float | None = None
    unfinished: int = 0
    held_back: int = 0

    async def warm_up(self) -> None:
        """Send the requests of the plan's warm-up and forget what becomes of them."""
        at_once = min(self.plan.arrivals.max_in_flight, max(1, self.plan.warm_up))
        await self._send_all(self.plan.warm_up_requests(), at_once, None, lambda record: None)

    async def run(self) -> None:
        """Send all requests of the plan and wait for their ends; when cancelled, hang up on those in flight."""
        self.started = time.perf_counter()
        plan = self.plan
        await self._send_all(plan.requests(), plan.arrivals.max_in_flight, plan.duration, self.on_record)

    async def _send_all(
        self,
        requests: Iterable[PlannedRequest],
        at_once: int,
        duration: float | None,
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        start, places = time.perf_counter(), asyncio.Semaphore(at_once)

        async def serve(request: PlannedRequest, due: float) -> None:
            record = RequestRecord(
                request.index, request.prompt_len, request.output_len, request.malformed is not None, due=due - start
            )
            try:
                await self._serve(request, record, start)
            except asyncio.CancelledError:
                self.unfinished += 1
                raise
            finally:
                places.release()
            on_record(record)

        try:
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    due = None if request.offset is None else start + request.offset
                    if duration is not None and request.offset is not None and request.offset >= duration:
                        break
                    # A late one does not wait at all: were it one a turn of the loop, a busy loop would set the pace.
                    if due is not None and (early := due - time.perf_counter()) > 0:
                        await asyncio.sleep(early)
                    self.held_back += due is not None and places.locked()
                    await places.acquire()
                    now = time.perf_counter()
                    if duration is not None and due is None and now - start >= duration:
                        break
                    tasks.create_task(serve(request, now if due is None else due))
        except BaseExceptionGroup as group:  # from `on_record`: a full disk
            raise group.exceptions[0] from None

    async def _serve(self, request: PlannedRequest, record: RequestRecord, start: float) -> None:
        """Send one request, and write into `record` what became of it. Raises nothing that a server can cause."""
        import aiohttp

        hang_up = request.abort
        seconds = hang_up.seconds if hang_up is not None and (hang_up.events is None or not self.form.stream) else None
        limit = self.timeout if seconds is None else min(seconds, self.timeout)
        prompt, record.prompt_tokens = self.prompt(request)
        if request.malformed is None:
            body = self.form.body(prompt, request.output_len)
        else:
            body = self.form.malformed_body(prompt, request.output_len, request.malformed)
        answer = Answer(keep_text=self.keep_text or self.count_tokens is not None)
        record.outcome = FAILED
        record.sent = time.perf_counter() - start
        url = self.target.root + self.form.path
        try:
            async with asyncio.timeout(limit), self.session.post(url, data=body, allow_redirects=False) as reply:
                record.status = reply.status
                await self._read(reply, request, record, answer)
        except TimeoutError:
            record.outcome = FAILED if seconds is None or seconds > self.timeout else ABORTED
            record.error = "timeout" if record.outcome == FAILED else None
        except BadAnswerError as error:
            record.error, record.message = error.kind, error.message or None
        except EventTooLongError:
            record.error = "bad answer: endless event"
        except (aiohttp.ClientError, OSError) as error:
            record.error = _connection_error(error, record.status)
        if answer.end is not None:  # the answer is whole, whatever became of its connection
            record.outcome, record.error = ANSWERED, None
        self._note(answer, record, start, time.perf_counter())

    async def _read(
        self, reply: ClientResponse, request: PlannedRequest, record: RequestRecord, answer: Answer
    ) -> None:
        """Read an answer to its end, or to the event after which it is to be aborted."""
        if reply.status != 200 or record.malformed:
            await _judge(reply, record)
            return
        if not self.form.stream:
            answer.take_whole(await _body(reply, _LONGEST_BODY), time.perf_counter())
            return
        if reply.content_type != "text/event-stream":
            raise BadAnswerError(kind=f"bad answer: {reply.content_type[:40]} where a stream was asked for")
        most = request.abort.events if request.abort is not None else None
        async for data in reply.content.iter_any():
            answer.feed(data, time.perf_counter())
            if most is not None and answer.events >= most:
                reply.close()
                record.outcome = ABORTED
                return
            if answer.end is not None:
                await _read_end(reply)
                return
        answer.close(time.perf_counter())
        record.error = "cut stream"  # unless that was its end

    def _note(self, answer: Answer, record: RequestRecord, start: float, now: float) -> None:
        """Write what came of an answer into its record."""
        record.end = (now if answer.end is None else answer.end) - start
        record.first = None if answer.first is None else answer.first - start
        record.last = None if answer.last is None else answer.last - start
        record.events, record.gaps, record.first_tokens = answer.events, answer.gaps, answer.first_tokens
        record.finish_reason = answer.finish_reason
        if answer.prompt_tokens is not None:
            record.prompt_tokens = answer.prompt_tokens
        if self.keep_text:
            record.text = answer.text
        if answer.output_tokens is not None:
            record.output_tokens, record.tokens_from = answer.output_tokens, "usage"
        elif self.count_tokens is not None and answer.text:
            record.output_tokens, record.tokens_from = self.count_tokens(answer.text), "tokenizer"
        elif answer.events:
            record.output_tokens, record.tokens_from = answer.events, "events"


async def _judge(reply: ClientResponse, record: RequestRecord) -> None:
    """Write into `record` what a reply means that is an error, or that answers a malformed request."""
    kind = f"http {reply.status}"
    if reply.status < 400:
        reply.close()
        record.error = f"malformed request accepted: {kind}" if record.malformed else kind
        return
    body = parse(await _body(reply, _LONGEST_ERROR))
    record.error, record.message = f"{kind} {error_class(body)}", error_message(body) or None
    if record.malformed and reply.status < 500 and reply.status not in _NOT_ABOUT_THE_REQUEST:
        record.outcome = REFUSED


async def _read_end(reply: ClientResponse) -> None:
    """Read the end of a body in which nothing follows any more, but hang up on a server that does not send it."""
    try:
        async with asyncio.timeout(_LINGER):
            async for _ in reply.content.iter_any():
                pass
    except TimeoutError:
        reply.close()


async def _body(reply: ClientResponse, limit: int) -> bytes:
    """Read a body, of which no more than `limit` bytes are kept."""
    parts, size = [], 0
    async for data in reply.content.iter_any():
        size += len(data)
        if size > limit:
            reply.close()
            break
        parts.append(data)
    return b"".join(parts)


def _connection_error(error: Exception, status: int | None) -> str:
    """Return the class of a failure below HTTP: it never reached the server, or was cut off before or in its answer."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        refused = number == errno.ECONNREFUSED
        return "connection refused" if refused else f"no connection: {errno.errorcode.get(number or 0, 'unknown')}"
    if status is not None:
        cut = isinstance(error, aiohttp.ClientPayloadError | aiohttp.ClientConnectionError | OSError)
        return "cut stream" if cut else f"bad answer: {type(error).__name__}"
    lost = isinstance(error, aiohttp.ServerConnectionError | OSError)
    return "connection lost" if lost else f"bad answer: {type(error).__name__}"
