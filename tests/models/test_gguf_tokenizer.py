import pytest
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

from vllm_teach.errors import ModelLoadError
from vllm_teach.models import gguf_tokenizer
from vllm_teach.models.fields import Fields
from vllm_teach.models.gguf_tokenizer import build_tokenizer, special_tokens

MERGES = ["1 2", "12 3", "h e", "Ġ h", "Ġh e", "Ċ Ċ"]
TOKENS = ["<s>", "<user>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES), "xyz"]
TEXTS = ["1234 he", "he's  HE'S\n\n\nhe", "a1b22c333d4444", " x!?\r\n\ty ", "naïve café é 日本語", "<s>he<user>"]


def metadata(pre: str, **more: object) -> Fields:
    """The entries of a GGUF file; a `more` of None takes one away."""
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(TOKENS) - 2),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    return Fields({**values, **{f"tokenizer.ggml.{key}": value for key, value in more.items()}}, "m.gguf")


def pieces(pre: str, text: str) -> list[str]:
    tokenizer = build_tokenizer(metadata(pre))
    return [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in tokenizer.encode(text).ids]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_every_text_comes_back(pre):
    tokenizer = build_tokenizer(metadata(pre))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokeniser_says(pre, expected):
    assert pieces(pre, "1234") == expected


def test_groups_of_digits_and_newlines_tell_llama_from_gpt2():
    # Llama takes at most three digits into one word, so a merge cannot reach over the fourth.
    tokens = [*TOKENS, "12312"]
    wide = {"tokens": tokens, "merges": [*MERGES, "123 12"]}
    assert build_tokenizer(metadata("gpt-2", **wide)).encode("12312").tokens == ["12312"]
    assert build_tokenizer(metadata("llama-bpe", **wide)).encode("12312").tokens == ["123", "12"]
    # And it keeps newlines together, where GPT-2 leaves the last one to the next word.
    assert pieces("gpt-2", "x\n\ny") == ["x", "\n", "\n", "y"]
    assert pieces("llama-bpe", "x\n\ny") == ["x", "\n\n", "y"]


def test_qwen2_equals_transformers_own_qwen2_tokenizer():
    vocab = {token: index for index, token in enumerate(TOKENS)}
    merges = [tuple(pair.split(" ")) for pair in MERGES]
    oracle = Qwen2Tokenizer(vocab=vocab, merges=merges, unk_token=None, eos_token=None, pad_token=None)
    ours = build_tokenizer(metadata("qwen2"))
    # "e" and a combining accent: NFC makes one character of them.
    for text in [text for text in TEXTS if "<" not in text] + ["cafe\u0301"]:
        assert ours.encode(text).ids == oracle.encode(text), text


def test_llama_keeps_whole_words_that_no_merge_leads_to():
    assert pieces("llama-bpe", "xyz") == ["xyz"]
    assert pieces("gpt-2", "xyz") == ["x", "y", "z"]


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    for special_kind in (2, 3):  # unknown, control
        kinds = [special_kind, 4] + [1] * (len(TOKENS) - 2)
        tokenizer = build_tokenizer(metadata("smollm", token_type=kinds))
        ids = tokenizer.encode("<s>he<user>").ids
        assert ids == [0, TOKENS.index("he"), 1]
        assert tokenizer.decode(ids) == "he<user>"


@pytest.mark.parametrize(("more", "starts"), [({"add_bos_token": True}, True), ({"add_bos_token": False}, False)])
def test_bos_is_added_where_the_file_says(more, starts):
    tokenizer = build_tokenizer(metadata("smollm", **more))
    assert (tokenizer.encode("he").ids[0] == 0) == starts
    assert tokenizer.encode("he", add_special_tokens=False).ids == [TOKENS.index("he")]


def test_bos_where_the_file_is_silent_is_llama_3s_habit_alone():
    for pre, starts in {"llama-bpe": True, "qwen2": False, "smollm": False, "gpt-2": False}.items():
        silent = metadata(pre, add_bos_token=None)
        assert (build_tokenizer(silent).encode("he").ids[0] == 0) == starts, pre


def test_names_of_special_tokens():
    named = special_tokens(metadata("smollm", eos_token_id=1))
    assert named == {"bos_token": "<s>", "eos_token": "<user>"}


def test_other_tokenizers_are_refused():
    with pytest.raises(ModelLoadError, match=r"m\.gguf has tokenizer\.ggml\.model = 'llama' .* rebuilt is gpt2"):
        build_tokenizer(metadata("smollm", model="llama"))
    with pytest.raises(ModelLoadError, match=r"'chameleon'.*gpt-2, llama-bpe, qwen2, smollm"):
        build_tokenizer(metadata("chameleon"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"model": None}, "model = None"),
        ({"tokens": None}, "tokens = None where a list of str"),
        ({"merges": None}, "merges = None where a list of str"),
        ({"merges": ["q nowhere"]}, "merges that do not fit its tokens .*nowhere"),
        ({"merges": ["unsplit"]}, "merges that do not fit its tokens"),
        ({"token_type": 3}, "token_type = 3"),
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes'"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id = None where the token that add_bos_token"),
        (
            {"add_bos_token": True, "bos_token_id": len(TOKENS)},
            f"bos_token_id = {len(TOKENS)}",
        ),
        ({"add_bos_token": True, "bos_token_id": -1}, "bos_token_id = -1"),
    ],
)
def test_damaged_entries_are_named_with_their_file(damage, named):
    with pytest.raises(ModelLoadError, match=rf"m\.gguf has tokenizer\.ggml\.{named}"):
        build_tokenizer(metadata("smollm", **damage))


def test_merges_that_make_no_token_are_named_before_the_library_panics(capfd):
    longest = max(TOKENS, key=len)
    with pytest.raises(ModelLoadError, match=r"merges that do not fit its tokens .* is no token"):
        build_tokenizer(metadata("smollm", merges=[f"{longest} {longest}"]))
    assert "panicked" not in capfd.readouterr().err


def test_a_panic_of_the_library_is_a_load_error(monkeypatch):
    monkeypatch.setattr(gguf_tokenizer, "misfit", lambda *_: None)
    with pytest.raises(ModelLoadError, match=r"merges that do not fit its tokens .*range end index"):
        build_tokenizer(metadata("smollm", tokens=["a", "b"], merges=["a b"], token_type=[1, 1]))


def test_an_id_beyond_the_tokens_is_no_special_token():
    with pytest.raises(ModelLoadError, match=rf"eos_token_id = {len(TOKENS)}"):
        special_tokens(metadata("smollm", eos_token_id=len(TOKENS)))
