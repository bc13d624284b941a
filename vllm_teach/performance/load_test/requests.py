"""Requests to an OpenAI-compatible server as bytes: good ones, and such as a server must refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_teach.errors import InvalidArgumentError

Prompt = list[int] | str


@dataclass(frozen=True)
class RequestForm:
    """How a request is put: `chat` or completion, streamed or not, with the fields of `extra` added or replaced.

    Greedy unless `extra` says otherwise. `ignore_eos` is a field of vLLM's, which makes outputs as long as planned;
    `usage` asks a stream for the server's own count of tokens at its end.
    """

    model: str
    chat: bool = False
    stream: bool = True
    ignore_eos: bool = True
    usage: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path below the server's root."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def fields(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        """Return a request's fields. Raises InvalidArgumentError for a chat of token ids."""
        if self.chat:
            if not isinstance(prompt, str):
                raise InvalidArgumentError("prompt is token ids, which no chat takes: give a text.")
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        else:
            asked = {"prompt": prompt}
        asked |= {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.stream:
            asked["stream"] = True
            if self.usage:
                asked["stream_options"] = {"include_usage": True}
        return asked | self.extra

    def body(self, prompt: Prompt, max_tokens: int) -> bytes:
        """Return a good request."""
        return json.dumps(self.fields(prompt, max_tokens)).encode()

    def malformed_body(self, prompt: Prompt, max_tokens: int, kind: float) -> bytes:
        """Return a request that is wrong in one of `MALFORMED`'s ways, which `kind` (0 to 1) picks."""
        return MALFORMED[malformed_way(kind)](self.fields(prompt, max_tokens))


def _with(**changes: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda fields: json.dumps(fields | changes).encode()


def _without_prompt(fields: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in fields.items() if name not in ("prompt", "messages")}).encode()


def _prompt_is_a_number(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields | ({"messages": 7} if "messages" in fields else {"prompt": 7})).encode()


def _cut(fields: dict[str, Any]) -> bytes:
    whole = json.dumps(fields).encode()
    return whole[: len(whole) // 2]


def _no_utf8(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields | {"model": "?"}).encode().replace(b'"?"', b'"\xff\xfe"')


MALFORMED: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "JSON that is cut": _cut,
    "JSON that is no object": lambda fields: b"[1, 2]",
    "bytes that are no UTF-8": _no_utf8,
    "an empty body": lambda fields: b"",
    "no prompt": _without_prompt,
    "a prompt that is a number": _prompt_is_a_number,
    "max_tokens of -1": _with(max_tokens=-1),
    "max_tokens in words": _with(max_tokens="many"),
    "a temperature of -1": _with(temperature=-1),
    "an unknown model": _with(model="no-such-model"),
}


def malformed_way(kind: float) -> str:
    """Return the name of the way that `kind` (0 to 1) picks."""
    names = sorted(MALFORMED)
    return names[min(int(kind * len(names)), len(names) - 1)]
