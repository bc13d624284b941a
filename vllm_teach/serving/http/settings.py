"""What the HTTP app allows a client, and whom it lets in."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_teach.engine.field_checks import check_number, check_whole, refuse, take_plain_numbers

MOST_LOGPROBS = 20  # OpenAI's limit for chats; vLLM's default


@dataclass(frozen=True)
class AppSettings:
    """Settings of the app, each checked on construction: InvalidArgumentError names the bad one.

    `served_model_names` are what clients may call the model, the first what answers call it; empty means what the
    engine calls it. With an `api_key` a client has to send `Authorization: Bearer <key>`.

    A body of more than `max_body_bytes` is refused, and one that is not there `body_timeout` seconds after its headers.
    One HTTP request has at most `max_choices` completions, over all its prompts, each of `max_output_tokens` at most
    (None: what fits into the context), with the log-probabilities of at most `max_logprobs` tokens beside the chosen
    one. Who finds the queue full is told to come back after `retry_after` seconds.
    """

    served_model_names: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 1 << 20
    body_timeout: float = 30.0
    max_choices: int = 128
    max_output_tokens: int | None = None
    max_logprobs: int = MOST_LOGPROBS
    retry_after: float = 1.0

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        names = self.served_model_names
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            refuse("served_model_names", names, "use a tuple of names, none of them empty")
        object.__setattr__(self, "served_model_names", tuple(names))
        # Visible ASCII is what fits into a header; the message must not show what may be half a key.
        if self.api_key is not None and not _is_token(self.api_key):
            refuse("api_key", "***", "use letters, digits and signs of ASCII without spaces, or None for no key")
        check_whole("max_body_bytes", self.max_body_bytes, 1)
        check_number("body_timeout", self.body_timeout, 0, open_low=True, hint="use seconds above 0")
        check_whole("max_choices", self.max_choices, 1)
        if self.max_output_tokens is not None:
            check_whole("max_output_tokens", self.max_output_tokens, 1)
        check_whole("max_logprobs", self.max_logprobs, 0)
        check_number("retry_after", self.retry_after, 0, open_low=True, hint="use seconds above 0")


def _is_token(text: object) -> bool:
    return isinstance(text, str) and bool(text) and all("!" <= character <= "~" for character in text)
