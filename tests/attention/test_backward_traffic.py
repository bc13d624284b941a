"""The backward counts against PyTorch's own record of the products, a brute-force walk, and a pencil."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_teach import counters
from vllm_teach.attention.backward_traffic import (
    backward_working_set_bytes,
    choose_backward_tile,
    naive_backward_traffic,
    naive_saved_bytes,
    tiled_backward_traffic,
    tiled_saved_bytes,
)
from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.tiled import flash_attention
from vllm_teach.attention.traffic import naive_traffic, tiled_traffic
from vllm_teach.errors import InvalidArgumentError

BIG = 2**40
SIZES = {
    "square": {"batch": 2, "q_len": 50, "kv_len": 50, "q_heads": 2, "kv_heads": 2, "head_dim": 8},
    "chunk": {"batch": 1, "q_len": 23, "kv_len": 61, "q_heads": 9, "kv_heads": 3, "head_dim": 16},
    "blind rows": {"batch": 1, "q_len": 61, "kv_len": 23, "q_heads": 4, "kv_heads": 1, "head_dim": 8},
    "one query": {"batch": 3, "q_len": 1, "kv_len": 100, "q_heads": 2, "kv_heads": 1, "head_dim": 4},
    "no keys": {"batch": 1, "q_len": 3, "kv_len": 0, "q_heads": 2, "kv_heads": 1, "head_dim": 4},
}
DTYPES = {torch.float16: 2, torch.float32: 4, torch.float64: 8}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"pattern": LocalWindow(9, 4)},
    "future": {"pattern": ~Causal()},
}


class Products(TorchDispatchMode):
    """Record what PyTorch itself is asked for: operands of matrix products, of softmax's derivative, and of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[torch.Size, torch.Size]] = []
        self.softmax_elements = 0
        self.summed: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bmm.default:
            self.products.append((args[0].shape, args[1].shape))
        if function is torch.ops.aten._softmax_backward_data.default:
            self.softmax_elements += args[0].numel()
        if function is torch.ops.aten.sum.dim_IntList:
            self.summed.append(args[0].numel())
        return function(*args, **(kwargs or {}))

    @property
    def flops(self) -> int:
        return sum(2 * left.numel() * right[-1] for left, right in self.products)


def inputs(sizes: dict[str, int], dtype: torch.dtype) -> list[torch.Tensor]:
    q_shape = [sizes[name] for name in ("batch", "q_len", "q_heads", "head_dim")]
    k_shape = [sizes[name] for name in ("batch", "kv_len", "kv_heads", "head_dim")]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in (q_shape, k_shape, k_shape)]


def backward_of(out: torch.Tensor, qkv: list[torch.Tensor]) -> None:
    torch.autograd.grad(out, qkv, torch.ones_like(out))


def brute_force(sizes, input_bytes, mask, tile_q, tile_k, fast_memory) -> counters.Work:
    """Walk over every pair of tiles, key tiles outside, and look into the mask itself."""
    q_len, kv_len, d = sizes["q_len"], sizes["kv_len"], sizes["head_dim"]
    wide = max(4, input_bytes)
    full_q, full_k = min(tile_q, q_len), min(tile_k, kv_len)
    resident = 2 * full_q * d * input_bytes + 2 * full_k * d * input_bytes  # Q, dO, K and V tiles
    resident += 2 * full_q * full_k * wide  # P and dS
    resident += 2 * full_k * d * wide + full_q * d * wide + 2 * full_q * wide  # dK, dV, a part of dQ, lse and D
    flops = read = written = 0
    for j in range(0, kv_len, tile_k):
        for i in range(0, q_len, tile_q):
            pair = mask[i : i + tile_q, j : j + tile_k]
            if not pair.any():
                continue
            rows, keys = pair.shape
            flops += 5 * 2 * rows * keys * d
            read += rows * (2 * d * input_bytes + 2 * wide + d * wide)  # Q, dO, lse, D, dQ
            written += rows * d * wide  # dQ
            if resident > fast_memory:
                overflow = (4 * rows * keys + 2 * keys * d) * wide
                read, written = read + overflow, written + overflow
    read += 2 * q_len * d * input_bytes  # dO and O, for D
    written += q_len * wide + q_len * d * wide  # D, and zeros into dQ
    if input_bytes == 2:
        read, written = read + q_len * d * wide, written + q_len * d * input_bytes  # dQ, rounded
    heads, kv_heads = sizes["batch"] * sizes["q_heads"], sizes["batch"] * sizes["kv_heads"]
    both = 2 * kv_heads * kv_len * d * input_bytes  # K and V; dK and dV
    return counters.Work(heads * flops, heads * read + both, heads * written + both)


