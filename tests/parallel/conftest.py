"""Ranks that are threads of this process, fast and each with a group of its own; and small models to be split."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from vllm_teach.models.decoder import Decoder
from vllm_teach.models.load import load_config
from vllm_teach.models.resolve import resolve_model
from vllm_teach.parallel.group import Group

HERE = Path(__file__).parent
SIZES = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the module of functions that run in workers, which find it where this process does."""
    monkeypatch.syspath_prepend(str(HERE))
    return "rank_programs"


def run_ranks(size: int, function: Callable[[Group], Any], timeout: float = 30.0) -> list[Any]:
    """Call `function` with each of `size` connected groups, at the same time; return the results or raise."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = Group(rank, size, timeout)
        group.connect(store, "127.0.0.1")
        return function(group)

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(run, rank) for rank in range(size)]]


@pytest.fixture(name="run_ranks")
def run_ranks_fixture() -> Callable[..., list[Any]]:
    return run_ranks


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a small random model, with `tiny`'s tokenizer, and returns its directory.

    9 query heads and 3 KV heads, as SmolLM2 has; sizes that two and three ranks divide unevenly. Its arguments go into
    config.json.
    """

    @cache
    def write(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        tiny = resolve_model("tiny")
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(tiny / file, folder)
        values = {**json.loads((tiny / "config.json").read_text()), **SIZES, **changes}
        (folder / "config.json").write_text(json.dumps(values))
        model = Decoder(load_config(folder)).init_random(seed=3)
        torch.manual_seed(4)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape))
            elif not name.endswith("norm.weight"):
                parameter.mul_(10.0)  # otherwise all tokens are about equally likely
        save_file({name: each.contiguous() for name, each in model.state_dict().items()}, folder / "model.safetensors")
        return folder

    return write
