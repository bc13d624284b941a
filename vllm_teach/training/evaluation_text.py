"""The text that quantised models are judged by: the part "validation" of the corpus, which no calibration reads."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.tokenizer import Tokenizer
from vllm_teach.training.calibration_text import encode_texts
from vllm_teach.training.corpus import collect_documents


def evaluation_ids(tokenizer: Tokenizer, tokens: int | None = None) -> Tensor:
    """Return the ids of the validation documents, an end of text behind each: int64 `[tokens]`, all or the first ones.

    The documents come by name, so that the first ones are of one kind: a judgement takes all.

    Raises InvalidArgumentError for fewer than two tokens, and for more than there are.
    """
    if tokens is not None:
        check_count("tokens", tokens, 2)
    texts = (document.text for document in collect_documents() if document.part == "validation")
    ids = list(islice(encode_texts(tokenizer, texts), tokens))
    if tokens is None or len(ids) == tokens:
        return torch.tensor(ids)
    raise InvalidArgumentError(f"tokens={tokens} is more than the {len(ids)} that the text has: use fewer.")
