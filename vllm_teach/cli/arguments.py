"""Arguments that several commands take, and the types that check them."""

import argparse
from pathlib import Path
from typing import Any


def count(text: str) -> int:
    """Return a whole number from 1 to 999,999,999: a size beyond it is a slip, and would overflow somewhere below."""
    if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r:.80} is not valid: give a whole number from 1 to 999999999")


def port(text: str) -> int:
    """Return a port to serve on."""
    if text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port: give a whole number from 1 to 65535")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add `--model`."""
    parser.add_argument("--model", default="smollm2", help="alias, folder, .gguf file or hub id (default: smollm2)")


def add_dtype(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--dtype`."""
    parser.add_argument("--dtype", default=default, choices=["auto", "float32", "bfloat16", "float16"])


def add_lengths(group: Any, inputs: int | str, outputs: int | str) -> None:
    """Add `--input-len` and `--output-len`, None where they are not given; `inputs` and `outputs` are then taken."""
    group.add_argument("--input-len", type=count, help=f"tokens of each prompt (default: {inputs})")
    group.add_argument("--output-len", type=count, help=f"tokens of each answer (default: {outputs})")


def add_measurement(parser: argparse.ArgumentParser, rounds: int, of_a_round: str, *also: str) -> None:
    """Add `--rounds`, `--json` and `--quiet`; `of_a_round` says what runs once in each, `also` names the first too."""
    parser.add_argument(
        "--rounds", *also, type=count, default=rounds, help=f"{of_a_round} once a round (default: {rounds})"
    )
    add_json(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and where they come from, too")
