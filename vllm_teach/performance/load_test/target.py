"""The server under load: its address and key, what it says of itself, and its tokenizer when it lends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_teach.errors import InvalidArgumentError, MissingDependencyError, VllmTeachError, installs
from vllm_teach.performance.load_test.answer import error_class, parse

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from vllm_teach.models.tokenizer import Tokenizer

_PATIENCE = 60.0  # seconds for one question about the server
_LONGEST = 2**20  # bytes of a text that is shown in an error, or of an answer about the server
# Below the 5 s after which uvicorn closes an idle connection, which would cost the request that comes just then.
_KEEP_ALIVE = 4.0
# What to do where it answers, but not as such a server does.
_ELSEWHERE = "see that an OpenAI-compatible server is there, with its routes behind /v1"

# Two texts that have no token in common, whichever the tokenizer.
_UNLIKE = ("Quartz", "blue whim")


class ServerError(VllmTeachError):
    """The server does not answer, or not as an OpenAI-compatible one does, before the load test has begun."""


@dataclass(frozen=True)
class Target:
    """`base_url` with or without /v1 at its end; `api_key` is sent as a bearer token, and shown nowhere."""

    base_url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise InvalidArgumentError(
                f"base_url={self.base_url!r} is no address: give one like http://127.0.0.1:8000, the key apart."
            )

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    def session(self) -> ClientSession:
        """Return the connections to the server: as many as there are requests in flight, kept between them.

        To be called in a running event loop. Raises MissingDependencyError without aiohttp.
        """
        try:
            import aiohttp
        except ImportError as error:
            raise MissingDependencyError(f"aiohttp is not installed: run {installs('serve')}.") from error
        # identity: a proxy that compresses a stream holds its events back.
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None),  # the client's own, which knows why it hangs up
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


@dataclass(frozen=True)
class ServerInfo:
    """The model to ask for; its longest context in tokens and the server's version where it tells them."""

    model: str
    max_model_len: int | None = None
    version: str | None = None


async def ask(session: ClientSession, target: Target, path: str, body: dict[str, Any] | None = None) -> object:
    """Return the answer to a GET, or a POST of `body`, as what its JSON says.

    Raises ServerError when there is none, or the status is not 200.
    """
    import aiohttp

    method = "GET" if body is None else "POST"
    limit = aiohttp.ClientTimeout(total=_PATIENCE)
    try:
        async with session.request(method, target.root + path, json=body, timeout=limit) as response:
            answer = parse(await response.content.read(_LONGEST) if response.status != 200 else await response.read())
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = str(error) or type(error).__name__
        raise ServerError(f"base_url={target.base_url!r} does not answer {path} ({why}): start the server.") from error
    if status != 200:
        advice = _ELSEWHERE if status == 404 and path == "/v1/models" else "see its log"
        raise ServerError(
            f"base_url={target.base_url!r} answers {path} with status {status} ({error_class(answer)}): {advice}."
        )
    return answer


async def describe_server(session: ClientSession, target: Target, model: str | None) -> ServerInfo:
    """Return what the server says of `model`, by default the first that it lists. Raises ServerError."""
    answer = await ask(session, target, "/v1/models")
    entries = answer.get("data") if isinstance(answer, dict) else None
    entries = entries if isinstance(entries, list) else []
    entries = [each for each in entries if isinstance(each, dict) and isinstance(each.get("id"), str)]
    lengths = {each["id"]: each.get("max_model_len") for each in entries}
    if model is None:
        if not lengths:
            raise ServerError(f"base_url={target.base_url!r} lists no model: name one, or {_ELSEWHERE}.")
        model = next(iter(lengths))
    elif lengths and model not in lengths:
        raise ServerError(f"model={model!r} is not served there: choose one of {', '.join(list(lengths)[:20])}.")
    length = lengths.get(model)
    longest = length if isinstance(length, int) and length > 1 else None
    return ServerInfo(model, longest, await _version(session, target))


async def _version(session: ClientSession, target: Target) -> str | None:
    """The server's version, which OpenAI's interface does not ask for."""
    try:
        answer = await ask(session, target, "/version")
    except ServerError:
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None


class LocalCodec:
    """A tokenizer on this machine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class ServerCodec:
    """The server's own tokenizer, by the routes /tokenize and /detokenize that vLLM has and this package's server."""

    def __init__(self, session: ClientSession, target: Target, model: str) -> None:
        self._session, self._target, self._model = session, target, model
        self._around: tuple[int, int] | None = None  # tokens that it adds before and after a text

    async def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without those that the tokenizer adds to any. Raises ServerError."""
        if self._around is None:
            one, other = [await self._tokenize(text) for text in _UNLIKE]
            self._around = _in_common(one, other), _in_common(one[::-1], other[::-1])
        before, after = self._around
        tokens = await self._tokenize(text)
        return tokens[before : len(tokens) - after]

    async def _tokenize(self, text: str) -> list[int]:
        answer = await self._ask("/tokenize", {"model": self._model, "prompt": text})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
            raise ServerError("/tokenize answers without a list of tokens: name the model's tokenizer (--tokenizer).")
        return tokens

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Raises ServerError without such a route."""
        answer = await self._ask("/detokenize", {"model": self._model, "tokens": list(ids)})
        text = answer.get("prompt") if isinstance(answer, dict) else None
        if not isinstance(text, str):
            raise ServerError("/detokenize answers without a prompt: name the model's tokenizer (--tokenizer).")
        return text

    async def _ask(self, path: str, body: dict[str, Any]) -> object:
        try:
            return await ask(self._session, self._target, path, body)
        except ServerError as error:
            raise ServerError(
                f"{error} Prompts of exact lengths need a tokenizer: name the model's (--tokenizer)."
            ) from error


def _in_common(one: list[int], other: list[int]) -> int:
    """How many tokens two lists have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
