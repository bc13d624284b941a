import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import load_tokenizer, resolve_model
from vllm_teach.training import calibration_text
from vllm_teach.training.calibration_text import calibration_ids
from vllm_teach.training.corpus import Document


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("tiny"))


@pytest.fixture
def documents(monkeypatch) -> list[Document]:
    found = [Document(f"topics/{i}", f"This is text number {i}. " * 20) for i in range(60)]
    monkeypatch.setattr(calibration_text, "collect_documents", lambda: found)
    return found


def pieces_of(text: str, tokenizer, length: int) -> list[list[int]]:
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]


def test_a_files_pieces_are_whole_stretches_of_it(tokenizer, tmp_path):
    text = " ".join(f"word{i}" for i in range(400))
    (tmp_path / "text.txt").write_text(text)
    ids = calibration_ids(tmp_path / "text.txt", tokenizer, samples=5, length=40, seed=1)
    assert (ids.shape, ids.dtype) == ((5, 40), torch.int64)
    pieces = pieces_of(text, tokenizer, 40)
    places = [pieces.index(piece) for piece in ids.tolist()]
    assert places == sorted(set(places))
    assert torch.equal(ids, calibration_ids(tmp_path / "text.txt", tokenizer, samples=5, length=40, seed=1))
    assert not torch.equal(ids, calibration_ids(tmp_path / "text.txt", tokenizer, samples=5, length=40, seed=2))


def test_the_builtin_text_is_the_training_part_and_never_the_evaluations(tokenizer, documents):
    ids = calibration_ids("builtin", tokenizer, samples=30, length=50)
    text = tokenizer.decode(ids.flatten().tolist())
    kept = {document.part: document for document in documents}
    assert set(kept) > {"train"}
    trained = [document for document in documents if document.part == "train"]
    assert sum(document.text.strip() in text for document in trained) > 3
    for document in documents:
        assert document.part == "train" or document.text.strip() not in text


def test_the_seed_draws_the_builtins_documents(tokenizer, documents):
    first, again, other = (calibration_ids("builtin", tokenizer, samples=4, length=50, seed=s) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_too_little_text_says_how_many_samples_it_makes(tokenizer, tmp_path):
    text = "one two three " * 40
    (tmp_path / "text.txt").write_text(text)
    fits = len(pieces_of(text, tokenizer, 16))
    with pytest.raises(InvalidArgumentError, match=f"1000 samples of 16 need 16000: give more text, or at most {fits}"):
        calibration_ids(tmp_path / "text.txt", tokenizer, samples=1000, length=16)


@pytest.mark.parametrize("content", [None, b"caf\xe9"])
def test_a_file_that_cannot_be_read_is_named(content, tokenizer, tmp_path):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"calibration=.*text\.txt.*'builtin'"):
        calibration_ids(file, tokenizer, samples=1, length=4)


def test_an_empty_file_and_a_single_token(tmp_path):
    (tmp_path / "text").write_text("")
    with pytest.raises(InvalidArgumentError, match="give more text, or shorter samples"):
        calibration_ids(tmp_path / "text", load_tokenizer(resolve_model("tiny")))


@pytest.mark.parametrize(
    "sizes", [{"samples": 0}, {"length": 0}, {"samples": 10**30}, {"length": 10**30}, {"seed": 2**70}]
)
def test_sizes_and_seeds_that_cannot_be(sizes, tmp_path):
    (tmp_path / "text").write_text("some text " * 50)
    with pytest.raises(InvalidArgumentError, match=r"(samples|length|seed|calibration)="):
        calibration_ids(
            tmp_path / "text", load_tokenizer(resolve_model("tiny")), **{"samples": 1, "length": 8, **sizes}
        )
