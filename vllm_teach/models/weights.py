"""Reads the weights of a Hugging Face directory: one safetensors file, or several with an index.

A safetensors file is a JSON header (name, dtype, shape and place of each tensor) and then the raw bytes. It is
memory-mapped, and here one tensor at a time: the map of a tensor is closed as soon as the tensor is copied, so the
file's pages never pile up beside the copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_teach.errors import ModelLoadError
from vllm_teach.models.weight_files import weight_files


class Checkpoint:
    """The weights of one directory, by name.

    Attributes: `folder`; `files` {tensor name: the file that holds it}; `shapes` {tensor name: shape}. Raises
    ModelNotFoundError when the directory has no safetensors weights, ModelLoadError (naming the file) when a file is
    missing, cut short or unreadable.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(folder):
            with _opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is no dict and cannot be iterated
                    self.files[name] = file
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def copy(
        self, name: str, dtype: torch.dtype, device: torch.device | str, part: tuple[slice, ...] | None = None
    ) -> torch.Tensor:
        """Return a fresh tensor in `dtype` on `device`; the file's own bytes stay mapped only during the copy.

        With `part`, rows and columns, only these are read.
        """
        with _opened(self.files[name]) as opened:
            source = opened.get_tensor(name) if part is None else opened.get_slice(name)[part]
            if not source.is_floating_point() or source.element_size() < 2:
                raise ModelLoadError(
                    f"tensor {name} in {self.files[name]} has dtype {source.dtype}, which a weight must not have: use "
                    "the model in float32, float16 or bfloat16, or one whose config.json says how it is quantised."
                )
            return torch.empty(source.shape, dtype=dtype, device=device).copy_(source)

    def is_zero(self, name: str) -> bool:
        """Return whether all values of a tensor are 0."""
        with _opened(self.files[name]) as opened:
            return not opened.get_tensor(name).any()

    def equal(self, first: str, second: str) -> bool:
        """Return whether two tensors hold the same values."""
        with _opened(self.files[first]) as a, _opened(self.files[second]) as b:
            return torch.equal(a.get_tensor(first), b.get_tensor(second))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ModelLoadError(f"{file} is damaged or cut short ({error}): download or convert it again.") from error
