"""The text that quantisation learns from, as token ids: a file, or what every Python installation has."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from vllm_teach.engine.field_checks import check_seed, check_whole
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.tokenizer import Tokenizer
from vllm_teach.training.corpus import collect_documents

BUILTIN = "builtin"


def calibration_ids(
    source: str | Path, tokenizer: Tokenizer, *, samples: int = 32, length: int = 512, seed: int = 0
) -> Tensor:
    """Return `samples` pieces of text of `length` tokens each, int64 `[samples, length]`.

    `source` is a text file, or "builtin": the part "train" of `collect_documents`, which no evaluation here reads. The
    builtin's documents come in an order that `seed` draws, a file's pieces are drawn from all that it has.

    Raises InvalidArgumentError when the file cannot be read as UTF-8, when there is less text than asked for, and for a
    `samples` or `length` below 1 and a `seed` of more than 64 bits.
    """
    check_whole("samples", samples, 1)
    check_whole("length", length, 1)
    check_seed(seed)
    wanted = samples * length
    if source == BUILTIN:
        texts = [document.text for document in collect_documents() if document.part == "train"]
        random.Random(seed).shuffle(texts)
        ids = _take(encode_texts(tokenizer, texts), wanted)
    else:
        ids = list(encode_texts(tokenizer, [_read(Path(source))]))
    found = len(ids) // length
    if found < samples:
        fewer = f"at most {found} samples" if found else "shorter samples"
        raise InvalidArgumentError(
            f"calibration={str(source)!r} has {len(ids)} tokens, and {samples} samples of {length} need {wanted}: give "
            f"more text, or {fewer}."
        )
    pieces = torch.tensor(ids[: found * length]).view(-1, length)  # [pieces, length]
    chosen = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))[:samples]
    return pieces[chosen.sort().values]


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[int]:
    """Yield the ids of all texts, an end of text behind each where the model has one; each is encoded when reached."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        yield from tokenizer.encode(text)
        yield from end


def _take(ids: Iterator[int], count: int) -> list[int]:
    # Not by islice, which refuses a number beyond sys.maxsize: that there is less text is said with its size.
    return [token for token, _ in zip(ids, range(count), strict=False)]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"calibration={str(file)!r} cannot be read ({error}): give a UTF-8 text file, or {BUILTIN!r}."
        ) from error
