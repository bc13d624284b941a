"""Log-probabilities in the two forms that OpenAI's answers have."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_teach.engine.outputs import Logprob
from vllm_teach.serving.http.openai_responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

# JSON has no -inf; OpenAI and vLLM write this instead.
_LEAST = -9999.0
_BROKEN = "\ufffd"


class CompletionLogprobsWriter:
    """Writes the tokens of one completion, as they come, in the form of `/v1/completions`."""

    def __init__(self) -> None:
        self._offset = 0

    def write(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, Logprob] | None],
        texts: Sequence[str] = (),
    ) -> CompletionLogprobs:
        """Return the form of some more tokens. `texts` are the tokens', for those that nothing predicts.

        Where two tokens have the same text, the likelier one stands in `top_logprobs`.
        """
        written = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for position, (token_id, choices) in enumerate(zip(token_ids, logprobs, strict=True)):
            if choices is None:
                text = texts[position]
                written.token_logprobs.append(None)
                written.top_logprobs.append(None)
            else:
                text = choices[token_id].decoded_token or ""
                written.token_logprobs.append(_finite(choices[token_id].logprob))
                likeliest = sorted(choices.values(), key=lambda choice: -choice.rank)
                written.top_logprobs.append(
                    {choice.decoded_token or "": _finite(choice.logprob) for choice in likeliest}
                )
            written.tokens.append(text)
            written.text_offset.append(self._offset)
            self._offset += len(text)
        return written


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int) -> ChatLogprobs:
    """Return the form of `/v1/chat/completions`: each token with the `top` most likely ones in its place."""
    content = []
    for token_id, choices in zip(token_ids, logprobs, strict=True):
        ranked = sorted((choice for choice in choices.values() if choice.rank <= top), key=lambda choice: choice.rank)
        chosen = _top(choices[token_id])
        content.append(
            TokenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[_top(choice) for choice in ranked[:top]],  # of equal ones each has the same rank
            )
        )
    return ChatLogprobs(content=content, refusal=None)


def _top(choice: Logprob) -> TopLogprob:
    text = choice.decoded_token or ""
    # What a part of a character decodes to is not what its bytes are.
    return TopLogprob(
        token=text, logprob=_finite(choice.logprob), bytes=None if _BROKEN in text else list(text.encode())
    )


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
