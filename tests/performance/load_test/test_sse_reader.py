"""Server-sent events, however the network cuts them; the oracle is the official client's decoder."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from vllm_teach.performance.load_test import sse_reader
from vllm_teach.performance.load_test.sse_reader import EventTooLongError, SSEReader

line = st.one_of(
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8).map("data: {}".format),
    st.sampled_from(["", "", ":comment", "data", "data:", "data:  two", "event: x", "id: 1", "retry: 5", "what: x"]),
)
stream = st.lists(st.tuples(line, st.sampled_from(["\n", "\r\n", "\r"]))).map(
    lambda lines: "".join(text + end for text, end in lines).encode()
)


def read(data: bytes, cuts: list[int]) -> list[str]:
    reader, places = SSEReader(), [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [event for start, end in pairwise(places) for event in reader.feed(data[start:end])]


@given(stream, st.lists(st.integers(0, 500), max_size=8))
def test_any_cut_of_any_stream_gives_the_events_of_the_official_client(data: bytes, cuts: list[int]) -> None:
    # It dispatches an event without a data line, too, which the specification does not.
    expected = [event.data for event in SSEDecoder().iter_bytes(iter([data]))]
    assert [event for event in read(data, cuts) if event] == [event for event in expected if event]


@given(st.lists(st.integers(0, 200), max_size=40))
def test_several_events_of_one_read_and_one_event_of_several(cuts: list[int]) -> None:
    data = '\ufeffdata: {"a": "é東"}\n\n: ping\n\ndata: first\r\ndata: second\r\n\r\ndata: [DONE]\n\n'.encode()
    assert read(data, cuts) == ['{"a": "é東"}', "first\nsecond", "[DONE]"]


def test_one_space_belongs_to_the_field_and_all_others_to_the_text() -> None:
    assert read(b"data:  two \n\ndata:none\n\ndata\n\n", []) == [" two ", "none", ""]


def test_what_is_not_ended_is_no_event() -> None:
    assert SSEReader().feed(b"data: half") == SSEReader().feed(b"data: half\n") == []


def test_an_event_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_reader, "LONGEST_EVENT", 1000)
    for piece in (b"x" * 100, b"data: " + b"x" * 93 + b"\n", b"data\n" * 95):
        reader = SSEReader()
        for _ in range(10):
            reader.feed(piece)
        with pytest.raises(EventTooLongError, match="more than 1000 bytes"):
            reader.feed(piece)
