import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import load_tokenizer
from vllm_teach.training import encode_parts, train_tokenizer
from vllm_teach.training.corpus import Document
from vllm_teach.training.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, save_tokenizer

TEXTS = ["the cat sat on the mat, the cat is that cat\n", "def f(x):\n    return the_cat(x)\n"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 280)


def test_every_byte_and_the_end_of_text_are_tokens(tokenizer):
    assert tokenizer.get_vocab_size() == 280
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID == 0
    assert len(tokenizer.encode("the cat").ids) < len("the cat")  # merges were learnt
    assert len(tokenizer.encode("\u6f22").ids) == 3  # and what was never seen falls apart into bytes


@given(st.text())
def test_every_text_comes_back(text):
    tokenizer = train_tokenizer(TEXTS, 280)
    ids = tokenizer.encode(text.replace(END_OF_TEXT, "")).ids
    assert tokenizer.decode(ids) == text.replace(END_OF_TEXT, "")


def test_equal_texts_give_equal_tokenizers(tokenizer):
    assert train_tokenizer(iter(TEXTS), 280).to_str() == tokenizer.to_str()


def test_the_package_and_transformers_read_the_files(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path, 64)
    loaded = load_tokenizer(tmp_path)
    text = "the cat\n\n  of \u00e9 and <|endoftext|>"
    assert loaded.encode(text) == tokenizer.encode(text).ids
    assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.stop_token_ids) == (0, 0, (0,))
    assert loaded.hf.model_max_length == 64


def test_parts_hold_the_documents_ids(tokenizer):
    documents = [Document(f"topics/{i}", f"cat {i}") for i in range(60)]
    parts = encode_parts(lambda text: tokenizer.encode(text).ids, documents)
    for part, encoded in parts.items():
        assert [tokenizer.decode(ids) for ids in encoded] == [d.text for d in documents if d.part == part]
    assert all(parts.values())


def test_vocabularies_that_cannot_be():
    with pytest.raises(InvalidArgumentError, match=r"vocab_size=257 is not valid: give a whole number above 257\."):
        train_tokenizer(TEXTS, 257)
    with pytest.raises(InvalidArgumentError, match="vocab_size=4000 is more than the texts give"):
        train_tokenizer(TEXTS, 4000)
