"""The tensors of the cache: writes by slot, block transfers over all layers, and the swap space on the host."""

import random
from pathlib import Path

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache import storage as storage_module
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.kvcache.transfers import Transfer

LAYERS, BLOCKS, BLOCK_SIZE = 3, 7, 2


def make(num_host_blocks: int = 0, swap_file: Path | None = None, dtype: torch.dtype = torch.float32) -> KVStorage:
    """A cache whose every number is another one."""
    cache = KVStorage(LAYERS, BLOCKS, BLOCK_SIZE, 2, 4, dtype, "cpu", num_host_blocks, swap_file)
    cache.keys[:, :BLOCKS] = torch.arange(LAYERS * BLOCKS * BLOCK_SIZE * 8).view(LAYERS, BLOCKS, BLOCK_SIZE, 2, 4)
    cache.values[:, :BLOCKS] = -cache.keys[:, :BLOCKS]
    return cache


def test_only_the_zero_block_is_cleared() -> None:
    cache = KVStorage(2, 5, 4, 3, 8, torch.bfloat16, "cpu")
    assert cache.keys.shape == cache.values.shape == (2, 6, 4, 3, 8)
    assert cache.zero_block == 5
    assert not cache.keys[:, 5].any()
    assert not cache.values[:, 5].any()


def test_a_write_reaches_its_slots_and_no_other() -> None:
    cache = KVStorage(2, 5, 2, 3, 4, torch.float32, "cpu")
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    k, v = torch.randn(4, 3, 4), torch.randn(4, 3, 4)
    cache.write(1, torch.tensor([7, 2, 3, 8]), k, v)
    for held, new in ((cache.keys, k), (cache.values, v)):
        assert torch.equal(held[1, 1], new[[1, 2]])  # slots 2 and 3
        assert torch.equal(held[1, 3, 1], new[0])
        assert torch.equal(held[1, 4, 0], new[3])
        assert int(held[1].isnan().all(-1).all(-1).sum()) == 6 * 2 - 4
        assert held[0].isnan().all()


def test_a_write_takes_parts_of_a_larger_matrix() -> None:
    cache = make()
    both = torch.randn(3, 4, 4)
    cache.write(0, torch.tensor([0, 5, 9]), both[:, :2], both[:, 2:])
    assert torch.equal(cache.keys[0].flatten(0, 1)[[0, 5, 9]], both[:, :2])
    assert torch.equal(cache.values[0].flatten(0, 1)[[0, 5, 9]], both[:, 2:])


@pytest.mark.parametrize("temporary_bytes", [1, 200, 1 << 20])  # one layer at a time, some, all
@pytest.mark.parametrize("seed", range(4))
def test_transfers_do_what_python_lists_do(monkeypatch, seed: int, temporary_bytes: int) -> None:
    """Against a list of blocks: all sources of a transfer are read first, then its destinations are written."""
    monkeypatch.setattr(storage_module, "TEMPORARY_BYTES", temporary_bytes)
    rng = random.Random(seed)
    cache = make(num_host_blocks=4)
    cache.host.zero_()
    inside = list(cache.keys.clone().unbind(1))
    host = list(cache.host[0].clone().unbind(1))
    transfers = []
    for _ in range(12):
        kind = rng.choice(["copy", "move", "swap_out", "swap_in"])
        source, target = (host if kind == "swap_in" else inside), (host if kind == "swap_out" else inside)
        most = min(len(source), len(target)) - 1  # the zero block stays out of it
        count = rng.randrange(most + 1)
        sources = rng.sample(range(most), count)
        destinations = rng.sample(range(most), count)
        transfers.append(Transfer(kind, tuple(zip(sources, destinations, strict=True))))
        read = [source[block] for block in sources]
        for block, content in zip(destinations, read, strict=True):
            target[block] = content
    cache.apply(transfers)
    assert torch.equal(cache.keys, torch.stack(inside, 1))
    assert torch.equal(cache.values, -torch.stack(inside, 1))
    assert torch.equal(cache.host[0], torch.stack(host, 1))
    assert torch.equal(cache.host[1], -torch.stack(host, 1))


def test_moves_of_one_transfer_may_overlap() -> None:
    cache = make()
    before = cache.keys.clone()
    cache.apply([Transfer("move", ((1, 0), (2, 1), (3, 2), (0, 3)))])
    assert torch.equal(cache.keys[:, [0, 1, 2, 3]], before[:, [1, 2, 3, 0]])
    assert torch.equal(cache.keys[:, 4:], before[:, 4:])


def test_transfers_take_place_in_their_order() -> None:
    cache = make()
    first = cache.values[:, 0].clone()
    cache.apply([Transfer("copy", ((0, 1),)), Transfer("copy", ((1, 2),))])
    assert torch.equal(cache.values[:, 2], first)


def test_the_swap_space_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "swap"
    cache = make(num_host_blocks=3, swap_file=file, dtype=torch.bfloat16)
    assert file.stat().st_size == cache.host.nbytes == 2 * LAYERS * 3 * BLOCK_SIZE * 8 * 2
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.apply([Transfer("swap_out", ((4, 2), (1, 0)))])
    on_disk = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.bfloat16).view(cache.host.shape)
    assert torch.equal(on_disk[0][:, [2, 0]], keys[:, [4, 1]])
    assert torch.equal(on_disk[1][:, [2, 0]], values[:, [4, 1]])
    cache.keys.fill_(torch.nan)
    cache.apply([Transfer("swap_in", ((2, 6), (0, 3)))])
    assert torch.equal(cache.keys[:, [6, 3]], keys[:, [4, 1]])
    assert cache.keys[:, [0, 1, 2, 4, 5]].isnan().all()


def test_a_swap_file_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"swap_file='.*missing.*' cannot be made 1152 bytes large"):
        make(num_host_blocks=3, swap_file=tmp_path / "missing" / "swap")
    assert not (tmp_path / "missing").exists()


def test_a_swap_file_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="lower swap_space"):
        KVStorage(1, 1, 1, 1, 1, torch.float32, "cpu", num_host_blocks=1 << 52, swap_file=tmp_path / "swap")


def test_bytes_are_what_the_bookkeeping_says() -> None:
    from transformers import LlamaConfig

    from vllm_teach.models.config import ModelConfig

    config = ModelConfig.from_hf(LlamaConfig(num_hidden_layers=2, num_key_value_heads=4).to_dict())
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVStorage(2, 5, 16, config.num_kv_heads, config.head_dim, dtype, "cpu")
        held = cache.keys.nbytes + cache.values.nbytes
        assert held == (5 + 1) * 16 * config.kv_bytes_per_token(dtype.itemsize)


def test_a_swap_file_is_held_while_the_storage_lives(tmp_path: Path) -> None:
    cache = make(num_host_blocks=3, swap_file=tmp_path / "swap")
    with pytest.raises(InvalidArgumentError, match="is in use by another engine"):
        make(num_host_blocks=1, swap_file=tmp_path / "swap")
    assert (tmp_path / "swap").stat().st_size == cache.host.nbytes
    del cache
    make(num_host_blocks=1, swap_file=tmp_path / "swap")
