"""Our own C++ kernel, `kernels/cpu/`: FlashAttention's forward pass for processors, and for every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch

from vllm_teach.attention.layout import Layout, Paged, check_layout
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.backends.call import check_call
from vllm_teach.backends.cpu_mask import kernel_mask
from vllm_teach.backends.packed import is_packed, stand_ins
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels import cpu_attention as kernel

name = "cpu"


class _Place(NamedTuple):
    """The sizes of one sequence, and where its first rows lie: the first fields of `SequenceRow`."""

    q_len: int
    kv_len: int
    first_q: int
    first_k: int
    first_v: int
    first_out: int
    first_lse: int


def unavailable() -> str | None:
    """Return why the kernel cannot be built here, or None when it is built or a compiler is there."""
    return kernel.unavailable()


def supports(spec: AttentionSpec) -> str | None:
    """It serves every forward pass on a CPU, in float32, bfloat16 and float16, without dropout."""
    if spec.device != "cpu":
        return f"cpu runs on CPUs, and the tensors are on {spec.device}."
    if spec.dtype not in kernel.DTYPES:
        return f"cpu knows float32, bfloat16 and float16, and q has dtype {spec.dtype}."
    if spec.dropout:
        return "cpu has no dropout."
    if spec.requires_grad:
        return "cpu has no backward pass, and a gradient is asked for."
    return None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`. The first call builds the kernel."""
    return attention_forward(q, k, v, layout=layout, **arguments)[0]


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return `run` for tensors like these; see `spec.Preparing`. Builds and loads the kernel."""
    prepared = _check(q, k, v, layout, **arguments)
    kernel.load()
    lse = prepared.new_lse()  # which nobody asks for: one for all calls
    return lambda q, k, v: prepared.run(q, k, v, lse)


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    isa: str | None = None,
    **arguments: Unpack[VariantArguments],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse): the output of q's shape and dtype, and the scores' log-sum-exp, float32.

    lse is `[batch, q_heads, q_len]`, with a layout `[q_heads, total_q]`; a row that sees no key gives 0 and -inf.
    q, k and v may have any strides; only where the numbers of one head do not follow one another, a copy is made. k and
    v may be packed (see `packed`). Runs in `torch.get_num_threads()` threads. `isa` is the instruction set, the best
    one by default; see `cpu_library.isa`.

    Raises as `spec.Backend.run`, and MissingDependencyError when the kernel cannot be built.
    """
    prepared = _check(q, k, v, layout, **arguments)
    lse = prepared.new_lse()
    return prepared.run(q, k, v, lse, isa), lse


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout | None, **arguments: Unpack[VariantArguments]
) -> _Prepared:
    """Return the call, checked; of packed keys and values, by the numbers that they stand for."""
    packed = is_packed(k, layout)
    keys, values = stand_ins(q, k, v) if packed else (k, v)
    shape, variant = check_call(supports, q, keys, values, layout, **arguments)
    prepared = _Prepared(_readable(q), _readable(keys), _readable(values), shape, variant, layout)
    if packed:
        prepared.expect_packed(q, k, v)
    return prepared


