"""What the user reads of a token: its text, and its log-probabilities with texts of their own."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from typing import Protocol

from vllm_teach.engine.detokenizer import OutputText
from vllm_teach.engine.failure import engine_error
from vllm_teach.engine.outputs import Logprob
from vllm_teach.engine.request import Request, Sequence, TopLogprobs
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.tokenizer_protocol import Decodes
from vllm_teach.errors import EngineError


class End(Protocol):
    """Ends a sequence, or corrects the reason of one that has ended."""

    def __call__(
        self,
        sequence: Sequence,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        error: EngineError | None = None,
    ) -> None:
        """End `sequence` and free what it holds."""


class OutputWriter:
    """Brings the texts of requests up to their tokens, and calls `end` for a sequence that its text ends."""

    def __init__(self, tokenizer: Decodes, end: End) -> None:
        self.tokenizer = tokenizer
        self._end = end

    def new_text(self, token_ids: TokenIds[int], params: SamplingParams) -> OutputText | None:
        """Return the text of a completion of the prompt `token_ids`, empty as yet; None if none is wanted.

        Raises EngineError when the tokenizer fails on the prompt.
        """
        if not params.detokenize:
            return None
        try:
            return OutputText(
                self.tokenizer,
                token_ids,
                stops=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        except Exception as error:
            raise engine_error("turning the prompt's end into text failed", error, "check the tokenizer") from error

    def write(self, request: Request) -> None:
        """Bring each sequence's text up to its tokens; a failure there becomes the error of that sequence alone."""
        for sequence in request.sequences:
            try:
                if sequence.index == 0:
                    self._write_prompt_logprobs(request)
                self._write_text(sequence)
            except Exception as error:  # noqa: BLE001 - becomes this request's typed error
                failure = engine_error(
                    "turning a token into text failed for this request", error, "check its tokenizer"
                )
                sequence.new_token = sequence.output_text = None
                # It may have ended in this very step, by length or stop token; it failed all the same.
                self._end(sequence, "error", error=failure)

    def _write_text(self, sequence: Sequence) -> None:
        """Add the new token's log-probabilities and text to `sequence`, and at its end what was held back.

        Changes nothing before the tokenizer's last call for a token, so that it can be done again after an interrupt.
        """
        token, text, params = sequence.new_token, sequence.output_text, sequence.params
        if token is not None:
            logprobs = [] if params.logprobs is None else [self._logprobs(params, token.top_logprobs)]
            stop = None
            ended_by_token = sequence.finish_reason == "stop"
            # The token that ended it is no part of its text, unless asked for.
            if text is not None and (not ended_by_token or params.include_stop_str_in_output):
                # vLLM's rule: a stop string counts from the token behind the first min_tokens.
                enough = len(sequence.output_token_ids) > params.min_tokens
                stop = text.append(token.token_id, may_stop=enough and not ended_by_token)
            sequence.new_token = None
            sequence.logprobs += logprobs
            sequence.cumulative_logprob += token.logprob or 0.0
            if stop is not None:
                # The text ended it, even where this was also the last token it was allowed.
                self._end(sequence, "stop", stop_reason=stop)
        if text is not None:
            sequence.text = text.finish() if sequence.finished else text.visible
            sequence.output_text = None if sequence.finished else text

    def _write_prompt_logprobs(self, request: Request) -> None:
        """Bring the prompt's log-probabilities up to what is computed. Can be done again after an interrupt."""
        if request.params.prompt_logprobs is not None:
            for top in request.sequences[0].prompt_logprobs[len(request.prompt_logprobs) :]:
                request.prompt_logprobs.append(None if top is None else self._logprobs(request.params, top))

    def _logprobs(self, params: SamplingParams, top: TopLogprobs) -> dict[int, Logprob]:
        decode = self.tokenizer.decode if params.detokenize else None
        return {
            token_id: Logprob(logprob, rank, decode([token_id], skip_special_tokens=False) if decode else None)
            for token_id, (logprob, rank) in top.items()
        }
