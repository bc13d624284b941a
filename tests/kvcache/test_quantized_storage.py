"""The INT8 cache: codes and scales against a float64 formula, and that both go wherever a block goes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from vllm_teach.kvcache.quantized_storage import DequantizedBlocks, QuantizedKVStorage, pack, packed_bytes, unpack
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.kvcache.transfers import Transfer

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 3, 7, 2, 2, 6  # a float32 scale does not start right behind 6 codes
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def there_and_back(x: Tensor) -> Tensor:
    return unpack(pack(x), torch.empty_like(x))


def random_rows(rows: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows of sizes from 1e-3 to 1e3, with a few large numbers each, as keys have."""
    source = torch.Generator().manual_seed(seed)
    size = 10 ** (6 * torch.rand(rows, 1, generator=source) - 3)
    x = torch.randn(rows, head_dim, generator=source)
    return (size * torch.where(torch.rand(x.shape, generator=source) < 0.05, 10 * x, x)).to(dtype)


def make(num_host_blocks: int = 0, swap_file: Path | None = None) -> tuple[QuantizedKVStorage, Tensor, Tensor]:
    """A full cache, and the K and V that it holds, `[layers, BLOCKS, block_size, heads, head_dim]`, once rounded."""
    cache = QuantizedKVStorage(
        LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM, torch.float32, "cpu", num_host_blocks, swap_file
    )
    k, v = (random_rows(LAYERS * BLOCKS * BLOCK_SIZE * HEADS, HEAD_DIM, seed=seed) for seed in (1, 2))
    k, v = (each.view(LAYERS, BLOCKS * BLOCK_SIZE, HEADS, HEAD_DIM) for each in (k, v))
    for layer in range(LAYERS):
        cache.write(layer, torch.arange(BLOCKS * BLOCK_SIZE), k[layer], v[layer])
    return cache, *(there_and_back(each).unflatten(1, (BLOCKS, BLOCK_SIZE)) for each in (k, v))


def read(cache: QuantizedKVStorage, blocks: list[int]) -> tuple[Tensor, Tensor]:
    """K and V of `blocks` in all layers, `[layers, len(blocks), block_size, heads, head_dim]`."""
    step = DequantizedBlocks(cache, torch.tensor([blocks], dtype=torch.int32))
    places = step.block_table[0].long()
    keys, values = (torch.stack([kind[layer][places] for layer in range(LAYERS)]) for kind in (step.keys, step.values))
    return keys, values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 3, 8, 10, 64, 80])
def test_each_number_is_its_nearest_multiple_of_the_scale(dtype: torch.dtype, head_dim: int) -> None:
    x = random_rows(500, head_dim, dtype)
    scale = (x.abs().amax(-1, keepdim=True) / 127).double()  # in x's dtype
    codes = (x.double() / scale).round().clamp(-127, 127)
    wanted = (codes * scale).to(dtype)
    found = there_and_back(x)
    assert pack(x).shape == (500, packed_bytes(head_dim, dtype))
    # In the middle between two codes, float32 and float64 may differ.
    middle = ((x.double() / scale).abs() % 1 - 0.5).abs() < 1e-4
    assert middle.double().mean() < 0.05
    assert torch.equal(found[~middle], wanted[~middle])
    # Half a step, the rounding of the result, and what a scale that was rounded down cuts off.
    cut = (x.double().abs().amax(-1, keepdim=True) - 127 * scale).clamp_min(0)
    tolerance = torch.maximum(scale / 2, cut) + torch.finfo(dtype).eps * x.abs().double()
    assert dtype == torch.float16 or (cut < scale / 2).all()  # float16 has no small scales
    assert ((found.double() - x.double()).abs() <= tolerance * 1.001).all()
    assert dtype == torch.float16 or codes.abs().amax(-1).eq(127).all()  # all of the range is used


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_huge_tiny_and_undefined_numbers(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max / 4
    x = torch.ones(6, 8, dtype=dtype) * torch.tensor([0, 1, largest, 1e-6, 1, 1], dtype=dtype)[:, None]
    x[4, 3], x[5, 2] = torch.nan, torch.inf
    found = there_and_back(x)
    assert not found[0].any()
    assert found[1].tolist() == pytest.approx([1.0] * 8, rel=0.005)
    assert found[2].tolist() == pytest.approx([float(x[2, 0])] * 8, rel=0.005)
    assert (found[3].float() - x[3].float()).abs().max() < 1e-5  # float16 has no smaller scale
    assert found[4:].isnan().all(dim=-1).all()  # an overflow stays one, and shows in the logits


@pytest.mark.parametrize("size", [1e-27, 1e-29, 1e-33, 1e-36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_rows_are_as_exact_as_others(dtype: torch.dtype, size: float) -> None:
    x = (torch.linspace(-1, 1, 33, dtype=torch.float64) * size).to(dtype)
    assert ((there_and_back(x) - x).double().abs() <= x.double().abs().max() / 150).all()


def test_a_token_is_packed_alike_in_every_company() -> None:
    k = random_rows(40, HEAD_DIM).view(20, HEADS, HEAD_DIM)
    assert torch.equal(pack(k), torch.cat([pack(row) for row in k.split(1)]))
    both = torch.cat((k, k), dim=-1)
    assert torch.equal(pack(both[..., :HEAD_DIM]), pack(k))  # a part of a larger matrix


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.52), (torch.float16, 0.52), (torch.float32, 0.27)])
def test_bytes_beside_the_plain_caches(dtype: torch.dtype, most: float) -> None:
    form = (2, 5, 16, 3, 64, dtype, "cpu")
    packed, plain = QuantizedKVStorage(*form, num_host_blocks=4), KVStorage(*form, num_host_blocks=4)
    assert packed.keys.nbytes + packed.values.nbytes == 2 * 2 * 6 * 16 * 3 * packed_bytes(64, dtype)
    for ours, theirs in ((packed.keys, plain.keys), (packed.values, plain.values), (packed.host, plain.host)):
        assert ours.nbytes <= most * theirs.nbytes


