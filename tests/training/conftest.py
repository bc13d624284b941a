"""Toy streams and models that train in milliseconds, and the committed offline model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vllm_teach.models import resolve_model
from vllm_teach.models.config import ModelConfig
from vllm_teach.training import TrainingOptions, collect_documents
from vllm_teach.training.corpus import Document


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def toy_config() -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", 24, 32, 48, 2, 4, 2, 8, 64, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def toy_tokens() -> torch.Tensor:
    """Counting up from random starts, modulo 24: what comes next is certain but for one token in eight."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(24, (200,), generator=generator)
    return ((starts[:, None] + torch.arange(8)) % 24).flatten()


@pytest.fixture
def toy_options() -> Callable[..., TrainingOptions]:
    """make(**settings) -> options of a run that takes a blink."""

    def make(**settings) -> TrainingOptions:
        small = {"steps": 5, "batch_size": 4, "window": 16, "warmup_steps": 2, "learning_rate": 5e-3}
        return TrainingOptions(**{**small, **settings})

    return make


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return collect_documents()


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    return resolve_model("tiny")
