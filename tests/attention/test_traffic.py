"""The counts against three independent ones: PyTorch's own record of the products, a brute-force walk, and a pencil."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_teach import counters
from vllm_teach.attention.backward_traffic import (
    backward_working_set_bytes,
    naive_backward_traffic,
    naive_saved_bytes,
    tiled_backward_traffic,
    tiled_saved_bytes,
)
from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.tiled import flash_attention_forward
from vllm_teach.attention.traffic import (
    choose_tile,
    cut,
    key_tile_pairs,
    naive_traffic,
    tile_pairs,
    tiled_traffic,
    working_set_bytes,
)
from vllm_teach.errors import InvalidArgumentError

BIG = 2**40
SIZES = {
    "square": {"batch": 2, "q_len": 50, "kv_len": 50, "q_heads": 2, "kv_heads": 2, "head_dim": 8},
    "chunk": {"batch": 1, "q_len": 23, "kv_len": 61, "q_heads": 9, "kv_heads": 3, "head_dim": 16},
    "blind rows": {"batch": 1, "q_len": 61, "kv_len": 23, "q_heads": 4, "kv_heads": 1, "head_dim": 8},
    "decode": {"batch": 3, "q_len": 1, "kv_len": 100, "q_heads": 2, "kv_heads": 1, "head_dim": 4},
    "no keys": {"batch": 1, "q_len": 3, "kv_len": 0, "q_heads": 2, "kv_heads": 1, "head_dim": 4},
}
DTYPES = {torch.float16: 2, torch.float32: 4, torch.float64: 8}


class Products(TorchDispatchMode):
    """Record what PyTorch itself is asked for: the operands of every matrix product and softmax that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[torch.Size, torch.Size]] = []
        self.softmax_elements = 0
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bmm.default:
            self.products.append((args[0].shape, args[1].shape))
            self.dtypes |= {args[0].dtype, args[1].dtype}
        if function is torch.ops.aten._softmax.default:
            self.softmax_elements += args[0].numel()
        return function(*args, **(kwargs or {}))

    @property
    def flops(self) -> int:
        return sum(2 * left.numel() * right[-1] for left, right in self.products)


def tensors(sizes: dict[str, int], dtype: torch.dtype) -> list[torch.Tensor]:
    q_shape = [sizes[name] for name in ("batch", "q_len", "q_heads", "head_dim")]
    k_shape = [sizes[name] for name in ("batch", "kv_len", "kv_heads", "head_dim")]
    return [torch.randn(shape).to(dtype) for shape in (q_shape, k_shape, k_shape)]


def brute_force_tiled(sizes, input_bytes, causal, tile_q, tile_k, fast_memory, pattern=None):
    """Walk over every pair of tiles and look into the mask itself whether any query in it sees any key in it."""
    q_len, kv_len, head_dim = sizes["q_len"], sizes["kv_len"], sizes["head_dim"]
    wide = max(4, input_bytes)
    mask = torch.ones(q_len, kv_len).tril(kv_len - q_len) if causal else torch.ones(q_len, kv_len)
    if pattern is not None:
        mask = mask * pattern.mask(q_len, kv_len)
    full_q, full_k = min(tile_q, q_len), min(tile_k, kv_len)
    resident = full_q * head_dim * input_bytes + 2 * full_k * head_dim * input_bytes  # the Q, K and V tiles
    resident += full_q * full_k * wide + full_q * head_dim * wide + 2 * full_q * wide  # S; accumulator; m and l
    flops = read = written = 0
    for i in range(0, q_len, tile_q):
        rows = mask[i : i + tile_q]
        read += rows.shape[0] * head_dim * input_bytes
        written += rows.shape[0] * head_dim * input_bytes + rows.shape[0] * wide
        for j in range(0, kv_len, tile_k):
            pair = rows[:, j : j + tile_k]
            if not pair.any():
                continue
            flops += 4 * pair.numel() * head_dim
            read += 2 * pair.shape[1] * head_dim * input_bytes
            if resident > fast_memory:
                overflow = 2 * pair.numel() * wide + pair.shape[0] * (head_dim + 2) * wide
                read, written = read + overflow, written + overflow
    heads = sizes["batch"] * sizes["q_heads"]
    return counters.Work(heads * flops, heads * read, heads * written)


