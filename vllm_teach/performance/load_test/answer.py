"""One answer of an OpenAI-compatible server, as its bytes arrive: when text came, and how many tokens it was.

An event of a stream may carry several tokens, a part of one, or no text at all, and several events may come in one
read. So time is taken where it shows, at the reads, and tokens are counted by whoever knows best, in this order:
"usage" (the server counted), "tokenizer" (this client encoded the text), "events" (one token each: a guess). How many
an event carries is known where the server says it: by usage in each, or the `token_ids` that vLLM sends when asked to.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

from vllm_teach.performance.load_test.sse_reader import SSEReader

DONE = "[DONE]"
# What a server counts beyond that is no count: an entry for each token would fill the memory.
_MOST_TOKENS = 10**7
# What a chat delta may carry that a model wrote: the answer, its reasoning by two names, a refusal.
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


class BadAnswerError(Exception):
    """An answer that is no OpenAI answer, or an error object within a stream: `kind` is its class.

    `message` is what the server says, "" where it says nothing.
    """

    def __init__(self, *, kind: str, message: str = "") -> None:
        super().__init__(kind)
        self.kind, self.message = kind, message


class Answer:
    """What came so far. Times are those that `feed` was given, None before they happened.

    `first` and `last`: of the first event with text, and of the last with text or a finish_reason (the token that ended
    the text may have none). `gaps`: seconds from one token to the next; the tokens of one event, and the events of one
    read, lie 0 apart. `events` counts those with text, `first_tokens` the tokens of the first. `text` is "" unless it
    is kept.
    """

    def __init__(self, *, keep_text: bool = False) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.end: float | None = None
        self.gaps = array("d")
        self.events = 0
        self.first_tokens = 1
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish_reason: str | None = None
        self._reader = SSEReader()
        self._keep_text = keep_text
        self._texts: list[str] = []
        self._last_text = 0.0
        self._counts_events = False  # the usage in each event says how many tokens there are so far
        self._counted = self._new = 0  # tokens: by that usage; since the last text, by it or by `token_ids`

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes of a stream that were read at `now`. Raises BadAnswerError and EventTooLongError."""
        for event in self._reader.feed(data):
            if event == DONE:
                self.end = now
            else:
                self._take_event(_object(event), now)

    def close(self, now: float) -> None:
        """Take the proper end of a stream at `now`: after a finish_reason some servers send that in place of [DONE]."""
        if self.end is None and self.finish_reason is not None:
            self.end = now

    def take_whole(self, body: bytes, now: float) -> None:
        """Take an answer that was not streamed. Raises BadAnswerError."""
        answer = _object(body)
        choice = _choice(answer)
        if choice is None:
            raise BadAnswerError(kind="bad answer: no choices")
        self._note_text(_text(choice), choice)
        self._read_usage(answer)
        self.end = now

    def _take_event(self, event: dict[str, Any], now: float) -> None:
        if event.get("error"):
            raise BadAnswerError(kind=f"error in the stream: {error_class(event)}", message=error_message(event))
        self._read_usage(event)
        choice = _choice(event)
        if choice is None:
            return
        text, ids = _text(choice), choice.get("token_ids")
        self._note_text(text, choice)
        self._new += len(ids) if isinstance(ids, list) else 0
        if text:
            self._note_time(now)
        elif self.finish_reason is not None and self.first is not None:
            self.last = now

    def _note_time(self, now: float) -> None:
        """Take the time of an event with text, of as many tokens as the server says, 1 where it does not."""
        if self.first is None:
            self._counts_events = self.output_tokens is not None
        if self._counts_events and self.output_tokens is not None:
            self._new, self._counted = self.output_tokens - self._counted, self.output_tokens
        tokens, self._new = max(1, self._new), 0
        if self.first is None:
            self.first, self.first_tokens = now, tokens
        else:
            self.gaps.append(now - self._last_text)
        self.gaps.extend([0.0] * (tokens - 1))
        self.last = self._last_text = now
        self.events += 1

    def _note_text(self, text: str, choice: dict[str, Any]) -> None:
        if text and self._keep_text:
            self._texts.append(text)
        if isinstance(choice.get("finish_reason"), str):
            self.finish_reason = choice["finish_reason"]

    def _read_usage(self, answer: dict[str, Any]) -> None:
        usage = answer.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)


def error_class(body: object) -> str:
    """Return the type (or code) in OpenAI's error object, "no error object" where it is something else."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return _plain(str(error.get("type") or error.get("code") or "error"), 60)
    return "no error object"


def error_message(body: object) -> str:
    """Return what OpenAI's error object says, "" where it is something else."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return _plain(message, 200) if isinstance(message, str) else ""


def _plain(text: str, longest: int) -> str:
    """Return a server's words as one line that does nothing to a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:longest])


def parse(body: bytes | str) -> object:
    """Return what the JSON says, None where it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _object(body: bytes | str) -> dict[str, Any]:
    value = parse(body)
    if not isinstance(value, dict):
        raise BadAnswerError(kind="bad answer: no JSON object")
    return value


def _choice(answer: dict[str, Any]) -> dict[str, Any] | None:
    choices = answer.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _text(choice: dict[str, Any]) -> str:
    """The text of a completion's choice, of a chat's delta, or of its message."""
    if isinstance(choice.get("text"), str):
        return choice["text"]
    message = choice.get("delta") or choice.get("message")
    if not isinstance(message, dict):
        return ""
    texts = "".join(message[name] for name in _TEXTS if isinstance(message.get(name), str))
    return texts or ("" if not message.get("tool_calls") else json.dumps(message["tool_calls"]))


def _count(value: object, before: int | None) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS:
        return value
    return before
