"""The detokenizer with a tokenizer that spells rare characters byte by byte and shows each broken byte as U+FFFD."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from vllm_teach.engine.detokenizer import IncrementalDetokenizer


class ByteFallback:
    """The decoder of Llama 2, Mistral and TinyLlama: a character that has no token is one token for each byte."""

    def __init__(self):
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
        self.vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
        self.hf = Tokenizer(BPE(self.vocab, [], unk_token="<unk>", byte_fallback=True))
        self.hf.add_special_tokens(["</s>"])
        self.eos = self.hf.token_to_id("</s>")
        self.hf.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )

    def encode(self, text):
        return [token_id for character in text.replace(" ", "▁") for token_id in self.ids(character)]

    def ids(self, character):
        token_id = self.vocab.get(character)
        return [1 + byte for byte in character.encode()] if token_id is None else [token_id]

    def decode(self, ids, skip_special_tokens=True):
        return self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens)


FALLBACK = ByteFallback()
TEXT = st.text(alphabet="ab é日🐈\n", max_size=20)


def stream(tokenizer, prompt, output):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.append(token) for token in output), detokenizer.finish()]


@settings(deadline=None, max_examples=300)
@given(TEXT, st.integers(0, 60), st.dictionaries(st.integers(0, 20), st.integers(1, 4), max_size=3))
@example("a🐈b", 0, {})
@example("a🐈b", 3, {})
@example("日本🐈b", 8, {})
@example("日本日本🐈b", 12, {4: 2})  # as special tokens stand in between, the window grows
@example("日本🐈b", 6, {})  # the prompt's last five tokens begin inside a character
def test_byte_fallback_streams_what_the_whole_decodes_to(text, cut, skipped):
    """Anywhere cut into prompt and output, with skipped special tokens before some characters."""
    ids = [
        token_id
        for position, character in enumerate(text)
        for token_id in [FALLBACK.eos] * skipped.get(position, 0) + FALLBACK.encode(character)
    ]
    cut = min(cut, len(ids))
    prompt, output = ids[:cut], ids[cut:]
    whole = FALLBACK.decode(ids)
    # The prompt's own text: without an unfinished character at its end.
    before = next(t for back in range(4) if not (t := FALLBACK.decode(prompt[: cut - back])).endswith("\ufffd"))
    pieces = stream(FALLBACK, prompt, output)
    if output:
        assert "".join(pieces) == whole[len(before) :]
    assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(TEXT, st.lists(st.integers(128, 255), max_size=6)), max_size=12))
@example([[255] * 40, "a🐈b"])
def test_byte_fallback_with_broken_bytes_loses_no_other_text(parts):
    ids = []
    for part in parts:
        ids += FALLBACK.encode(f"a{part}b") if isinstance(part, str) else [1 + byte for byte in part]
    said = "".join(stream(FALLBACK, [FALLBACK.vocab["a"]], ids))
    whole = FALLBACK.decode([FALLBACK.vocab["a"], *ids])[1:]
    assert [c for c in said if c in "ab "] == [c for c in whole if c in "ab "]


def test_skipped_tokens_neither_lose_a_space_nor_lengthen_the_window():
    output = [FALLBACK.eos, FALLBACK.vocab["▁a"]]
    assert stream(FALLBACK, [FALLBACK.vocab["b"]], output) == ["", " a", ""]
    counted = []

    class Counting(ByteFallback):
        def decode(self, ids, skip_special_tokens=True):
            counted.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    tokenizer = Counting()
    pieces = stream(tokenizer, [FALLBACK.vocab["b"]], [*[FALLBACK.eos] * 500, FALLBACK.vocab["▁a"]])
    assert "".join(pieces) == " a"
    assert max(counted) < 20