def test_scales_go_where_their_blocks_go(tmp_path: Path) -> None:
    cache, keys, values = make(num_host_blocks=3, swap_file=tmp_path / "swap")
    cache.host.fill_(-1)
    cache.apply([Transfer("copy", ((0, 5), (1, 6))), Transfer("swap_out", ((2, 1), (3, 0)))])
    cache.keys[:, [2, 3]] = cache.values[:, [2, 3]] = -1
    cache.apply([Transfer("move", ((5, 2), (6, 5))), Transfer("swap_in", ((0, 6), (1, 3)))])
    found = read(cache, [2, 5, 6, 3, 4])
    for ours, wanted in zip(found, (keys, values), strict=True):
        assert torch.equal(ours, wanted[:, [0, 1, 3, 2, 4]])
    assert (tmp_path / "swap").stat().st_size == cache.host.nbytes


def test_a_steps_blocks_are_each_there_once_and_only_they() -> None:
    """Sequences that share blocks, and one whose gap is the zero block; memory that nobody wrote is NaN."""
    cache, keys, values = make()
    cache.keys[:, [0, 4]] = cache.values[:, [0, 4]] = -1
    table = torch.tensor([[5, 6, 2], [5, 6, 3], [1, cache.zero_block, 6]], dtype=torch.int32)
    step = DequantizedBlocks(cache, table)
    assert (step.block_table.dtype, step.block_table.shape) == (torch.int32, table.shape)
    for layer in range(LAYERS):
        for found, wanted in ((step.keys[layer], keys[layer]), (step.values[layer], values[layer])):
            assert len(found) == len(table.unique()) == 6
            for place, block in zip(step.block_table.flatten().tolist(), table.flatten().tolist(), strict=True):
                assert torch.equal(found[place], torch.zeros_like(wanted[0]) if block == 7 else wanted[block])


def test_blocks_that_follow_one_another_still_do() -> None:
    """Attention reads such a run without gathering it."""
    cache, _, _ = make()
    step = DequantizedBlocks(cache, torch.tensor([[2, 3, 4], [6, 5, 0]], dtype=torch.int32))
    first = step.block_table[0].tolist()
    assert first == list(range(first[0], first[0] + 3))


def test_what_is_written_can_be_read_in_the_same_step() -> None:
    cache, keys, _ = make()
    step = DequantizedBlocks(cache, torch.tensor([[4, 1]], dtype=torch.int32))
    new_k, new_v = (random_rows(HEADS, HEAD_DIM, seed=seed)[None] for seed in (8, 9))
    step.write(1, torch.tensor([1 * BLOCK_SIZE + 1]), new_k, new_v)
    place = int(step.block_table[0, 1])
    assert torch.equal(step.keys[1][place, 1], there_and_back(new_k)[0])
    assert torch.equal(step.values[1][place, 1], there_and_back(new_v)[0])
    assert torch.equal(step.keys[1][place, 0], keys[1, 1, 0])
    assert torch.equal(step.keys[0][place], keys[0, 1])
