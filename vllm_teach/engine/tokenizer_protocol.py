"""What the engine asks of a tokenizer, so that any object with these methods will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no whole character become U+FFFD, one or one for each byte."""
        ...


class EngineTokenizer(Decodes, Protocol):
    """Text to ids and back, a conversation to ids, and the ids that end a text."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with what the model wants around one (BOS, say) unless that is False."""
        ...

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids of a conversation, the assistant's turn opened."""
        ...
