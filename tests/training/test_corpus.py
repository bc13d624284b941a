import os
import subprocess
import sys
import sysconfig
import tokenize
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError, ResourceNotFoundError
from vllm_teach.training.corpus import (
    PARTS,
    Document,
    collect_documents,
    corpus_hash,
    docstrings,
    without_copies,
)

SOURCE = b'''"""Of the module."""

def outer():
    """Of outer.

        Deeper.
    Out again.
    """
    def inner():
        """Of inner."""

class Some:
    "Of Some."
    x = 1
    """No docstring, only a text."""
    async def method(self):
        r"""Of \\d method."""

def bare():
    pass
'''


def test_docstrings_come_in_the_order_of_the_source_and_dedented():
    expected = ["Of the module.", "Of outer.\n\n    Deeper.\nOut again.", "Of inner.", "Of Some.", "Of \\d method."]
    assert list(docstrings(SOURCE)) == expected


def test_the_corpus_holds_what_it_says(documents):
    by_name = {document.name: document for document in documents}
    assert list(by_name) == sorted(by_name)
    assert len(by_name) == len(documents) > 300
    assert sum(len(document.text) for document in documents) > 1_000_000
    assert "heap" in by_name["heapq.py"].text
    assert "topics/lambda" in by_name or "topics/compound" in by_name
    assert not [
        name for name in by_name if "/test/" in name or name.startswith(("test/", "idlelib/", "site-packages/"))
    ]


def test_no_source_is_imported_and_the_hash_is_the_same_in_another_process(documents):
    code = (
        "import sys\nfrom vllm_teach.training import collect_documents, corpus_hash\n"
        "print(corpus_hash(collect_documents()), 'antigravity' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.split() == [corpus_hash(documents), "False", "False"]


def test_the_hash_knows_every_name_and_letter_but_not_the_order(documents):
    some = documents[:5]
    assert corpus_hash(some) == corpus_hash(some[::-1])
    variants = [
        some[:4],
        [Document("x", some[0].text), *some[1:]],
        [Document(some[0].name, some[0].text + " "), *some[1:]],
        [Document(some[0].name + some[0].text[0], some[0].text[1:]), *some[1:]],
    ]
    assert len({corpus_hash(each) for each in [some, *variants]}) == 5


def test_parts_are_by_document_and_of_about_the_intended_sizes(documents):
    sizes = dict.fromkeys(PARTS, 0)
    for document in documents:
        sizes[document.part] += 1
    assert 0.75 < sizes["train"] / len(documents) < 0.92
    assert 0.02 < sizes["dev"] / len(documents) < 0.10
    assert 0.05 < sizes["validation"] / len(documents) < 0.17
    # The name alone decides.
    assert Document("heapq.py", "other text").part == next(d.part for d in documents if d.name == "heapq.py")


def test_no_long_paragraph_lies_in_two_parts(documents):
    part_of: dict[str, str] = {}
    for document in documents:
        for paragraph in document.text.split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) >= 60:
                assert part_of.setdefault(words, document.part) == document.part, words


def test_copies_are_dropped_from_later_texts_and_idioms_kept():
    long = "a paragraph that is long enough to be told from an idiom " + "x" * 20
    texts = {"a": f"Return it.\n\n{long}\n\nend", "b": f"Return it.\n\n  {long.replace(' ', chr(10), 1)}  \n\nother"}
    kept = without_copies(texts)
    assert kept == {"a": texts["a"], "b": "Return it.\n\nother"}


@given(st.lists(st.text(alphabet="ab \n", max_size=300), max_size=6))
def test_without_copies_twice_is_once(texts):
    once = without_copies({str(i): text for i, text in enumerate(texts)})
    assert without_copies(once) == once


def test_topics_alone(documents):
    topics = collect_documents(sources=("topics",))
    assert {document.name.split("/")[0] for document in topics} == {"topics"}
    assert len(topics) > 50


def test_every_docstring_of_a_module_is_there(documents):
    import heapq

    text = next(document.text for document in documents if document.name == "heapq.py")
    with tokenize.open(Path(heapq.__file__)) as source:
        assert heapq.merge.__doc__.strip().splitlines()[0] in source.read()
    assert heapq.merge.__doc__.strip().splitlines()[0] in text


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("heapq.py", "train"),
        ("topics/lambda", "train"),
        ("operator.py", "dev"),
        ("topics/debugger", "dev"),
        ("json/encoder.py", "validation"),
        ("shutil.py", "validation"),
    ],
)
def test_parts_never_change(name, part):
    """The committed model learnt from "train": a document of another part that moved there would judge it unfairly."""
    assert Document(name, "").part == part


def test_a_source_that_is_none_is_refused():
    for sources in ((), ("topic",), ("topics", "wikipedia"), "docs"):
        with pytest.raises(InvalidArgumentError, match=r"sources is .*; give one or both of topics, docstrings"):
            collect_documents(sources=sources)
    assert collect_documents(sources="topics") == collect_documents(sources=("topics",))


def test_a_python_without_the_topics_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ResourceNotFoundError, match=r"^pydoc_data\.topics is not in this Python"):
        collect_documents(sources=("topics",))


@pytest.mark.parametrize(
    "content", [b"def (:", b"\xff\xfe = 1", b"# coding: no-such-code\nx = 1", b"x = '\x00'", b"(" * 5000, None]
)
def test_a_source_that_cannot_be_read_is_named_and_not_skipped(content, tmp_path, monkeypatch):
    """A corpus with a gap would be another one, and the trigram model and the tokenizer with it."""
    file = tmp_path / "abc.py"
    if content is None:
        file.symlink_to(tmp_path / "nowhere")
    else:
        file.write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ResourceNotFoundError, match=r"abc\.py, a file of the standard library, cannot be read \("):
        collect_documents(sources=("docstrings",))


def test_a_python_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ResourceNotFoundError, match="holds no sources of the standard library"):
        collect_documents(sources=("docstrings",))
