"""A matrix product with weights of 2 to 8 bits: each tile of the matrix is dequantised in registers and multiplied.

A decode step reads every weight once for a few tokens, so its time is the weights' bytes: with 4 bits it reads a
quarter of float16's (Frantar et al., arXiv 2210.17323, section "Practical Speedups"). The full matrix is never written
anywhere.

Layout: the matrix lies transposed, `[in, out]`, so that neighbouring threads read neighbouring outputs' weights, and a
byte holds codes of columns that lie PART apart, not beside each other. All low parts of a tile's bytes are then PART
neighbouring columns, and so are all high parts: each is a tile of its own for `tl.dot`, and no code changes its place.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError

from .paged_decode import choose_splits
from .problem import DTYPES, check_device, last_contiguous
from .tile_math import dot_precision

PART = 32
# How many bits a code takes: two or four codes, or one, fill a byte. Three bits are stored as four.
STORED_BITS = {2: 2, 3: 4, 4: 4, 8: 8}


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight `[out, in]` in this kernel's layout, made by `pack`.

    `codes` is uint8 `[chunks * PART, out]`: row c * PART + j holds, from its low bits on, the codes of the columns
    c * chunk + j, c * chunk + PART + j, …, where a chunk has PART columns for each code of a byte. `scales` float16 and
    `zeros` uint8 are `[groups, out]`, and a group is a run of `group_size` columns (the last may be shorter). The
    columns are those of the weight or, with `order` int64 `[in]`, column i here is column order[i] there: GPTQ's
    act-order scatters a group, and here its columns lie together.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    in_features: int
    group_size: int
    order: Tensor | None = None

    @property
    def out_features(self) -> int:
        """How many rows the weight has."""
        return self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """How many bytes the tensors take."""
        tensors = (self.codes, self.scales, self.zeros, *(() if self.order is None else (self.order,)))
        return sum(tensor.nbytes for tensor in tensors)


def dequantize_matmul_spec(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return x `[tokens, in]` times the transposed weight `[out, in]`; a group is a run of in / groups columns."""
    group = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    weight = (codes.float() - zeros.float()[:, group]) * scales.float()[:, group]  # [out, in]
    return x @ weight.to(x.dtype).T


