"""Prompts and conversations to token ids, beside the event loop where that takes long."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_teach.engine.prompts import Prompt, TokensPrompt, read_prompt, render_chat
from vllm_teach.errors import PromptTooLongError, VllmTeachError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.http.beside_the_loop import beside_the_loop

# A text of more characters for each token of the context is looked at in part before it is tokenised as a whole.
_WORTH_A_LOOK = 32


async def read_prompts(
    prompts: Sequence[str | list[int]],
    engine: AsyncLLMEngine,
    *,
    cache_salt: str | None = None,
) -> list[TokensPrompt]:
    """Return the prompts as checked token ids. The error for one of several names it by its index.

    Those that are far too long for the model are refused before they are tokenised.
    """

    def read_all() -> list[TokensPrompt]:
        read = []
        for index, prompt in enumerate(prompts):
            key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            form: Prompt = {key: prompt} if cache_salt is None else {key: prompt, "cache_salt": cache_salt}
            try:
                refuse_what_never_fits(prompt, engine)
                read.append(read_prompt(form, engine.tokenizer, engine.ready.vocab_size))
            except VllmTeachError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt[{index}]: {error}") from error
        return read

    return await beside_the_loop(sum(map(len, prompts)), read_all)


async def read_chat(
    messages: Sequence[dict[str, str]],
    engine: AsyncLLMEngine,
    *,
    cache_salt: str | None = None,
    any_length: bool = False,
) -> TokensPrompt:
    """Return a conversation as token ids, by the model's chat template, the assistant's turn opened.

    Unless they may have `any_length`, messages that are far too long for the model are refused before that.
    """

    def read() -> TokensPrompt:
        for message in () if any_length else messages:
            refuse_what_never_fits(message["content"], engine)
        return render_chat(list(messages), engine.tokenizer)

    prompt = await beside_the_loop(sum(len(message["content"]) for message in messages), read)
    prompt["cache_salt"] = cache_salt
    return prompt


def refuse_what_never_fits(prompt: str | list[int], engine: AsyncLLMEngine) -> None:
    """Raise PromptTooLongError for a prompt that is far too long, at the cost of one that is not.

    To tokenise megabytes takes a second, to see that their beginning has twice as many tokens as fit does not. How the
    beginning's last word goes on changes a few tokens at most.
    """
    most = engine.ready.max_model_len
    count = len(prompt)
    if isinstance(prompt, str):
        part = prompt[: _WORTH_A_LOOK * most]
        if len(part) == len(prompt):
            return
        found = read_prompt(part, engine.tokenizer, engine.ready.vocab_size)
        count = len(found["prompt_token_ids"])
        if count < 2 * most + _WORTH_A_LOOK:
            return
    if count >= most:
        exactly = "" if isinstance(prompt, list) else "more than "
        raise PromptTooLongError(
            f"the prompt has {exactly}{count} tokens, but with at least one new token max_model_len={most} allows "
            f"{most - 1}: shorten it."
        )


def choose_max_tokens(
    asked: int | None, prompts: Sequence[TokensPrompt], engine: AsyncLLMEngine, most: int | None, default: int | None
) -> int | None:
    """Return how many tokens a completion may have: `asked`, or else `default` as far as there is room; at most `most`.

    OpenAI refuses a prompt that leaves no room for what was asked, and so does this: PromptTooLongError.
    """
    context = engine.ready.max_model_len
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
    if asked is not None and longest + asked > context:
        raise PromptTooLongError(
            f"the prompt has {longest} tokens and max_tokens={asked}, but together they may be {context}: shorten it "
            "or ask for fewer."
        )
    wanted = default if asked is None else asked
    limits = [limit for limit in (wanted, most) if limit is not None]
    return min(limits, default=None)
