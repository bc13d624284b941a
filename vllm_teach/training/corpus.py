"""The text that every Python installation has: the reference manual's topics and the standard library's docstrings.

A document is one topic of `pydoc_data.topics`, or all docstrings of one source file of the standard library in the
order in which they stand there. Sources are parsed, never imported. Each document belongs to one part of the corpus,
by a hash of its name: so a document that two Python versions share lies in the same part under both.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tqdm import tqdm

from vllm_teach.errors import InvalidArgumentError, ResourceNotFoundError

# Packaged apart by some distributions, or gone in a later Python: without them the corpus depends on the version alone.
_NOT_EVERYWHERE = {"distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtle", "turtledemo"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}
# Shorter paragraphs ("Return the number of bytes.") are idioms that documents share, not copies of one another.
_COPY_LENGTH = 60
_SHORTEST_DOCUMENT = 100
# Of 20 hash values, one gives the part that chooses among checkpoints, and two the part that judges the choice.
_PARTS = {0: "dev", 1: "validation", 2: "validation"}
PARTS = ("train", "dev", "validation")
SOURCES = ("topics", "docstrings")


@dataclass(frozen=True)
class Document:
    """One text; `name` is "topics/…" or a source file's path below the standard library's folder."""

    name: str
    text: str

    @property
    def part(self) -> str:
        """The part of the corpus that it belongs to: "train", "dev" or "validation"."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return _PARTS.get(int.from_bytes(digest[:8], "big") % 20, "train")


def collect_documents(*, sources: Iterable[str] = SOURCES, progress: bool = False) -> list[Document]:
    """Return the documents of this Python installation, sorted by name.

    `sources` may leave out the topics or the docstrings (which take some seconds to parse). A paragraph that a document
    before has too is dropped, so that no long paragraph lies in two parts: the manual's topics quote one another.

    Raises InvalidArgumentError for another source, and ResourceNotFoundError when this Python lacks one of them or a
    file of it cannot be read: a corpus with a gap would be another corpus.
    """
    chosen = {sources} if isinstance(sources, str) else set(sources)
    if not chosen or chosen - set(SOURCES):
        raise InvalidArgumentError(f"sources is {sources!r}; give one or both of {', '.join(SOURCES)}.")
    texts: dict[str, str] = {}
    if "topics" in chosen:
        texts.update({f"topics/{name}": text for name, text in _topics().items()})
    if "docstrings" in chosen:
        root = Path(sysconfig.get_paths()["stdlib"])
        for file in tqdm(_source_files(root), desc="docstrings", unit="file", disable=not progress):
            texts[file.relative_to(root).as_posix()] = "\n\n".join(_docstrings_of(file))
    unique = without_copies(dict(sorted(texts.items())))
    return [Document(name, text) for name, text in unique.items() if len(text) >= _SHORTEST_DOCUMENT]


def _topics() -> dict[str, str]:
    try:
        return import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ResourceNotFoundError(
            f"pydoc_data.topics is not in this Python ({error}); install its whole standard library, or leave the "
            "topics out of sources."
        ) from error


def _docstrings_of(file: Path) -> list[str]:
    try:
        return list(docstrings(file.read_bytes()))
    # What is no Python, what is no text, and what is nested too deeply.
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ResourceNotFoundError(
            f"{file}, a file of the standard library, cannot be read ({error}); repair this Python's installation."
        ) from error


def corpus_hash(documents: Iterable[Document]) -> str:
    """Return the SHA-256 sum over all names and texts: equal for equal corpora, in whatever order they come."""
    total = hashlib.sha256()
    for document in sorted(documents, key=lambda document: document.name):
        for field in (document.name, document.text):
            total.update(hashlib.sha256(field.encode()).digest())
    return total.hexdigest()


def docstrings(source: bytes) -> Iterator[str]:
    """Yield the docstrings of module, classes and functions in the order of `source`, dedented as `inspect` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old sources hold escapes that newer Pythons warn of
        tree = ast.parse(source)
    yield from _docstrings_below(tree)


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    for child in ast.iter_child_nodes(node):
        yield from _docstrings_below(child)


def without_copies(texts: dict[str, str]) -> dict[str, str]:
    """Return the texts less each paragraph of 60 characters or more that an earlier one has too, up to white space."""
    seen: set[str] = set()
    kept: dict[str, str] = {}
    for name, text in texts.items():
        paragraphs = []
        for paragraph in "\n".join(line.rstrip() for line in text.splitlines()).split("\n\n"):
            words = " ".join(paragraph.split())
            if words and (len(words) < _COPY_LENGTH or words not in seen):
                paragraphs.append(paragraph.strip("\n"))
            seen.add(words)
        kept[name] = "\n\n".join(paragraphs)
    return kept


def _source_files(root: Path) -> list[Path]:
    modules = sys.stdlib_module_names - _NOT_EVERYWHERE
    files = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[0] in modules and not _TEST_FOLDERS.intersection(parts):
            files.append(file)
    if not files:
        raise ResourceNotFoundError(f"{root} holds no sources of the standard library; use a Python that has them.")
    return files
