"""Tokens to text, one at a time: never half a character, never a piece of a stop string too early."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_teach.engine.tokenizer_protocol import Decodes

_BROKEN = "\ufffd"
# How many tokens of the prompt the first output token is decoded with: some tokenizers decide about a space by them.
_LEAD = 5
# A UTF-8 character has at most 4 bytes and a token at least one, so only 3 tokens can wait for the rest of theirs.
_UNFINISHED = 3
# The longest window while its end is no text: cut off inside a character, byte fallback may break all of the rest.
_LONGEST = 16


class IncrementalDetokenizer:
    """Turns a growing list of tokens into a growing text, whose pieces join to the text of the whole.

    A token can hold a part of a UTF-8 character, and its text can depend on its neighbours. So each step decodes a
    short window of tokens and returns what is new, up to an unfinished character at the window's end. That shows as
    U+FFFD: byte-level tokenizers give one for the character, those with byte fallback (Llama 2, Mistral) one for each
    of its bytes, and all of them are held back. The window moves on when it ends in a whole character, or when its end
    is too long to become one. If the prompt ends inside a character, the output begins with that whole character.

    Bytes that are no text may come out as another number of U+FFFD than in the text of the whole.
    """

    def __init__(self, tokenizer: Decodes, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window, self._half = self._last_of(list(prompt_token_ids))
        # So many tokens of the window make a text of their own; behind them come the `_half` tokens with which the
        # prompt began a character, as long as it may still become one.
        self._lead = len(self._window) - self._half
        # Characters of the window's text that are out already: at first, the prompt's whole ones.
        lead, text = self._decode(self._window[: self._lead]), self._decode(self._window)
        self._shown = max(len(lead), len(_whole(text)))

    def append(self, token_id: int) -> str:
        """Take one more token and return the text that became certain, possibly none.

        What the tokenizer raises comes through, and then nothing has changed.
        """
        window, lead, half, shown = [*self._window, token_id], self._lead, self._half, self._shown
        text = self._decode(window)
        certain = len(_whole(text))
        too_long = certain < len(text) and len(window) - lead > _UNFINISHED
        if too_long:
            certain = max(certain, len(self._decode(window[:-_UNFINISHED])))
        if half and (too_long or certain > shown):
            # The prompt's half character is whole now and belongs to the output, or it never will be.
            if certain <= shown or text[shown] == _BROKEN:
                shown = len(self._decode(window[: lead + half]))
            half = 0
        new = text[shown:certain]
        shown = max(shown, certain)
        if too_long:
            held = len(text) - shown
            window = window[-_LONGEST:]
            lead, shown = len(window) - _UNFINISHED, max(0, len(self._decode(window)) - held)
        elif certain == len(text) and (new or shown > certain):
            window = window[lead:]
            lead, shown = len(window), len(self._decode(window))
        elif certain == len(text) and len(window) - lead > _UNFINISHED:
            del window[lead]  # tokens without text, as skipped special ones: they must not lengthen the window
            shown = len(self._decode(window))
        self._window, self._lead, self._half, self._shown = window, lead, half, shown
        return new

    def finish(self) -> str:
        """Return what was held back, now that no token follows: an unfinished character shows as U+FFFD."""
        text = self._decode(self._window)
        new, self._shown = text[self._shown :], len(text)
        return new if len(self._window) > self._lead + self._half else ""

    def _last_of(self, prompt: list[int]) -> tuple[list[int], int]:
        """Return the prompt's last tokens, and how many at their end are the beginning of a character."""
        for half in range(_UNFINISHED + 1):
            # With byte fallback a window that begins inside a character can be broken as a whole: begin it earlier.
            for size in range(_LEAD, _LEAD + _UNFINISHED + 1):
                window = prompt[-size:]
                if half <= len(window) and not self._decode(window[: len(window) - half]).endswith(_BROKEN):
                    return window, half
        return prompt[-_LEAD:], 0  # bytes that are no text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _whole(text: str) -> str:
    """Return `text` without an unfinished character at its end."""
    return text.rstrip(_BROKEN)


def find_stop(text: str, stops: Sequence[str], start: int) -> tuple[int, str] | None:
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


def held_back(text: str, stops: Sequence[str]) -> int:
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
        prompt_token_ids: Sequence[int],
        *,
        stops: Sequence[str],
        include_stop: bool,
        skip_special_tokens: bool,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stops, self._include_stop = stops, include_stop
        self._text = ""
        self._cut = False
        self.visible = ""

    def append(self, token_id: int, *, may_stop: bool) -> str | None:
        """Take one token and return the stop string that its text completes, if any; then the text is cut there.

        With `may_stop` False (the first min_tokens tokens), stop strings that end in this token's text are overlooked.
        What the tokenizer raises comes through, and then nothing has changed.
        """
        start = len(self._text)
        self._text += self._detokenizer.append(token_id)
        found = find_stop(self._text, self._stops, start) if may_stop else None
        if found is not None:
            position, stop = found
            self._text = self._text[: position + (len(stop) if self._include_stop else 0)]
            self.visible, self._cut = self._text, True
            return stop
        held = 0 if self._include_stop else held_back(self._text, self._stops)
        # What is out is out: a stop string that min_tokens made us overlook may not be held back afterwards.
        self.visible = self._text[: max(len(self._text) - held, len(self.visible))]
        return None

    def finish(self) -> str:
        """Return the final text, once no token follows: all that was held back, unless a stop string ended it."""
        if not self._cut:
            self._text += self._detokenizer.finish()
            self.visible = self._text
        return self.visible
