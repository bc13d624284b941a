"""A token budget that adapts: steps as large as a target for the time between two tokens allows."""

from __future__ import annotations

SHARE_OF_TARGET = 0.95  # where a cut aims: a little below the target, lest noise exceed it at once


class TokenBudget:
    """Additive increase, multiplicative decrease (Chiu and Jain 1989; TCP's rule) of the tokens of a step.

    A step that decodes makes every decoding sequence wait for all its tokens, so its seconds are their inter-token
    latency. When they exceed `target` seconds the budget is cut in proportion, at most by half; when a step used the
    whole budget and stayed below, it grows by `most` / 64 tokens. It stays within 1 and `most`. A step that decodes
    nothing delays nobody's next token: it may have `most` tokens and teaches nothing. Without a target it is `most`.

    A target that decodes alone exceed would leave no token for prompts until all who decode have ended. So `most` / 64
    tokens beside the decodes are always allowed: prompts go on, slowly, and latency is missed by no more than these.
    """

    def __init__(self, most: int, target: float | None) -> None:
        self.most, self.target = most, target
        self.tokens = most
        self._growth = max(1, most // 64)

    def limit(self, num_decoding: int) -> int:
        """Return the tokens that the next step may have, if `num_decoding` sequences decode in it."""
        return max(self.tokens, min(self.most, num_decoding + self._growth)) if num_decoding else self.most

    def observe(self, num_tokens: int, num_decoding: int, seconds: float) -> None:
        """Learn from a step: it had `num_tokens` tokens, `num_decoding` of them decodes, and took `seconds`."""
        if self.target is None or not num_decoding:
            return
        if seconds > self.target:
            share = max(0.5, SHARE_OF_TARGET * self.target / seconds)
            self.tokens = max(1, min(self.tokens, int(num_tokens * share)))
        elif num_tokens >= self.tokens:
            self.tokens = min(self.most, self.tokens + self._growth)
