"""Importing an optional library: each way to fail is a reason to read, and never a crash of `vllm-teach info`."""

import importlib
from types import ModuleType

import pytest

from vllm_teach import backends
from vllm_teach.backends.library import import_library
from vllm_teach.errors import MissingDependencyError

WORDS = {"package": "fast-lib", "install": "pip install it", "repair": "build it again"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("no", name="fast_lib"), "The package fast-lib is not installed; pip install it."),
        (ModuleNotFoundError("no", name="einops"), "fast-lib is installed, but lacks einops; install it."),
        (
            ImportError("no symbol"),
            "fast-lib is installed but does not load (no symbol); build it again.",
        ),
        (OSError("libcudart.so"), "fast-lib is installed but does not load (libcudart.so); build it again."),
        (RuntimeError("CUDA"), "fast-lib is installed but does not load (CUDA); build it again."),
        (AttributeError("torch.x"), "fast-lib is installed but does not load (torch.x); build it again."),
    ],
)
def test_each_failure_says_what_to_do(monkeypatch, error: Exception, words: str) -> None:
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MissingDependencyError) as caught:
        import_library("fast_lib.ops", **WORDS)
    assert str(caught.value) == words


def test_a_submodule_is_what_comes_back(monkeypatch) -> None:
    asked: list[str] = []
    found = {name: ModuleType(name) for name in ("fast_lib", "fast_lib.ops")}
    monkeypatch.setattr(importlib, "import_module", lambda name: asked.append(name) or found[name])
    assert import_library("fast_lib.ops", **WORDS) is found["fast_lib.ops"]
    assert asked == ["fast_lib", "fast_lib.ops"]


@pytest.mark.parametrize("name", ["flash_attn", "xformers"])
def test_a_library_that_crashes_while_it_is_imported_is_unavailable(monkeypatch, name: str) -> None:
    def crash(module: str) -> ModuleType:
        raise RuntimeError("CUDA driver too old")

    backend = backends.get(name)
    monkeypatch.setattr(importlib, "import_module", crash)
    assert "does not load (CUDA driver too old)" in str(backend.unavailable())
