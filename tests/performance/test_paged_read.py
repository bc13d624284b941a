from itertools import pairwise

import pytest
import torch

from vllm_teach import backends
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.paged_read import decode_call, measure_paged_reads


@pytest.mark.parametrize("place", ["one run", "scattered"])
def test_every_sequence_has_keys_of_its_own(place: str) -> None:
    q, k, _, layout = decode_call(30, 8, 3, place)
    assert q.shape == (3, 9, 64)
    assert k.shape == (24, 8, 3, 64)  # twice the blocks it takes
    blocks = layout.block_table.flatten().tolist()
    assert len(set(blocks)) == len(blocks) == 3 * 4
    assert layout.kv_lens.tolist() == [30, 30, 30]
    in_order = all(b == a + 1 for row in layout.block_table.tolist() for a, b in pairwise(row))
    assert in_order == (place == "one run")


@pytest.mark.parametrize("place", ["one run", "scattered"])
def test_it_is_the_attention_over_the_blocks(place: str) -> None:
    q, k, v, layout = decode_call(30, 8, 3, place)
    out = backends.attend(q, k, v, backend="sdpa", layout=layout, causal=True)
    for index, row in enumerate(layout.block_table.long()):
        keys, values = (part[row].flatten(0, 1)[:30] for part in (k, v))
        alone = backends.attend(q[index][None, None], keys[None], values[None], backend="naive", causal=True)
        torch.testing.assert_close(out[index], alone[0, 0], rtol=1e-5, atol=1e-5)


def test_another_place_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="place='here'"):
        decode_call(8, 4, 1, "here")


def test_it_measures_every_block_size() -> None:
    read = measure_paged_reads("sdpa", 16, [4, 8], sequences=2, rounds=2)
    assert (read.backend, read.block_sizes) == ("sdpa", (4, 8))
    assert len(read.one_run) == len(read.scattered) == len(read.ratios) == 2
    assert min(*read.one_run, *read.scattered, *read.ratios) > 0