# Sizes divisible by 16, which Triton finds out by itself, allow loads of 16 bytes up to the matrix's edge.
@triton.jit(do_not_specialize=["tokens", "group_size", "groups", "chunks", "splits"])
def dequantize_matmul_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_row: tl.tensor,
    codes_row: tl.tensor,
    tokens: tl.tensor,
    in_features: tl.tensor,
    out_features: tl.tensor,
    group_size: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    splits: tl.tensor,
    STORED: tl.constexpr,
    PART: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write one split's tile of out `[splits, tokens, out_features]`: the sum over its share of the chunks.

    With ONE_GROUP, the PART columns of a tile have the same scale. The bias is the first split's.
    """
    PER_BYTE: tl.constexpr = 8 // STORED
    tiles_n = tl.cdiv(out_features, TILE_N)
    split = tl.program_id(0) % splits
    tile_n = tl.program_id(0) // splits % tiles_n
    tile_m = tl.program_id(0) // splits // tiles_n
    rows = (tile_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    outs = tile_n * TILE_N + tl.arange(0, TILE_N)
    is_row, is_out = rows < tokens, outs < out_features
    parts = tl.arange(0, PART)

    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    share = tl.cdiv(chunks, splits)
    for chunk in range(split * share, tl.minimum(split * share + share, chunks)):
        lines = (chunk * PART + parts).to(tl.int64)
        packed = tl.load(codes_ptr + lines[:, None] * codes_row + outs[None, :], mask=is_out[None, :], other=0)
        packed = packed.to(tl.int32)  # [PART, TILE_N]
        for part in tl.static_range(PER_BYTE):
            first = (chunk * PER_BYTE + part) * PART
            columns = first + parts
            x = tl.load(
                x_ptr + rows[:, None] * x_row + columns[None, :],
                mask=is_row[:, None] & (columns < in_features)[None, :],
                other=0.0,
            )  # [TILE_M, PART]
            codes = (packed >> (part * STORED)) & ((1 << STORED) - 1)
            # Behind the last column x is 0, but the scale that it meets must be there.
            if ONE_GROUP:
                places = tl.minimum(first // group_size, groups - 1).to(tl.int64) * out_features + outs
                scale = tl.load(scales_ptr + places, mask=is_out, other=0.0)[None, :]
                zero = tl.load(zeros_ptr + places, mask=is_out, other=0)[None, :]
            else:
                group = tl.minimum(columns // group_size, groups - 1).to(tl.int64)
                places = group[:, None] * out_features + outs[None, :]
                scale = tl.load(scales_ptr + places, mask=is_out[None, :], other=0.0)
                zero = tl.load(zeros_ptr + places, mask=is_out[None, :], other=0)
            weight = (codes - zero.to(tl.int32)).to(tl.float32) * scale.to(tl.float32)
            acc = tl.dot(x, weight.to(x.dtype), acc, input_precision=PRECISION)

    if BIAS:
        bias = tl.load(bias_ptr + outs, mask=is_out & (split == 0), other=0.0)
        acc += bias.to(tl.float32)[None, :]
    target = out_ptr + (split.to(tl.int64) * tokens + rows)[:, None] * out_features + outs[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_of: Tensor | None = None) -> PackedWeight:
    """Return the weight in the kernel's layout, on its device; the arguments are `QuantizedWeight`'s fields.

    Raises InvalidArgumentError for a `group_of` whose groups, but for the last, have unequal sizes.
    """
    group_size, order = codes.shape[1] // scales.shape[1], None
    if group_of is not None:
        sizes = torch.bincount(group_of.long(), minlength=scales.shape[1]).tolist()
        group_size = sizes[0]
        if any(size != group_size for size in sizes[:-1]) or not 0 < sizes[-1] <= group_size:
            raise InvalidArgumentError(
                f"group_of has groups of {min(sizes)} to {max(sizes)} inputs: the Triton kernel takes groups of equal "
                "size, so use another model or the CPU."
            )
        order = torch.argsort(group_of, stable=True)
        codes = codes[:, order]
    stored, in_features = STORED_BITS[bits], codes.shape[1]
    chunk = PART * (8 // stored)
    columns = F.pad(codes, (0, -in_features % chunk)).T  # [chunks * chunk, out]
    parts = columns.unflatten(0, (-1, 8 // stored, PART))  # [chunks, codes of a byte, PART, out]
    packed = parts[:, 0].clone()
    for place in range(1, 8 // stored):
        packed |= parts[:, place] << (place * stored)
    rest = (scales.half().T.contiguous(), zeros.T.contiguous())
    return PackedWeight(packed.flatten(0, 1).contiguous(), *rest, bits, in_features, group_size, order)


def unpack(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor, int, Tensor | None]:
    """Return (codes, scales, zeros, bits, group_of) as they were given to `pack`."""
    columns, group_of = _columns(packed, packed.codes), None  # [in, out]
    if packed.order is not None:
        columns = torch.empty_like(columns).index_copy_(0, packed.order, columns)
        group = torch.arange(packed.in_features, device=columns.device, dtype=torch.int32) // packed.group_size
        group_of = torch.empty_like(group).index_copy_(0, packed.order, group)
    rest = (packed.scales.T.contiguous(), packed.zeros.T.contiguous())
    return columns.T.contiguous(), *rest, packed.bits, group_of


def rows(packed: PackedWeight, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the dequantised rows of `ids`, integers `[n]`: `[n, in]`, computed in float32. An embedding's lookup."""
    codes = _columns(packed, packed.codes[:, ids]).float()  # [in, ids]
    group = torch.arange(packed.in_features, device=ids.device) // packed.group_size
    scales, zeros = (each[:, ids].float()[group] for each in (packed.scales, packed.zeros))  # [in, ids]
    values = (codes - zeros) * scales
    if packed.order is not None:
        values = torch.empty_like(values).index_copy_(0, packed.order, values)
    return values.T.to(dtype)


