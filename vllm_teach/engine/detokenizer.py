"""Tokens to text, one at a time: never half a character, never a piece of a stop string too early."""

from __future__ import annotations

from vllm_teach.engine.text import Decodes

# How many tokens of the prompt the first output token is decoded with: some tokenizers decide about a space by them.
_LEAD = 5
_BROKEN = "\ufffd"


class IncrementalDetokenizer:
    """Turns a growing list of tokens into a growing text, whose pieces join to the text of the whole.

    A token can hold a part of a UTF-8 character, and its text can depend on its neighbours. So each step decodes a
    short window of tokens and returns what is new, up to an unfinished character at the window's end, which shows as
    U+FFFD. The window moves on when it ends in a whole character. If the prompt ends inside a character, the output
    begins with that whole character.
    """

    def __init__(self, tokenizer: Decodes, prompt_token_ids: list[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-_LEAD:])
        self._lead = len(self._window)  # tokens of the window whose text is out already
        lead = self._decode()
        self._shown = len(_whole(lead))  # characters of the window's text that are out already
        self._prompt_unfinished = lead.endswith(_BROKEN)

    def append(self, token_id: int) -> str:
        """Take one more token and return the text that became certain, possibly none."""
        self._window.append(token_id)
        text = self._decode()
        if self._prompt_unfinished and len(_whole(text)) > self._shown:
            # The prompt's half character became whole and is ours, or never will and was the prompt's.
            self._shown += text[self._shown] == _BROKEN
            self._prompt_unfinished = False
        new = _whole(text)[self._shown :]
        self._shown = max(self._shown, len(_whole(text)))
        if not text.endswith(_BROKEN):
            self._window = self._window[self._lead :]
            self._lead, self._shown = len(self._window), len(self._decode())
        return new

    def finish(self) -> str:
        """Return what was held back, now that no token follows: an unfinished character shows as U+FFFD."""
        text = self._decode()
        new, self._shown = text[self._shown :], len(text)
        return new if self._lead < len(self._window) else ""

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


def _whole(text: str) -> str:
    """Return `text` without an unfinished character at its end (decoders show one as a single U+FFFD)."""
    return text.removesuffix(_BROKEN)


def find_stop(text: str, stops: list[str], start: int) -> tuple[int, str] | None:
    """Return (position, stop string) of the first stop string in `text` that ends behind `start`, or None.

    Of two that begin at the same place, the one listed first counts.
    """
    found = []
    for order, stop in enumerate(stops):
        position = text.find(stop, max(0, start - len(stop) + 1))
        if position >= 0:
            found.append((position, order, stop))
    if not found:
        return None
    position, _, stop = min(found)
    return position, stop


def held_back(text: str, stops: list[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a stop string."""
    longest = min(max((len(stop) for stop in stops), default=0) - 1, len(text))
    for length in range(longest, 0, -1):
        tail = text[len(text) - length :]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0


class OutputText:
    """The text of one completion: detokenized step by step and cut at the first stop string.

    `visible` is what may be shown: each later value begins with it.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        prompt_token_ids: list[int],
        *,
        stops: list[str],
        include_stop: bool,
        skip_special_tokens: bool,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stops, self._include_stop = stops, include_stop
        self._text = ""
        self.visible = ""

    def append(self, token_id: int, *, may_stop: bool) -> str | None:
        """Take one token and return the stop string that its text completes, if any; then the text is cut there.

        With `may_stop` False (before min_tokens), stop strings that end in this token's text are overlooked.
        """
        start = len(self._text)
        self._text += self._detokenizer.append(token_id)
        found = find_stop(self._text, self._stops, start) if may_stop else None
        if found is not None:
            position, stop = found
            self._text = self._text[: position + (len(stop) if self._include_stop else 0)]
            self.visible = self._text
            return stop
        held = 0 if self._include_stop else held_back(self._text, self._stops)
        # What is out is out: a stop string that min_tokens made us overlook may not be held back afterwards.
        self.visible = self._text[: max(len(self._text) - held, len(self.visible))]
        return None

    def finish(self) -> str:
        """Return the final text, once no token follows; not to be called when a stop string ended it."""
        self._text += self._detokenizer.finish()
        self.visible = self._text
        return self.visible
