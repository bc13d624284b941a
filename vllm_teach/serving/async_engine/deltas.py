"""An answer taken apart into what each step brought, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from vllm_teach.engine.outputs import CompletionOutput, RequestOutput
from vllm_teach.engine.prompts import TokensPrompt
from vllm_teach.serving.async_engine.messages import CompletionDelta, RequestDelta


class Progress:
    """How much of one request's answer, of `n` completions, was sent. With `whole` it is sent at the end, at once."""

    def __init__(self, n: int, *, whole: bool = False) -> None:
        self.began, self._whole = False, whole
        self._num_tokens = [0] * n
        self._num_characters = [0] * n
        self._ended = [False] * n
        self._prompt_logprobs_sent = False

    def advance(self, output: RequestOutput) -> RequestDelta | None:
        """Return what is new in `output` and count it as sent; None if nothing is."""
        if self.began and self._whole and not output.finished:
            return None
        completions = tuple(delta for delta in map(self._advance, output.outputs) if delta is not None)
        if self.began and not completions and not output.finished:
            return None
        self.began = True
        prompt_logprobs = None
        if any(self._num_tokens) and output.prompt_logprobs is not None and not self._prompt_logprobs_sent:
            prompt_logprobs = tuple(output.prompt_logprobs)
            self._prompt_logprobs_sent = True
        return RequestDelta(
            output.request_id,
            completions,
            finished=output.finished,
            error=output.error,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            metrics=output.metrics if output.finished else None,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_generation_tokens=sum(self._num_tokens),
        )

    def _advance(self, completion: CompletionOutput) -> CompletionDelta | None:
        index, tokens, characters = completion.index, len(completion.token_ids), len(completion.text)
        ends = completion.finished() and not self._ended[index]
        first, start = self._num_tokens[index], self._num_characters[index]
        if tokens == first and characters == start and not ends:
            return None
        self._num_tokens[index], self._num_characters[index] = tokens, characters
        self._ended[index] = completion.finished()
        return CompletionDelta(
            index,
            completion.text[start:],
            tuple(completion.token_ids[first:]),
            None if completion.logprobs is None else tuple(completion.logprobs[first:]),
            completion.finish_reason,
            completion.stop_reason,
        )


def merge(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """Return one delta that says what `deltas`, one or more of the same request in their order, say."""
    if len(deltas) == 1:
        return deltas[0]
    pieces: dict[int, list[CompletionDelta]] = {}
    for delta in deltas:
        for new in delta.completions:
            pieces.setdefault(new.index, []).append(new)
    last = deltas[-1]
    return RequestDelta(
        last.request_id,
        tuple(_join(pieces[index]) for index in sorted(pieces)),
        finished=last.finished,
        error=last.error,
        prompt_logprobs=next((each.prompt_logprobs for each in deltas if each.prompt_logprobs is not None), None),
        num_cached_tokens=last.num_cached_tokens,
        metrics=last.metrics,
        num_prompt_tokens=last.num_prompt_tokens,
        num_generation_tokens=last.num_generation_tokens,
    )


def _join(pieces: Sequence[CompletionDelta]) -> CompletionDelta:
    """Join what is new of one completion, all at once: a reader that stood still for a long answer has thousands."""
    last = pieces[-1]
    return CompletionDelta(
        last.index,
        "".join(piece.text for piece in pieces),
        tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        None if last.logprobs is None else tuple(chain.from_iterable(piece.logprobs or () for piece in pieces)),
        last.finish_reason,
        last.stop_reason,
    )


class Answer:
    """A request's output, put together from its deltas: what the engine itself would have returned."""

    def __init__(self, request_id: str, prompt: TokensPrompt, n: int, logprobs: bool) -> None:
        self.output = RequestOutput(
            request_id,
            prompt["prompt"],
            prompt["prompt_token_ids"],
            [CompletionOutput(index, "", [], logprobs=[] if logprobs else None) for index in range(n)],
        )
        self._pieces: list[list[str]] = [[] for _ in range(n)]
        if logprobs:
            for completion in self.output.outputs:
                completion.cumulative_logprob = 0.0

    def add(self, delta: RequestDelta) -> None:
        """Take what is new."""
        output = self.output
        output.finished, output.metrics, output.num_cached_tokens = (
            delta.finished,
            delta.metrics,
            delta.num_cached_tokens,
        )
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = list(delta.prompt_logprobs)
        for new in delta.completions:
            self._pieces[new.index].append(new.text)
            completion = output.outputs[new.index]
            completion.token_ids += new.token_ids
            completion.finish_reason, completion.stop_reason = new.finish_reason, new.stop_reason
            if completion.logprobs is not None and new.logprobs is not None:
                completion.logprobs += new.logprobs
                for token_id, logprobs in zip(new.token_ids, new.logprobs, strict=True):
                    completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + logprobs[token_id].logprob
        if delta.finished:
            for completion, pieces in zip(output.outputs, self._pieces, strict=True):
                completion.text = "".join(pieces)