class _Prepared:
    """A checked call but for the tensors' places in memory: what depends on lengths, strides and masks is worked out.

    q, k and v are `_readable`. Serves one thread at a time.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: AttentionShape,
        variant: Variant,
        layout: Layout | None,
    ) -> None:
        self._alike, self._packed = _likeness(q, k, v), False
        slopes = None if variant.alibi_slopes is None else _readable(variant.alibi_slopes).contiguous()
        table = layout.block_table.contiguous() if isinstance(layout, Paged) else None  # [sequences, blocks]
        self._lse_shape = (shape.batch, shape.q_heads, shape.q_len) if layout is None else (shape.q_heads, len(q))
        out, lse = self._new_out(q), self.new_lse()
        places = _places(q, k, v, out, lse, layout, shape)
        lengths = [(place.q_len, place.kv_len) for place in places]
        mask = kernel_mask(variant.pattern, lengths, shape.group, together=layout is not None)
        slope_step = shape.q_heads if slopes is not None and slopes.dim() == 2 else 0
        rows = []
        for index, place in enumerate(places):
            first_block = 0 if table is None else index * table.stride(0)
            tile_list = mask.list_of[index] if mask.list_of else 0
            rows.append(kernel.SequenceRow(*place, index * slope_step, first_block, tile_list))
        self._memory = slopes, table, mask  # what the call points to
        self._call = kernel.Call(
            q_stride=_stride(q),
            k_stride=_stride(k, paged=table is not None),
            v_stride=_stride(v, paged=table is not None),
            out_stride=_stride(out),
            lse_head_stride=lse.stride(-2),
            sequences=(kernel.SequenceRow * len(rows))(*rows),
            num_sequences=len(rows),
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_table=None if table is None else table.data_ptr(),
            block_size=1 if table is None else k.shape[1],
            scale=variant.scale,
            softcap=variant.softcap,
            slopes=None if slopes is None else slopes.data_ptr(),
            left=mask.left,
            right=mask.right,
            tile_lists=mask.lists,
            tile_q=mask.tile_q,
        )

    def expect_packed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """From now on `run` gets packed keys and values like these: the last element of a row of bytes is its scale."""
        self._packed = True
        k, v = k.view(q.dtype), v.view(q.dtype)
        self._alike = _likeness(_readable(q), k, v)
        self._call.k_stride, self._call.v_stride = _stride(k, paged=True), _stride(v, paged=True)
        self._call.scale_place = k.shape[-1] - 1

    def new_lse(self) -> torch.Tensor:
        """Return room for the log-sum-exp of all rows."""
        return torch.empty(self._lse_shape, dtype=torch.float32, device="cpu")  # whatever the default device is

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, isa: str | None = None
    ) -> torch.Tensor:
        """Return the output for q, k and v, and fill `lse`."""
        if self._packed:
            k, v = k.view(q.dtype), v.view(q.dtype)
        q, k, v = (_readable(tensor) for tensor in (q, k, v))
        if (found := _likeness(q, k, v)) != self._alike:
            raise InvalidArgumentError(f"q, k and v are {found}; this call was prepared for {self._alike}.")
        out, call = self._new_out(q), self._call
        call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.out, call.lse = out.data_ptr(), lse.data_ptr()
        kernel.attention_forward(call, q.dtype, isa)
        return out

    def _new_out(self, q: torch.Tensor) -> torch.Tensor:
        return torch.empty(q.shape, dtype=q.dtype, device="cpu")


def _likeness(*tensors: torch.Tensor) -> tuple[tuple[object, ...], ...]:
    """Return what each is like: tensors of one device, dtype, shape and strides can stand for one another."""
    return tuple((tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in tensors)


def _places(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    layout: Layout | None,
    shape: AttentionShape,
) -> list[_Place]:
    """Return where each sequence's first rows lie."""
    if layout is None:
        return [
            _Place(shape.q_len, shape.kv_len, *(index * tensor.stride(0) for tensor in (q, k, v, out, lse)))
            for index in range(shape.batch)
        ]
    sequences = check_layout(q, k, v, layout)
    places, k_start = [], 0
    for index, kv_len in enumerate(sequences.kv_lens):
        start, end = sequences.q_starts[index : index + 2]
        # In a cache, the block table says where the keys are.
        keys = (0, 0) if isinstance(layout, Paged) else (k_start * k.stride(0), k_start * v.stride(0))
        places.append(_Place(end - start, kv_len, start * q.stride(0), *keys, start * out.stride(0), start))
        k_start += kv_len
    return places


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` such that its memory holds its numbers, those of one head side by side.

    PyTorch puts off negations (of `z.conj().imag`), and may keep a tensor of zeros without any memory.
    """
    if tensor.is_neg() or (tensor.data_ptr() == 0 and tensor.numel()):
        tensor = tensor.clone()
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _stride(tensor: torch.Tensor, paged: bool = False) -> kernel.Stride:
    return kernel.Stride(row=tensor.stride(-3), head=tensor.stride(-2), block=tensor.stride(0) if paged else 0)
