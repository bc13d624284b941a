import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import load_tokenizer, resolve_model
from vllm_teach.training import calibration_text, evaluation_text
from vllm_teach.training.calibration_text import calibration_ids
from vllm_teach.training.corpus import Document
from vllm_teach.training.evaluation_text import evaluation_ids

DOCUMENTS = [Document(f"topics/{i}", f"This is text number {i}. " * 5) for i in range(60)]
JUDGING = [document for document in DOCUMENTS if document.part == "validation"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("tiny"))


@pytest.fixture(autouse=True)
def documents(monkeypatch):
    for module in (calibration_text, evaluation_text):
        monkeypatch.setattr(module, "collect_documents", lambda: DOCUMENTS)


def test_the_text_is_the_validation_documents_in_order_each_with_an_end(tokenizer):
    assert len(JUDGING) > 1
    expected = [id for each in JUDGING for id in (*tokenizer.encode(each.text), tokenizer.eos_token_id)]
    ids = evaluation_ids(tokenizer, len(expected))
    assert (ids.tolist(), ids.dtype) == (expected, torch.int64)
    assert evaluation_ids(tokenizer).tolist() == expected
    assert evaluation_ids(tokenizer, 5).tolist() == expected[:5]


def test_no_calibration_reads_it(tokenizer):
    learnt = tokenizer.decode(calibration_ids("builtin", tokenizer, samples=20, length=64).flatten().tolist())
    for document in JUDGING:
        assert document.text.strip() not in learnt


def test_more_than_there_is_says_how_much_there_is(tokenizer):
    there = sum(len(tokenizer.encode(each.text)) + 1 for each in JUDGING)
    with pytest.raises(InvalidArgumentError, match=f"tokens={there + 1} is more than the {there} that the text has"):
        evaluation_ids(tokenizer, there + 1)


@pytest.mark.parametrize("tokens", [1, 0, -3, True, 2.0])
def test_a_number_that_scores_nothing_is_refused(tokens, tokenizer):
    with pytest.raises(InvalidArgumentError, match="tokens"):
        evaluation_ids(tokenizer, tokens)