@pytest.mark.parametrize("fast_memory", [BIG, 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_tiled_backward_counts_what_pytorch_was_asked_for(sizes, dtype, mask, fast_memory):
    arguments, element = MASKS[mask] | {"tile_q": 16, "tile_k": 7}, DTYPES[dtype]
    qkv = inputs(sizes, dtype)
    out = flash_attention(*qkv, **arguments)
    with counters.count(fast_memory) as tally, Products() as seen:
        backward_of(out, qkv)
    assert tally.flops == seen.flops
    visible = torch.ones(sizes["q_len"], sizes["kv_len"])
    visible = visible.tril(sizes["kv_len"] - sizes["q_len"]) if mask == "causal" else visible
    visible = arguments["pattern"].mask(*visible.shape) if "pattern" in arguments else visible
    work = counters.Work(tally.flops, tally.bytes_read, tally.bytes_written)
    assert work == brute_force(sizes, element, visible, 16, 7, fast_memory)
    assert tally == tiled_backward_traffic(**sizes, input_bytes=element, fast_memory_bytes=fast_memory, **arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [size for size in SIZES.values() if size["kv_len"]], ids=list(SIZES)[:-1])
def test_the_naive_formula_is_what_autograd_asks_pytorch_for(sizes, dtype):
    qkv = inputs(sizes, dtype)
    out = naive_attention(*qkv)
    with counters.count() as tally, Products() as seen:
        backward_of(out, qkv)
    work, element = naive_backward_traffic(**sizes, input_bytes=DTYPES[dtype]), DTYPES[dtype]
    assert len(seen.products) == 4
    assert work.flops == seen.flops
    operands = sum(left.numel() + right.numel() for left, right in seen.products)
    results = sum(left[0] * left[1] * right[2] for left, right in seen.products)
    group = sizes["q_heads"] // sizes["kv_heads"]
    keys = 2 * sizes["batch"] * sizes["q_heads"] * sizes["kv_len"] * sizes["head_dim"] if group > 1 else 0
    assert sum(sorted(seen.summed)[-2:]) == keys or group == 1  # dK and dV, over the heads that share a key head
    assert work.bytes_read == (operands + 2 * seen.softmax_elements + keys) * element
    assert work.bytes_written == (results + seen.softmax_elements + keys // group) * element
    assert tally.by_name == {}  # autograd reports nothing


def test_a_gradient_of_lse_is_read_once():
    qkv = inputs(SIZES["square"], torch.float16)
    tallies = []
    for uses_lse in (False, True):
        out, lse = flash_attention(*qkv, return_lse=True)
        with counters.count() as tally:
            torch.autograd.grad([out, lse] if uses_lse else [out], qkv, [torch.ones_like(out), lse][: 1 + uses_lse])
        tallies.append(tally)
    assert tallies[1].bytes_read - tallies[0].bytes_read == 2 * 2 * 50 * 4
    assert tallies[1].bytes_written == tallies[0].bytes_written


def test_a_small_case_by_hand():
    """4 queries, 4 keys, head_dim 2, float32, tiles of 2, causal: 3 of the 4 tile pairs are visited."""
    sizes = {"batch": 1, "q_len": 4, "kv_len": 4, "q_heads": 1, "kv_heads": 1, "head_dim": 2, "input_bytes": 4}
    tiled = tiled_backward_traffic(**sizes, causal=True, tile_q=2, tile_k=2)
    assert tiled.flops == 3 * 5 * (2 * 2 * 2 * 2)
    # dO and O for D; K and V; per pair Q, dO and dQ, and lse and D.
    assert tiled.bytes_read == 2 * 32 + 2 * 32 + 3 * (3 * 16 + 2 * 8)
    assert tiled.bytes_written == 16 + 32 + 2 * 32 + 3 * 16  # D, zeros in dQ; dK and dV; per pair dQ
    naive = naive_backward_traffic(**sizes)
    assert naive.flops == 4 * (2 * 4 * 4 * 2)
    assert naive.bytes_read == (64 + 32) + (32 + 32) + 2 * 64 + (64 + 32) + (64 + 32)  # P dO, dO V, P dP, dS K, dS Q
    assert naive.bytes_written == 32 + 64 + 64 + 32 + 32  # dV, dP, dS, dQ, dK


def test_the_flops_that_are_paid_and_the_bytes_that_are_saved():
    """Without a mask, training costs 7 products instead of 6; the bytes kept shrink from n² to n."""
    sizes = {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 8, "kv_heads": 8, "head_dim": 64, "input_bytes": 2}
    naive = naive_traffic(**sizes).flops + naive_backward_traffic(**sizes).flops
    tiled = tiled_traffic(**sizes).flops + tiled_backward_traffic(**sizes).flops
    assert tiled * 6 == naive * 7
    assert naive_saved_bytes(**sizes) == 3 * 8 * 4096 * 64 * 2 + 8 * 4096**2 * 2
    assert tiled_saved_bytes(**sizes) == 4 * 8 * 4096 * 64 * 2 + 8 * 4096 * 4


def test_kept_bytes_are_what_autograd_keeps():
    sizes = SIZES["square"]
    for attend, formula in ((naive_attention, naive_saved_bytes), (flash_attention, tiled_saved_bytes)):
        kept: dict[int, int] = {}
        q, k, v = inputs(sizes, torch.float16)

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = attend(q, k, v)
        assert sum(kept.values()) == formula(**sizes, input_bytes=2)
        del result


@pytest.mark.parametrize("fast_memory", [1_000, 20_000, 100 * 1024, 227 * 1024, 1_000_000])
@pytest.mark.parametrize("input_bytes", [2, 4, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_choose_backward_tile_takes_the_widest_tile_that_fits(head_dim, input_bytes, fast_memory):
    smallest = backward_working_set_bytes(1, 1, head_dim, input_bytes)
    if smallest > fast_memory:
        with pytest.raises(InvalidArgumentError, match=f"{fast_memory}.*need {smallest}"):
            choose_backward_tile(head_dim, input_bytes, fast_memory)
        return
    powers = [2**i for i in range(15)]
    fitting = [
        (tile_k, tile_q)
        for tile_k in powers
        for tile_q in powers
        if min(16, tile_k) <= tile_q <= tile_k
        and backward_working_set_bytes(tile_q, tile_k, head_dim, input_bytes) <= fast_memory
    ]
    assert choose_backward_tile(head_dim, input_bytes, fast_memory) == max(fitting)[::-1]


def test_a_pair_spills_from_the_first_byte_that_does_not_fit():
    sizes, resident = SIZES["chunk"], backward_working_set_bytes(16, 7, 16, 4)
    arguments = {"input_bytes": 4, "tile_q": 16, "tile_k": 7}
    fits, spills = (tiled_backward_traffic(**sizes, **arguments, fast_memory_bytes=resident - n) for n in (0, 1))
    spilled = 9 * sum((4 * rows * keys + 2 * keys * 16) * 4 for rows in (16, 7) for keys in (*[7] * 8, 5))
    assert (spills.bytes_read - fits.bytes_read, spills.bytes_written - fits.bytes_written) == (spilled, spilled)


@pytest.mark.parametrize("change", [{"q_len": -5}, {"head_dim": 0}, {"kv_heads": 0}, {"input_bytes": 0}], ids=str)
def test_sizes_that_cannot_be_are_refused(change):
    ((name, value),) = change.items()
    for formula in (naive_backward_traffic, tiled_backward_traffic, naive_saved_bytes, tiled_saved_bytes):
        with pytest.raises(InvalidArgumentError, match=f"^{name} is {value}; .*\\.$"):
            formula(**SIZES["square"] | {"input_bytes": 2} | change)


@pytest.mark.parametrize("name", ["tile_q", "tile_k", "fast_memory_bytes"])
def test_tiles_and_memories_of_nothing_are_refused(name):
    with pytest.raises(InvalidArgumentError, match=f"^{name} is 0; .*\\.$"):
        tiled_backward_traffic(**SIZES["square"], input_bytes=2, **{name: 0})
