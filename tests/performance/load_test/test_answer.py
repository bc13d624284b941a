"""One answer from its bytes: when text came, and who counted its tokens."""

import json

import pytest

from vllm_teach.performance.load_test.answer import Answer, BadAnswerError, error_class, parse


def event(text: str | None = None, **fields: object) -> bytes:
    """A completion's event, with a choice if it has a text or a finish_reason."""
    reason = fields.pop("finish_reason", None)
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": reason}]
    return f"data: {json.dumps({'choices': choices} | fields)}\n\n".encode()


def chat(**delta: object) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': None}]})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def fed(*reads: tuple[float, bytes]) -> Answer:
    answer = Answer(keep_text=True)
    for now, data in reads:
        answer.feed(data, now)
    return answer


def test_times_of_a_completion_with_usage_at_its_end() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 4}
    answer = fed(
        (1.0, event("a")),
        (1.5, event("b")),
        (1.75, event("c")),
        (2.75, event("", finish_reason="stop")),  # the token that ends it has no text
        (2.8, event(usage=usage)),
        (3.0, DONE),
    )
    assert (answer.first, answer.last, answer.end) == (1.0, 2.75, 3.0)
    assert list(answer.gaps) == [0.5, 0.25]
    assert (answer.events, answer.output_tokens, answer.prompt_tokens, answer.first_tokens) == (3, 4, 7, 1)
    assert (answer.text, answer.finish_reason) == ("abc", "stop")


def test_events_of_one_read_lie_0_apart_and_an_event_of_two_reads_counts_when_it_is_whole() -> None:
    a, b, c = event("a"), event("b"), event("c")
    answer = fed((1.0, a + b), (2.0, c[:20]), (3.0, c[20:] + DONE))
    assert list(answer.gaps) == [0.0, 2.0]
    assert (answer.first, answer.last) == (1.0, 3.0)


def test_a_role_and_empty_texts_are_no_first_token() -> None:
    answer = fed((1.0, chat(role="assistant", content="")), (2.0, chat()), (3.0, chat(content="Hi")), (4.0, DONE))
    assert (answer.first, answer.events, answer.text) == (3.0, 1, "Hi")


def test_reasoning_and_tool_calls_are_text_too() -> None:
    answer = fed((1.0, chat(reasoning_content="Hm")), (2.0, chat(tool_calls=[{"index": 0}])), (3.0, DONE))
    assert (answer.first, answer.last, answer.events) == (1.0, 2.0, 2)


def test_a_server_that_counts_as_it_streams_says_how_many_tokens_an_event_has() -> None:
    answer = fed(
        (1.0, event("abc", usage={"prompt_tokens": 5, "completion_tokens": 3})),
        (2.0, event("", usage={"prompt_tokens": 5, "completion_tokens": 4})),  # half a character
        (3.0, event("é", usage={"prompt_tokens": 5, "completion_tokens": 5})),
        (3.5, DONE),
    )
    assert list(answer.gaps) == [0.0, 0.0, 2.0, 0.0]
    assert (answer.first_tokens, answer.output_tokens, answer.events) == (3, 5, 2)


def test_token_ids_say_how_many_tokens_an_event_has() -> None:
    def with_ids(text: str, ids: list[int]) -> bytes:
        return f"data: {json.dumps({'choices': [{'text': text, 'token_ids': ids}]})}\n\n".encode()

    answer = fed((1.0, with_ids("ab", [1, 2])), (2.0, with_ids("", [3])), (4.0, with_ids("é", [4])), (5.0, DONE))
    assert list(answer.gaps) == [0.0, 3.0, 0.0]
    assert (answer.first_tokens, answer.events) == (2, 2)


def test_usage_in_the_last_event_with_text_does_not_make_all_tokens_its_own() -> None:
    answer = fed((1.0, event("a")), (2.0, event("b", usage={"completion_tokens": 2}, finish_reason="length")))
    assert list(answer.gaps) == [1.0]


def test_null_usage_is_none() -> None:
    answer = fed((1.0, event("a", usage=None)), (2.0, event("b", usage=None)), (3.0, DONE))
    assert (answer.output_tokens, list(answer.gaps)) == (None, [1.0])


def test_a_count_that_can_be_none_does_not_fill_the_memory() -> None:
    answer = fed((1.0, event("a", usage={"completion_tokens": 2**50})), (2.0, event("b")), (3.0, DONE))
    assert (answer.output_tokens, answer.events, list(answer.gaps)) == (None, 2, [1.0])


def test_a_proper_end_after_a_finish_reason_ends_an_answer_and_another_does_not() -> None:
    whole, half = fed((1.0, event("a", finish_reason="stop"))), fed((1.0, event("a")))
    for answer in (whole, half):
        answer.close(2.0)
    assert (whole.end, half.end) == (2.0, None)
    said = fed((1.0, event("a", finish_reason="stop")), (1.5, DONE))
    said.close(2.0)
    assert said.end == 1.5


def test_an_error_in_the_stream() -> None:
    body = {"error": {"message": "out of memory", "type": "server_error"}}
    with pytest.raises(BadAnswerError, match="error in the stream: server_error") as raised:
        fed((1.0, f"data: {json.dumps(body)}\n\n".encode()))
    assert raised.value.message == "out of memory"


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 3\n\n", b"data: " + b"[" * 200_000 + b"\n\n"])
def test_an_event_that_is_no_object(data: bytes) -> None:
    with pytest.raises(BadAnswerError, match="no JSON object"):
        fed((1.0, data))


def test_a_whole_answer() -> None:
    answer = Answer(keep_text=True)
    body = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    answer.take_whole(json.dumps(body).encode(), 5.0)
    assert (answer.end, answer.text, answer.output_tokens, answer.first) == (5.0, "Hi", 2, None)
    for bad in (b"", b"[]", b'{"choices": []}', b"<html>"):
        with pytest.raises(BadAnswerError):
            Answer().take_whole(bad, 0.0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"error": {"message": "m", "type": "invalid_request_error", "code": null}}', "invalid_request_error"),
        ('{"error": {"message": "m", "type": null, "code": 404}}', "404"),
        ('{"error": {"type": "x"}}', "no error object"),
        ('{"detail": []}', "no error object"),
        ("<html>", "no error object"),
        ('{"error": {"message": "m", "type": "\\u001b[2J\\n"}}', " [2J "),
    ],
)
def test_error_classes(body: str, expected: str) -> None:
    assert error_class(parse(body)) == expected