def _columns(packed: PackedWeight, lines: Tensor) -> Tensor:
    """Return the codes of `lines`, `[chunks * PART, any]` bytes, one code a row: uint8 `[in, any]`."""
    stored = STORED_BITS[packed.bits]
    chunks = lines.unflatten(0, (-1, PART))  # [chunks, PART, any]
    parts = [(chunks >> (place * stored)) & (2**stored - 1) for place in range(8 // stored)]
    return torch.stack(parts, dim=1).flatten(0, 2)[: packed.in_features]


def matmul(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    splits: int | None = None,
) -> Tensor:
    """Return x `[tokens, in]` times the transposed weight, plus `bias` `[out]`: `[tokens, out]` in `out_dtype`.

    Weights are rounded to x's dtype, sums are float32; `out_dtype` is x's dtype by default. Few tokens leave a GPU
    without work, so the columns are cut into `splits` that run side by side and are added in float32 in a fixed order;
    None takes as many as fill the device. A result may change in its last bits with the number of tokens.

    Raises InvalidArgumentError, naming the argument, for tensors that the kernel cannot take.
    """
    tokens, out_features = _check(x, packed, bias), packed.out_features
    dtype = out_dtype or x.dtype
    if tokens == 0:
        return x.new_empty(0, out_features, dtype=dtype)
    x = last_contiguous(x if packed.order is None else x.index_select(1, packed.order))
    tile_m, tile_n = max(16, min(triton.next_power_of_2(tokens), 64 if x.element_size() == 2 else 16)), 64
    programs = triton.cdiv(tokens, tile_m) * triton.cdiv(out_features, tile_n)
    chunks, one_group = len(packed.codes) // PART, packed.group_size % PART == 0
    bias_or_any = x if bias is None else bias.resolve_neg().contiguous()  # x: not read
    if splits is None:
        splits = choose_splits(programs, chunks, x.device)
    elif splits < 1:
        raise InvalidArgumentError(f"splits is {splits}; give a whole number from 1.")
    out = x.new_empty(splits, tokens, out_features, dtype=dtype if splits == 1 else torch.float32)
    with torch.cuda.device_of(x):
        dequantize_matmul_kernel[(programs * splits,)](
            x, packed.codes, packed.scales, packed.zeros, bias_or_any, out,
            x_row=x.stride(0), codes_row=packed.codes.stride(0), tokens=tokens, in_features=packed.in_features,
            out_features=out_features, group_size=packed.group_size, groups=len(packed.scales), chunks=chunks,
            splits=splits, STORED=STORED_BITS[packed.bits], PART=PART, TILE_M=tile_m, TILE_N=tile_n,
            ONE_GROUP=one_group, BIAS=bias is not None, PRECISION=dot_precision(x.dtype),
            num_warps=4, num_stages=stages(one_group),
        )  # fmt: skip
    return out[0] if splits == 1 else out.sum(dim=0).to(dtype)


def stages(one_group: bool) -> int:
    """Return how many loads are under way at once: fewer where scales and zeros are loaded for each column, too."""
    return 3 if one_group else 2


def gated_matmul(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return silu(x gᵀ) · (x uᵀ), `[tokens, out / 2]`, where g are the first and u the other half of the weight's rows.

    As `matmul`, with the two halves rounded to float32 in between.
    """
    if packed.out_features % 2:
        raise InvalidArgumentError(f"packed has {packed.out_features} rows: gate and up must have half of them each.")
    gate, up = matmul(x, packed, bias, torch.float32).chunk(2, dim=1)
    return (F.silu(gate) * up).to(out_dtype or x.dtype)


def _check(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> int:
    if x.dim() != 2 or x.shape[1] != packed.in_features:
        raise InvalidArgumentError(f"x has shape {list(x.shape)}; it must be [tokens, {packed.in_features}].")
    if x.dtype not in DTYPES:
        raise InvalidArgumentError(f"x has dtype {x.dtype}; the kernel takes float16, bfloat16 and float32.")
    if x.device != packed.codes.device:
        raise InvalidArgumentError(f"x is on {x.device} and the weight on {packed.codes.device}; move one of them.")
    if bias is not None and (bias.shape != (packed.out_features,) or bias.device != x.device):
        raise InvalidArgumentError(
            f"bias has shape {list(bias.shape)} on {bias.device}; it must be [{packed.out_features}] on {x.device}."
        )
    check_device(x, "x")
    return x.shape[0]
