"""The block-sparse kernel: it agrees with the mask, and it visits the listed tiles and no other."""

from dataclasses import dataclass

import pytest
import torch

from vllm_teach.attention.patterns import BlockSparsePattern, Causal, GlobalTokens, LocalWindow, Pattern
from vllm_teach.attention.patterns.base import TileKind
from vllm_teach.attention.patterns.tile_csr import tile_csr
from vllm_teach.attention.reference import naive_attention
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.triton_kernels.block_sparse_forward import TileLists, block_sparse_attention, block_sparse_spec
from vllm_teach.kernels.triton_kernels.problem import Options


@dataclass(frozen=True)
class Scattered(Pattern):
    """No rule that a kernel could know: every tile is PARTIAL or EMPTY, and no two masks are alike."""

    def sees(self, q_pos, k_pos):
        return ((q_pos * 7 + k_pos * 3) % 11 < 3) & (k_pos < 40)


PATTERNS = {
    "causal": Causal(),
    "sinks and window": Causal() & (GlobalTokens(4) | LocalWindow(9)),
    "scattered": Scattered(),
    "blocks": BlockSparsePattern([[(a + 2 * b) % 3 == 0 for b in range(5)] for a in range(5)], 16),
    "nothing": Causal() & ~Causal(),
}


def lists_of(pattern, q_len, kv_len, tile=(32, 16)):
    csr = tile_csr(pattern, q_len, kv_len, *tile)
    full = csr.kind == TileKind.FULL
    return TileLists.of(csr.row_ptr, csr.k_tile, full, csr.mask_index, csr.masks, torch.device("cpu"))


@pytest.mark.parametrize("lengths", [(70, 70), (1, 37), (33, 60), (60, 20)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_out_and_lse(pattern, lengths, make_qkv, assert_by_the_rule):
    q, k, v = make_qkv(*lengths)
    out, lse = block_sparse_attention(q, k, v, lists_of(pattern, *lengths))
    exact, exact_lse = naive_attention(q.double(), k.double(), v.double(), pattern=pattern, return_lse=True)
    assert_by_the_rule(out, naive_attention(q, k, v, pattern=pattern), exact)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)


def test_softcap_alibi_and_scale_in_float16(make_qkv, assert_by_the_rule):
    q, k, v = make_qkv(40, 50, torch.float16, heads=(4, 2))
    variant = {"softcap": 2.0, "alibi_slopes": torch.rand(4), "scale": 0.3}
    options = Options(scale=0.3, softcap=2.0, slopes=variant["alibi_slopes"])
    out, _ = block_sparse_attention(q, k, v, lists_of(Scattered(), 40, 50), options)
    exact = naive_attention(q.double(), k.double(), v.double(), pattern=Scattered(), **variant)
    assert_by_the_rule(out, naive_attention(q, k, v, pattern=Scattered(), **variant), exact)


def test_tiles_outside_the_lists_are_not_read(make_qkv):
    pattern = BlockSparsePattern([[a == b for b in range(4)] for a in range(4)], 16)
    q, k, v = make_qkv(64, 64)
    lists = lists_of(pattern, 64, 64, tile=(16, 16))
    expected, _ = block_sparse_attention(q, k, v, lists)
    k[:, 16:32], v[:, 16:32] = torch.nan, torch.nan
    out, _ = block_sparse_attention(q, k, v, lists)
    assert out[:, 16:32].isnan().all()
    assert torch.equal(out[:, :16], expected[:, :16])
    assert torch.equal(out[:, 32:], expected[:, 32:])


def test_full_tiles_come_first_and_need_no_mask():
    pattern = Causal() & (GlobalTokens(16) | LocalWindow(9))
    csr = tile_csr(pattern, 70, 70, 16, 16)
    lists = lists_of(pattern, 70, 70, tile=(16, 16))
    kinds = pattern.tile_map(70, 70, 16, 16)
    for row in range(len(kinds)):
        begin, full_end, end = lists.starts[row], lists.full_ends[row], lists.starts[row + 1]
        full, partial = lists.k_tile[begin:full_end].tolist(), lists.k_tile[full_end:end].tolist()
        assert full == torch.nonzero(kinds[row] == TileKind.FULL).flatten().tolist()
        assert partial == torch.nonzero(kinds[row] == TileKind.PARTIAL).flatten().tolist()
        assert (lists.mask_index[full_end:end] >= 0).all()
    assert len(lists.k_tile) == len(csr.k_tile)


def test_the_specification_beside_the_kernel_is_what_it_computes(make_qkv):
    q, k, v = make_qkv(40, 50, batch=1, heads=(1, 1))
    out, _ = block_sparse_attention(q, k, v, lists_of(Scattered(), 40, 50), Options(scale=0.2))
    visible = Scattered().mask(40, 50)
    expected = block_sparse_spec(q[0, :, 0], k[0, :, 0], v[0, :, 0], visible, 0.2)
    torch.testing.assert_close(out[0, :, 0], expected, rtol=0, atol=1e-6)


def test_nothing_in_nothing_out(make_qkv):
    for lengths in ((0, 5), (5, 0)):
        q, k, v = make_qkv(*lengths)
        out, lse = block_sparse_attention(q, k, v, lists_of(Causal(), *lengths))
        assert out.shape == q.shape
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def test_wrong_lists_and_options_are_refused(make_qkv):
    q, k, v = make_qkv(70, 70)
    lists = lists_of(Causal(), 70, 70)
    with pytest.raises(InvalidArgumentError, match=r"lists are of 3 tiles of 32 queries on cpu, and q has 20 queries"):
        block_sparse_attention(q[:, :20], k, v, lists)
    for options in (Options(right=0), Options(left=3), Options(dropout_p=0.1)):
        with pytest.raises(InvalidArgumentError, match=r"the tile lists hold every mask here"):
            block_sparse_attention(q, k, v, lists, options)
