"""Deltas put together again are the outputs they were made from."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from vllm_teach.serving.async_engine import deltas as deltas_module
from vllm_teach.serving.async_engine.deltas import Answer, Progress, merge
from vllm_teach.serving.async_engine.messages import CompletionDelta, RequestDelta

PROMPT = {"prompt_token_ids": [5, 6, 7], "prompt": "p", "cache_salt": None}


def snapshots(texts: list[list[str]], logprobs: bool, order: list[int]) -> list[RequestOutput]:
    """Return the output after each step; step k brings the next token, with its text, of completion order[k]."""
    completions = [CompletionOutput(index, "", [], logprobs=[] if logprobs else None) for index in range(len(texts))]
    found = []
    for index in order:
        completion = completions[index]
        step = len(completion.token_ids)
        completion.token_ids.append(100 * index + step)
        completion.text += texts[index][step]
        if logprobs:
            entry = Logprob(-0.1 * (step + 1), 1)
            completion.logprobs.append({100 * index + step: entry, 9999: Logprob(-5.0, 2)})
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entry.logprob
        if step + 1 == len(texts[index]):
            completion.finish_reason, completion.stop_reason = ("stop", "x") if index else ("length", None)
        copies = [
            CompletionOutput(
                each.index,
                each.text,
                list(each.token_ids),
                each.cumulative_logprob,
                None if each.logprobs is None else list(each.logprobs),
                each.finish_reason,
                each.stop_reason,
            )
            for each in completions
        ]
        finished = all(each.finished() for each in copies)
        prompt_logprobs = [None, {6: Logprob(-1.0, 1)}, {7: Logprob(-2.0, 3)}] if logprobs else None
        metrics = RequestMetrics(1.0, 2.0, [3.0], 4.0 if finished else None)
        found.append(RequestOutput("r", "p", [5, 6, 7], copies, finished, metrics, None, prompt_logprobs, 2))
    return found


@st.composite
def answers(draw):
    texts = draw(st.lists(st.lists(st.text(max_size=3), min_size=1, max_size=6), min_size=1, max_size=3))
    order = draw(st.permutations([index for index, pieces in enumerate(texts) for _ in pieces]))
    return snapshots(texts, draw(st.booleans()), order)


@given(answers(), st.data())
def test_deltas_join_to_the_output_whatever_is_merged_on_the_way(outputs, data):
    expected = outputs[-1]
    progress = Progress(len(expected.outputs))
    deltas = [progress.advance(output) for output in outputs]
    assert None not in deltas
    assert [delta.finished for delta in deltas] == [output.finished for output in outputs]
    answer = Answer("r", PROMPT, len(expected.outputs), expected.prompt_logprobs is not None)
    while deltas:
        taken = data.draw(st.integers(1, len(deltas)))
        answer.add(merge(deltas[:taken]))
        deltas = deltas[taken:]
    assert answer.output == expected


@given(answers())
def test_a_whole_answer_is_sent_when_it_begins_and_when_it_ends(outputs):
    expected = outputs[-1]
    progress = Progress(len(expected.outputs), whole=True)
    deltas = [delta for output in outputs if (delta := progress.advance(output)) is not None]
    assert [delta.finished for delta in deltas] == [False, True][-min(2, len(outputs)) :]
    answer = Answer("r", PROMPT, len(expected.outputs), expected.prompt_logprobs is not None)
    for delta in deltas:
        answer.add(delta)
    assert answer.output == expected


def test_a_step_without_news_says_once_that_the_prompt_is_being_computed():
    progress = Progress(1)
    output = RequestOutput("r", None, [1, 2], [CompletionOutput(0, "", [])], num_cached_tokens=1)
    first = progress.advance(output)
    assert (first.completions, first.finished, first.num_prompt_tokens, first.num_cached_tokens) == ((), False, 2, 1)
    assert progress.advance(output) is None


def test_each_delta_counts_the_tokens_of_all_completions_so_far():
    progress = Progress(2)
    counts = [
        progress.advance(output).num_generation_tokens for output in snapshots([["a", "b"], ["c"]], False, [0, 1, 0])
    ]
    assert counts == [1, 2, 3]


def test_thousands_of_deltas_are_joined_at_once(monkeypatch):
    """Joined one by one, each would be copied with every later one, while the event loop stands still."""
    made = []

    def count(*fields):
        made.append(fields)
        return CompletionDelta(*fields)

    monkeypatch.setattr(deltas_module, "CompletionDelta", count)
    pieces = [RequestDelta("r", (CompletionDelta(index % 2, "x", (index,)),)) for index in range(5000)]
    first, second = merge(pieces).completions
    assert len(made) == 2
    assert (first.text, second.text) == ("x" * 2500, "x" * 2500)
    assert (first.token_ids, second.token_ids) == (tuple(range(0, 5000, 2)), tuple(range(1, 5000, 2)))


def test_prompt_logprobs_come_once_and_not_before_they_are_whole():
    progress = Progress(1)
    waiting = RequestOutput("r", None, [5, 6], [CompletionOutput(0, "", [])], prompt_logprobs=[None])
    assert progress.advance(waiting).prompt_logprobs is None
    first, second = snapshots([["a", "b"]], True, [0, 0])
    assert len(progress.advance(first).prompt_logprobs) == 3
    assert progress.advance(second).prompt_logprobs is None
