"""Training a small language model on the CPU: text, tokenizer, trainer, and the trigram model that it has to beat.

The names are imported when first used, so that `import vllm_teach.training` loads no torch.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "Document": "corpus",
    "History": "trainer",
    "KneserNey": "kneser_ney",
    "TrainingOptions": "options",
    "TrainingRun": "trainer",
    "collect_documents": "corpus",
    "corpus_hash": "corpus",
    "document_nlls": "evaluation",
    "encode_parts": "tokenizer",
    "export_model": "export",
    "join_documents": "batches",
    "llama_config": "model",
    "stream_loss": "evaluation",
    "train": "trainer",
    "train_tokenizer": "tokenizer",
    "window_attend": "attend",
}

__all__ = [
    "Document",
    "History",
    "KneserNey",
    "TrainingOptions",
    "TrainingRun",
    "collect_documents",
    "corpus_hash",
    "document_nlls",
    "encode_parts",
    "export_model",
    "join_documents",
    "llama_config",
    "stream_loss",
    "train",
    "train_tokenizer",
    "window_attend",
]

if TYPE_CHECKING:
    from vllm_teach.training.attend import window_attend
    from vllm_teach.training.batches import join_documents
    from vllm_teach.training.corpus import Document, collect_documents, corpus_hash
    from vllm_teach.training.evaluation import document_nlls, stream_loss
    from vllm_teach.training.export import export_model
    from vllm_teach.training.kneser_ney import KneserNey
    from vllm_teach.training.model import llama_config
    from vllm_teach.training.options import TrainingOptions
    from vllm_teach.training.tokenizer import encode_parts, train_tokenizer
    from vllm_teach.training.trainer import History, TrainingRun, train


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
