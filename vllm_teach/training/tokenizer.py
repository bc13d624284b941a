"""A byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in GPT-2) trained on one's own text.

Every byte is a token, so every text can be encoded and comes back unchanged; the other entries are the pairs that were
most frequent when they were merged. One special token, id 0, ends each document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.training.corpus import PARTS, Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a tokenizer of `vocab_size` entries: the end of text, the 256 bytes, and merges learnt from `texts`.

    The same texts give the same tokenizer. Raises InvalidArgumentError when `vocab_size` leaves no room for a merge, or
    asks for more merges than `texts` have.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not isinstance(vocab_size, int) or vocab_size <= _BYTES + 1:
        raise InvalidArgumentError(f"vocab_size={vocab_size} is not valid: give a whole number above {_BYTES + 1}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise InvalidArgumentError(
            f"vocab_size={vocab_size} is more than the texts give, {tokenizer.get_vocab_size()}: lower it."
        )
    return tokenizer


def encode_parts(encode: Callable[[str], list[int]], documents: Iterable[Document]) -> dict[str, list[list[int]]]:
    """Return the token ids of each document, by the part of the corpus that it belongs to."""
    parts: dict[str, list[list[int]]] = {part: [] for part in PARTS}
    for document in documents:
        parts[document.part].append(encode(document.text))
    return parts


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, as `transformers` reads them.

    `max_length` is the longest text, in tokens, that the model takes.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        # The class that takes tokenizer.json as it is; a model's own class would rebuild the pre-tokeniser.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
