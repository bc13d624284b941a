from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_teach.engine.detokenizer import IncrementalDetokenizer, OutputText, find_stop, held_back
from vllm_teach.models.tokenizer import load_tokenizer

EMOJI = "👩‍🚀 naïve 日本語 🐈"


class Bytes:
    """A byte is a token: every character beyond ASCII is split."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """Sentencepiece's habit: a word's token brings its own space, which is dropped at the start of a text."""

    words = ("▁hello", "▁world", "ly", "▁", "!")

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")


class Pieces:
    """Byte-level BPE: a token is any run of bytes, whether or not it begins and ends with a character."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def stream(tokenizer, prompt, output):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.append(token) for token in output), detokenizer.finish()]


@settings(deadline=None)
@given(st.text())
@example(EMOJI)
def test_pieces_join_to_the_text_and_never_split_a_character(text):
    pieces = stream(Bytes(), list(b"Prompt: "), text.encode())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=40))
@example(b"\xf0\x9f\x90")
@example(b"\xff\xfe\xf0A\xe2\x82")
@example("\ufffd\ufffd".encode())
def test_broken_bytes_join_to_what_the_whole_decodes_to(data):
    assert "".join(stream(Bytes(), list(b"ok"), data)) == data.decode("utf-8", errors="replace")


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([*"aé日🐈", b"\xf0", b"\x9f", b"\x90", b"\xe2", b"\xff", b"\xed\xa0"])), st.randoms())
def test_tokens_of_several_bytes_join_to_the_text_whatever_the_bytes(parts, random):
    data = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    pieces, rest = [], data
    while rest:
        size = random.choice([1, 1, 2, 3, 5])
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    assert "".join(stream(Pieces(pieces), [], range(len(pieces)))) == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("data", [b"\xff" * 2000, b"\xf0\x9f\x90" * 667, b"\xc3" * 2000])
def test_bytes_that_are_no_text_cost_no_more_the_longer_they_get(data):
    counted = []

    class Counting(Bytes):
        def decode(self, ids, skip_special_tokens=True):
            counted.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    pieces = stream(Counting(), [65], data)
    assert "".join(pieces) == data.decode("utf-8", errors="replace")
    assert sum(counted) < 60 * len(data)  # token positions decoded
    # It does not wait for the end either.
    assert sum(map(len, pieces[:1000])) > 300


def test_a_tokenizer_that_raises_changes_nothing():
    class Sometimes(Bytes):
        calls = 0

        def decode(self, ids, skip_special_tokens=True):
            Sometimes.calls += 1
            if Sometimes.calls % 3 == 0:
                raise KeyboardInterrupt
            return super().decode(ids, skip_special_tokens)

    def persist(action):
        while True:
            try:
                return action()
            except KeyboardInterrupt:
                continue

    text = OutputText(Bytes(), [65], stops=["STOP"], include_stop=False, skip_special_tokens=True)
    text._detokenizer._tokenizer = Sometimes()
    for token in "a🐈é日 end".encode():
        persist(lambda token=token: text.append(token, may_stop=True))
    assert persist(text.finish) == "a🐈é日 end"
    assert persist(text.finish) == "a🐈é日 end"


def test_text_comes_out_as_soon_as_a_character_is_whole():
    assert stream(Bytes(), [], "aé🐈b".encode()) == ["a", "", "é", "", "", "", "🐈", "b", ""]


def test_a_cut_off_character_shows_at_the_end_only():
    assert stream(Bytes(), [65], "🐈".encode()[:3]) == ["", "", "", "\ufffd"]


def test_a_prompt_that_ends_inside_a_character():
    cat = "🐈".encode()
    assert "".join(stream(Bytes(), [65, *cat[:2]], [*cat[2:], 66])) == "🐈B"
    assert "".join(stream(Bytes(), [65, *cat[:2]], [66, 67])) == "BC"  # never completed: the half was the prompt's
    assert "".join(stream(Bytes(), [65, *cat[:2]], [*cat[2:3]])) == "\ufffd"
    assert "".join(stream(Bytes(), [65, *cat[:2]], [])) == ""


def test_spaces_depend_on_what_stands_before():
    assert stream(Words(), [0], [1, 2, 0, 4]) == [" world", "ly", " hello", "!", ""]
    assert "".join(stream(Words(), [], [1, 2, 0])) == "worldly hello"


@pytest.mark.parametrize(
    ("text", "stops", "start", "found"),
    [
        ("abcd", ["bc"], 0, (1, "bc")),
        ("abcd", ["bc"], 2, (1, "bc")),  # ends behind `start`
        ("abcd", ["bc"], 3, None),
        ("abcd", ["cd", "bc"], 0, (1, "bc")),
        ("abcd", ["bcd", "bc"], 0, (1, "bcd")),
        ("abcd", ["x"], 0, None),
        ("abcd", [], 0, None),
    ],
)
def test_find_stop(text, stops, start, found):
    assert find_stop(text, stops, start) == found


