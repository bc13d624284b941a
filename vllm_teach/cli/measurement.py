"""What the commands that measure have in common: an early look at the file, a table, and figures with provenance."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

from vllm_teach.cli.output import check_output_file, write, write_json
from vllm_teach.errors import InvalidArgumentError


class Result(Protocol):
    """What a measurement returns."""

    def to_json(self) -> dict[str, object]:
        """Return it as what `json.dump` takes."""


def measured(
    measure: Callable[[argparse.Namespace], tuple[Result, Callable[[Any], str]]],
) -> Callable[[argparse.Namespace], None]:
    """Return the command around `measure`, which returns its result and what formats it."""

    def run(arguments: argparse.Namespace) -> None:
        if arguments.json:
            check_output_file(arguments.json)
        try:
            result, text = measure(arguments)
        except (MemoryError, RuntimeError) as error:
            from vllm_teach.engine.failure import is_out_of_memory

            if not is_out_of_memory(error):
                raise
            raise InvalidArgumentError("the tensors to measure with do not fit into memory: ask for less.") from error
        write(text(result))
        if arguments.json:
            write_json(arguments.json, result.to_json() | provenance(arguments.command_line))

    return run


def provenance(command: str) -> dict[str, object]:
    """Return the command and the commit that a result file names beside its environment."""
    from vllm_teach.validation.gpu.machine import commit

    return {"command": command, "commit": commit()}