def as_work(tally: counters.Tally) -> counters.Work:
    return counters.Work(tally.flops, tally.bytes_read, tally.bytes_written)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_naive_counts_what_pytorch_was_asked_for(sizes, dtype):
    with counters.count() as tally, Products() as seen:
        naive_attention(*tensors(sizes, dtype), causal=True)
    element = DTYPES[dtype]
    operands = sum(left.numel() + right.numel() for left, right in seen.products)
    results = sum(left[0] * left[1] * right[2] for left, right in seen.products)
    assert len(seen.products) == 2
    assert seen.dtypes == {dtype}  # the plain implementation does not upcast
    assert tally.flops == seen.flops
    assert tally.bytes_read == (operands + seen.softmax_elements) * element
    assert tally.bytes_written == (results + seen.softmax_elements) * element
    assert tally == naive_traffic(**sizes, input_bytes=element)  # in total and step by step


@pytest.mark.parametrize("fast_memory", [BIG, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_tiled_counts_what_pytorch_was_asked_for(sizes, dtype, causal, fast_memory):
    tile_q, tile_k = 16, 7
    with counters.count(fast_memory) as tally, Products() as seen:
        flash_attention_forward(*tensors(sizes, dtype), causal=causal, tile_q=tile_q, tile_k=tile_k)
    element = DTYPES[dtype]
    assert tally.flops == seen.flops
    assert as_work(tally) == brute_force_tiled(sizes, element, causal, tile_q, tile_k, fast_memory)
    arguments = {"causal": causal, "tile_q": tile_q, "tile_k": tile_k, "fast_memory_bytes": fast_memory}
    assert tally == tiled_traffic(**sizes, input_bytes=element, **arguments)  # in total and step by step
    if fast_memory == BIG:
        group = sizes["q_heads"] // sizes["kv_heads"]  # the products share a K or V tile, a GPU's programs do not
        loaded = group * element * sum(right.numel() for _, right in seen.products)
        assert tally.bytes_read - tally.by_name["tiled.queries"].bytes_read == loaded


PATTERNS = {
    "window": LocalWindow(9, 4),
    "two diagonals": LocalWindow(2, 0) | (Causal() & ~LocalWindow(30, 30)),
    "the future": ~Causal(),
    "nothing": Causal() & ~Causal(),
}


@pytest.mark.parametrize("fast_memory", [BIG, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_only_tiles_in_which_a_query_sees_a_key_are_charged(sizes, pattern, causal, fast_memory):
    tile_q, tile_k = 8, 7
    arguments = {"causal": causal, "pattern": pattern, "tile_q": tile_q, "tile_k": tile_k}
    with counters.count(fast_memory) as tally, Products() as seen:
        flash_attention_forward(*tensors(sizes, torch.float32), **arguments)
    assert tally.flops == seen.flops
    assert as_work(tally) == brute_force_tiled(sizes, 4, causal, tile_q, tile_k, fast_memory, pattern)
    assert tally == tiled_traffic(**sizes, input_bytes=4, **arguments, fast_memory_bytes=fast_memory)


@pytest.mark.parametrize("pattern", [None, Causal(), *PATTERNS.values()], ids=["none", "causal", *PATTERNS])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_pairs_by_query_and_by_key_are_the_tile_map(sizes, pattern):
    shape, tile_q, tile_k = AttentionShape(**sizes), 6, 11
    by_query = {
        (rows, keys): kind for rows, tiles in tile_pairs(shape, pattern, tile_q, tile_k) for keys, kind in tiles
    }
    by_key = {
        (rows, keys): kind for keys, tiles in key_tile_pairs(shape, pattern, tile_q, tile_k) for rows, kind in tiles
    }
    assert by_query == by_key
    mask = torch.ones(shape.q_len, shape.kv_len, dtype=torch.bool)
    mask = mask if pattern is None else pattern.mask(shape.q_len, shape.kv_len)
    for q_start in range(0, shape.q_len, tile_q):
        for k_start in range(0, shape.kv_len, tile_k):
            rows, keys = (q_start, min(q_start + tile_q, shape.q_len)), (k_start, min(k_start + tile_k, shape.kv_len))
            tile = mask[slice(*rows), slice(*keys)]
            assert by_query.get((rows, keys), 0) == tile.any().int() + tile.all().int()  # EMPTY 0, PARTIAL 1, FULL 2
    assert [rows for rows, _ in tile_pairs(shape, pattern, 6, 11)] == cut(shape.q_len, 6)
    assert [keys for keys, _ in key_tile_pairs(shape, pattern, 6, 11)] == cut(shape.kv_len, 11)


@pytest.mark.parametrize(("tile_q", "tile_k"), [(16, 7), (64, 16), (256, 512)])
@pytest.mark.parametrize(("dtype", "element"), DTYPES.items())
def test_a_tile_pair_spills_from_the_first_byte_that_does_not_fit(dtype, element, tile_q, tile_k):
    sizes, wide = SIZES["chunk"], max(4, element)  # 23 queries, 61 keys, head_dim 16
    rows, keys = min(tile_q, 23), min(tile_k, 61)
    resident = (rows + 2 * keys) * 16 * element + (rows * keys + rows * 16 + rows + rows) * wide
    assert working_set_bytes(rows, keys, 16, element) == resident
    moved = {}
    for fast_memory in (resident - 1, resident):
        with counters.count(fast_memory) as tally:
            flash_attention_forward(*tensors(sizes, dtype), tile_q=tile_q, tile_k=tile_k)
        moved[fast_memory] = as_work(tally)
        assert as_work(tally) == brute_force_tiled(sizes, element, False, tile_q, tile_k, fast_memory)
        arguments = {"tile_q": tile_q, "tile_k": tile_k, "fast_memory_bytes": fast_memory}
        assert tally == tiled_traffic(**sizes, input_bytes=element, **arguments)
    assert moved[resident - 1].bytes_written > moved[resident].bytes_written


def test_an_explicit_mask_and_a_returned_lse_are_counted():
    q, k, v = tensors(SIZES["square"], torch.float16)
    with counters.count() as plain:
        naive_attention(q, k, v)
    with counters.count() as more:
        naive_attention(q, k, v, mask=torch.ones(50, 50, dtype=torch.bool), return_lse=True)
    assert more.bytes_read - plain.bytes_read == 50 * 50
    assert more.bytes_written - plain.bytes_written == 2 * 2 * 50 * 2
    assert more.flops == plain.flops


def test_a_small_case_by_hand():
    """4 queries, 4 keys, head_dim 2, float16, tiles of 2, causal: 3 of the 4 tile pairs are visited."""
    sizes = {"batch": 1, "q_len": 4, "kv_len": 4, "q_heads": 1, "kv_heads": 1, "head_dim": 2, "input_bytes": 2}
    tiled = tiled_traffic(**sizes, causal=True, tile_q=2, tile_k=2)
    assert tiled.flops == 3 * (2 * 2 * 2 * 2) * 2
    assert tiled.bytes_read == 16 + 3 * (8 + 8)  # Q; a K and a V tile per pair
    assert tiled.bytes_written == 16 + 4 * 4  # O; lse in float32
    naive = naive_traffic(**sizes)
    assert naive.flops == 2 * (2 * 4 * 4 * 2)
    assert naive.bytes_read == 16 + 16 + 32 + 32 + 16  # Q, K, S, P, V
    assert naive.bytes_written == 32 + 32 + 16  # S, P, O


def test_at_4096_tokens_the_tiled_forward_moves_at_least_five_times_fewer_bytes():
    fast_memory = 100_000
    q, k, v = (torch.randn(1, 4096, 1, 64).half() for _ in range(3))
    tile_q, tile_k = choose_tile(64, 2, fast_memory)
    with counters.count(fast_memory) as tiled:
        flash_attention_forward(q, k, v, causal=True, tile_q=tile_q, tile_k=tile_k)
    with counters.count(fast_memory) as naive:
        naive_attention(q, k, v, causal=True)
    ratio = naive.bytes_moved / tiled.bytes_moved
    print(f"tile {tile_q} x {tile_k}: naive {naive.bytes_moved:,} B, tiled {tiled.bytes_moved:,} B, {ratio:.2f} x")
    assert naive.bytes_moved == 4 * 4096 * 64 * 2 + 4 * 4096**2 * 2
    assert ratio >= 5


def test_the_figures_of_lesson_2():
    """4,096 tokens, one head of 64, float16, tiles of 128 x 64."""
    sizes = {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 1, "kv_heads": 1, "head_dim": 64, "input_bytes": 2}
    assert naive_traffic(**sizes).bytes_moved == 136_314_880
    assert tiled_traffic(**sizes, tile_q=128, tile_k=64).bytes_moved == 34_619_392
    for mask in ({"causal": True}, {"pattern": Causal()}, {"pattern": LocalWindow(-1, 0)}):
        assert tiled_traffic(**sizes, tile_q=128, tile_k=64, **mask).bytes_moved == 18_366_464
    window = tiled_traffic(**sizes, tile_q=128, tile_k=64, pattern=LocalWindow(511, 0))
    # Two q tiles see 2 k tiles of 64 more than the one before, up to 10: 128 queries and the 511 keys before them.
    pairs = 2 + 4 + 6 + 8 + 28 * 10
    assert window.bytes_moved == pairs * 2 * 64 * 64 * 2 + 2 * 4096 * 64 * 2 + 4096 * 4


def test_naive_bytes_grow_with_the_square_and_so_do_those_of_a_tile_that_does_not_fit():
    sizes = {"batch": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 64, "input_bytes": 2}
    naive = [naive_traffic(q_len=n, kv_len=n, **sizes).bytes_moved for n in (8192, 16384)]
    assert naive[1] / naive[0] == pytest.approx(4, rel=0.01)
    whole = tiled_traffic(q_len=8192, kv_len=8192, tile_q=8192, tile_k=8192, **sizes)
    assert whole.bytes_moved > naive[0]  # one tile as large as the matrix is the naive algorithm, in float32


@pytest.mark.parametrize("fast_memory", [1_000, 20_000, 48 * 1024, 100 * 1024, 227 * 1024, 1_000_000])
@pytest.mark.parametrize("input_bytes", [2, 4, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_choose_tile_takes_the_tallest_tile_that_fits(head_dim, input_bytes, fast_memory):
    smallest = working_set_bytes(1, 1, head_dim, input_bytes)
    if smallest > fast_memory:
        with pytest.raises(InvalidArgumentError, match=f"{fast_memory}.*need {smallest}"):
            choose_tile(head_dim, input_bytes, fast_memory)
        return
    powers = [2**i for i in range(15)]
    fitting = [
        (tile_q, tile_k)
        for tile_q in powers
        for tile_k in powers
        if min(16, tile_q) <= tile_k <= tile_q
        and working_set_bytes(tile_q, tile_k, head_dim, input_bytes) <= fast_memory
    ]
    assert choose_tile(head_dim, input_bytes, fast_memory) == max(fitting)


def test_known_tiles():
    assert choose_tile(64, 2, 100 * 1024) == (128, 64)
    assert choose_tile(128, 2, 100 * 1024) == (64, 64)


@pytest.mark.parametrize("argument", ["head_dim", "input_bytes", "fast_memory_bytes"])
@pytest.mark.parametrize("value", [0, 2.5])
def test_choose_tile_refuses_what_is_not_positive(argument, value):
    arguments = {"head_dim": 64, "input_bytes": 2, "fast_memory_bytes": 1000, argument: value}
    with pytest.raises(InvalidArgumentError, match=f"^{argument} is {value}; .*\\.$"):
        choose_tile(**arguments)


def test_the_cost_of_asking_grows_with_the_q_tiles_and_not_with_the_pairs(monkeypatch):
    """Counted in calls of `charge`, since seconds depend on the machine."""
    sizes = {"batch": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 64, "input_bytes": 2, "causal": True}
    charge, calls = counters.Tally.charge, []
    monkeypatch.setattr(counters.Tally, "charge", lambda *args, **kwargs: calls.append(charge(*args, **kwargs)))
    tiled_traffic(q_len=131_072, kv_len=131_072, **sizes)
    assert 2 * 1024 <= len(calls) <= 3 * 1024


@pytest.mark.parametrize(
    "change",
    [
        {"q_len": -5},
        {"kv_len": -1},
        {"batch": -2},
        {"head_dim": 0},
        {"q_heads": 0},
        {"kv_heads": 0},
        {"input_bytes": 0},
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(change):
    ((name, value),) = change.items()
    for traffic in (naive_traffic, tiled_traffic):
        with pytest.raises(InvalidArgumentError, match=f"^{name} is {value}; .*\\.$"):
            traffic(**SIZES["square"] | {"input_bytes": 2} | change)


@pytest.mark.parametrize(
    "change", [{"tile_q": 0}, {"tile_q": -3}, {"tile_k": -1}, {"tile_k": 0}, {"tile_q": 1.5}], ids=str
)
def test_tiles_that_cannot_be_are_refused(change):
    ((name, value),) = change.items()
    with pytest.raises(InvalidArgumentError, match=f"^{name} is {value}; .*\\.$"):
        tiled_traffic(**SIZES["square"], input_bytes=2, **change)
    with pytest.raises(InvalidArgumentError, match=f"^{name} is {value}; .*\\.$"):
        list(tile_pairs(AttentionShape(**SIZES["square"]), Causal(), **{"tile_q": 16, "tile_k": 16} | change))
    with pytest.raises(InvalidArgumentError, match=f"^{name} is {value}; .*\\.$"):
        list(key_tile_pairs(AttentionShape(**SIZES["square"]), None, **{"tile_q": 16, "tile_k": 16} | change))


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"^pattern is of type str; .*\.$"):
        tiled_traffic(**SIZES["square"], input_bytes=2, pattern="causal")


def test_a_fast_memory_of_nothing_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"^fast_memory_bytes is 0; .*\.$"):
        tiled_traffic(**SIZES["square"], input_bytes=2, fast_memory_bytes=0)


def test_choose_tile_takes_numpy_integers():
    assert choose_tile(np.int64(64), np.int32(2), np.int64(100_000)) == choose_tile(64, 2, 100_000)


LARGE = {"batch": 8, "q_len": 65_536, "kv_len": 65_536, "q_heads": 64, "kv_heads": 8, "head_dim": 128, "input_bytes": 2}


@pytest.mark.parametrize(
    "count",
    [
        naive_traffic,
        tiled_traffic,
        naive_backward_traffic,
        tiled_backward_traffic,
        naive_saved_bytes,
        tiled_saved_bytes,
    ],
)
def test_numpys_numbers_do_not_overflow(count):
    assert count(**{name: np.int32(value) for name, value in LARGE.items()}) == count(**LARGE)


@pytest.mark.parametrize("working_set", [working_set_bytes, backward_working_set_bytes])
def test_a_working_set_has_sizes(working_set):
    big = (np.int32(65_536), np.int32(65_536), np.int32(128), np.int32(2))
    assert working_set(*big) == working_set(*map(int, big))
    for i, name in enumerate(("tile_q", "tile_k", "head_dim", "input_bytes")):
        sizes = [1, 1, 1, 1]
        sizes[i] = 0
        with pytest.raises(InvalidArgumentError, match=f"^{name} is 0;"):
            working_set(*sizes)