@pytest.mark.parametrize(
    ("text", "stops", "count"),
    [
        ("hello\n", ["\n\n"], 1),
        ("hello", ["\n\n"], 0),
        ("STO", ["STOP", "O!"], 3),
        ("xO", ["STOP", "O!"], 1),
        ("", ["ab"], 0),
    ],
)
def test_held_back(text, stops, count):
    assert held_back(text, stops) == count


def drive(output, stops, include=False, min_tokens=0):
    """Return (shown after each token, final text, stop string), the engine's rule for min_tokens included."""
    text = OutputText(Bytes(), [65], stops=stops, include_stop=include, skip_special_tokens=True)
    shown = []
    for count, token in enumerate(output, start=1):
        stop = text.append(token, may_stop=count > min_tokens)
        shown.append(text.visible)
        if stop is not None:
            return shown, text.visible, stop
    return [*shown, text.finish()], text.visible, None


def test_a_stop_string_across_tokens_is_never_shown():
    shown, final, stop = drive(b"one STOP two", ["STOP"])
    assert (final, stop) == ("one ", "STOP")
    assert shown[-4:] == ["one ", "one ", "one ", "one "]


def test_a_false_alarm_is_shown_later():
    shown, final, _ = drive(b"STIR", ["STOP"])
    assert shown == ["", "", "STI", "STIR", "STIR"]
    assert drive(b"ST", ["STOP"])[1] == "ST"
    assert final == "STIR"


def test_what_stands_behind_a_stop_string_never_comes_out():
    pieces = [b"one ", b"STOP tw", b"one STOP \xf0"]
    for ids, final in (([0, 1], "one "), ([2], "one ")):
        text = OutputText(Pieces(pieces), [], stops=["STOP"], include_stop=False, skip_special_tokens=True)
        assert [text.append(token, may_stop=True) for token in ids][-1] == "STOP"
        assert text.finish() == text.visible == final


def test_stop_string_included_on_request():
    assert drive(b"one STOP two", ["STOP"], include=True)[1:] == ("one STOP", "STOP")


def test_a_stop_string_counts_from_the_token_behind_min_tokens():
    assert drive(b"a.b.c.", ["."], min_tokens=3)[1:] == ("a.b", ".")
    # One that the last of the first min_tokens tokens completes is overlooked, as in vLLM.
    assert drive(b"ab!!", ["b!!"], min_tokens=4)[1:] == ("ab!!", None)
    # One that began among them and ends behind them counts.
    assert drive(b"ab!!", ["b!!"], min_tokens=3)[1:] == ("a", "b!!")


@settings(deadline=None, max_examples=300)
@given(
    st.text(alphabet="ab🐈é.", max_size=20),
    st.lists(st.text(alphabet="ab🐈é.", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 8),
)
def test_what_was_shown_stays_and_the_end_is_as_defined(text, stops, include, min_tokens):
    shown, final, stop = drive(text.encode(), stops, include, min_tokens)
    for earlier, later in pairwise(shown):
        assert later.startswith(earlier)
    assert text.startswith(final)
    if min_tokens == 0:
        # The first moment at which the text holds a stop string ends it, at the leftmost one.
        ends = [end for end in range(len(text) + 1) if any(each in text[:end] for each in stops)]
        assert (stop is not None) == bool(ends)
        if ends:
            position = min(text[: ends[0]].find(each) for each in stops if each in text[: ends[0]])
            assert final == text[: position + (len(stop) if include else 0)]
        else:
            assert final == text


@pytest.mark.real_model
def test_the_real_tokenizer(smollm2_path):
    """Byte-level BPE: most emoji and all rare characters are several tokens."""
    tokenizer = load_tokenizer(smollm2_path)
    for text in (EMOJI, "  two spaces\n\n\ttab", "ﷺ 𝔘𝔫𝔦 𓂀 e\u0301", "price: 12,345.67 €", "<|im_start|>x<|im_end|>y"):
        ids = tokenizer.encode(text)
        for prompt in ([], tokenizer.encode("A prompt. "), tokenizer.encode("🐈")[:1]):
            pieces = stream(tokenizer, prompt, ids)
            assert "".join(pieces) == tokenizer.decode(ids)
            assert not any("\ufffd" in piece for piece in pieces)
    ids = tokenizer.encode("🐈‍⬛")
    assert len(ids) > 3
    assert "".join(stream(tokenizer, ids[:1], ids[1:])) == "🐈‍⬛"  # the prompt ended inside the character
