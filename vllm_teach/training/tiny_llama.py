"""Trains the offline model: `python -m vllm_teach.training.tiny_llama --out data/tiny-llama`.

Everything is made from this Python installation and a seed: the text, the tokenizer, the trigram model that sets the
bar, and the weights. An interrupted training goes on where it was; the folder is written at the end.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_teach import __version__
from vllm_teach.errors import InvalidArgumentError, VllmTeachError
from vllm_teach.models.cache import cache_home
from vllm_teach.models.load import load_model
from vllm_teach.training.batches import join_documents
from vllm_teach.training.corpus import PARTS, Document, collect_documents, corpus_hash
from vllm_teach.training.evaluation import document_nlls
from vllm_teach.training.export import export_model, write_json
from vllm_teach.training.kneser_ney import KneserNey
from vllm_teach.training.model import llama_config
from vllm_teach.training.options import TrainingOptions
from vllm_teach.training.tokenizer import encode_parts, train_tokenizer
from vllm_teach.training.trainer import History, TrainingRun, train

VOCAB_SIZE = 2048
HIDDEN_SIZE, NUM_LAYERS, KV_HEADS, CONTEXT = 256, 4, 2, 512
OPTIONS = TrainingOptions(steps=900, batch_size=32, window=128, long_steps=150, long_window=CONTEXT)


def build_tiny_llama(out: Path, options: TrainingOptions = OPTIONS, *, command: str, progress: bool = True) -> dict:
    """Write a model folder to `out`, with `training.json` beside the model's files; return what that file says.

    `command` is recorded there. Takes minutes; the training is checkpointed in the package's cache folder. Raises what
    `collect_documents` and `train` raise, and InvalidArgumentError, before anything is trained, when `out` cannot be.
    """
    _check_out(out)
    documents = collect_documents(progress=progress)
    texts = [document.text for document in documents if document.part == "train"]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    parts = encode_parts(lambda text: tokenizer.encode(text).ids, documents)
    config = llama_config(
        VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS, kv_heads=KV_HEADS, context=CONTEXT
    )
    checkpoint = cache_home() / "tiny-llama.checkpoint"
    run = train(
        config,
        join_documents(parts["train"]),
        options,
        dev_tokens=join_documents(parts["dev"]),
        checkpoint=checkpoint,
        progress=progress,
    )
    with tempfile.TemporaryDirectory(dir=out.parent) as partial:
        folder = Path(partial)
        export_model(run.model, tokenizer, folder)
        record = {"command": command, **_provenance(run, options), **measure(folder, documents, parts)}
        write_json(folder / "training.json", {**record, "curve": _curve(run.history)})
        for file in folder.iterdir():
            os.replace(file, out / file.name)
    checkpoint.unlink()
    return record


def measure(folder: Path, documents: Sequence[Document], parts: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Return the corpus' facts, and the losses of the model in `folder` beside those of trigram models.

    `parts` are the documents' token ids (`encode_parts`). All models score the same tokens: those of each document and
    the end of text behind it, from the document's start.
    """
    model = load_model(folder)
    vocab_size, window = model.config.vocab_size, model.config.max_position
    trigrams = {
        name: KneserNey(parts["train"], vocab_size, modified=modified)
        for name, modified in (("kneser_ney", False), ("modified_kneser_ney", True))
    }
    losses: dict[str, dict[str, float]] = {}
    for part in ("dev", "validation"):
        losses[part] = {"model": float(document_nlls(model, parts[part], window=window).mean())}
        for name, trigram in trigrams.items():
            losses[part][name] = float(np.concatenate([trigram.nlls(ids) for ids in parts[part]]).mean())
    counts = {
        part: {
            "documents": len(parts[part]),
            "characters": sum(len(document.text) for document in documents if document.part == part),
            "tokens": sum(len(ids) + 1 for ids in parts[part]),
        }
        for part in PARTS
    }
    return {
        "corpus": {"sha256": corpus_hash(documents), **counts},
        "parameters": model.num_parameters(),
        "losses_in_nats_per_token": losses,
    }


def _provenance(run: TrainingRun, options: TrainingOptions) -> dict[str, Any]:
    return {
        "text": "pydoc_data.topics and the standard library's docstrings of this Python (PSF License Version 2)",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm_teach": __version__,
        "device": f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})",
        "threads": torch.get_num_threads(),
        "seconds": round(run.history.seconds, 1),
        "cpu_seconds": round(run.history.cpu_seconds, 1),
        "options": vars(options),
        "kept_step": run.history.best_step,
    }


def _curve(history: History, every: int = 10) -> dict[str, Any]:
    """Return the curve thinned for the file: the mean training loss of each `every` steps, and all dev losses."""
    losses = history.losses
    means = [np.mean(losses[start : start + every]) for start in range(0, len(losses), every)]
    return {
        "steps_per_entry": every,
        "train": [round(float(mean), 4) for mean in means],
        "dev": [[step, round(loss, 4)] for step, loss in history.dev_losses],
    }


def _check_out(out: Path) -> None:
    """Make the folder, and see now, not after the training, that a file made beside it can be moved into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out.parent, delete=False) as file:
            moved = out / Path(file.name).name
            os.replace(file.name, moved)
        moved.unlink()
    except OSError as error:
        raise InvalidArgumentError(f"out is {str(out)!r}, which cannot be written ({error}): give a folder.") from error


def _threads(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 1024:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of threads: give a whole number from 1 to 1024")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m vllm_teach.training.tiny_llama", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=OPTIONS.steps, help=f"training steps (default: {OPTIONS.steps})")
    parser.add_argument("--seed", type=int, default=OPTIONS.seed)
    parser.add_argument("--threads", type=_threads, help="CPU threads (default: all)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    arguments = parser.parse_args(argv)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    command = shlex.join(["python", "-m", "vllm_teach.training.tiny_llama", *(sys.argv[1:] if argv is None else argv)])
    try:
        options = TrainingOptions(**{**vars(OPTIONS), "steps": arguments.steps, "seed": arguments.seed})
        record = build_tiny_llama(arguments.out, options, command=command, progress=not arguments.quiet)
    except VllmTeachError as error:
        print(f"tiny_llama: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntiny_llama: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    for part, losses in record["losses_in_nats_per_token"].items():
        print(f"{part:<12}", "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
