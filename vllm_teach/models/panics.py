"""Keeps files that do not fit from killing the tokenizers library, and turns what it raises into a ModelLoadError.

The library is written in Rust. Most of its errors reach Python as a plain Exception, but a broken assumption becomes a
panic: a backtrace on stderr and a `PanicException`, which is no Exception, so that `except Exception` lets it pass.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from vllm_teach.errors import ModelLoadError


@contextmanager
def rust_errors(refusal: Callable[[str], ModelLoadError]) -> Iterator[None]:
    """Raise `refusal(reason)`, the reason in one line, for whatever goes wrong inside, panics too."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):  # these ask the program to stop
        raise
    except BaseException as error:
        raise refusal(" ".join(str(error).split())) from error


def misfit(merges: Iterable[tuple[str, str]], vocab: Collection[str], prefix: str = "") -> str | None:
    """Return in words the first merge whose joined token `vocab` lacks, on which the library panics; None for none.

    `prefix` is what tokens that continue a word start with (`##` in some models); joining drops it.
    """
    for left, right in merges:
        joined = left + right[len(prefix) :]
        if joined not in vocab:
            return f"{left[:40]!r} and {right[:40]!r} make {joined[:80]!r}, which is no token"
    return None
