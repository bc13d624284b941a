"""How the tokens of many sequences lie in memory: behind one another (varlen), or in the blocks of a cache (paged).

Without a layout, tensors are `[batch, length, heads, head_dim]` and all sequences of a batch are equally long. With
one, q is flat: `[total_q, q_heads, head_dim]`, the queries of all sequences behind one another without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, TypeVar

import torch

from vllm_teach.attention.shapes import (
    AttentionShape,
    check_dtypes_and_devices,
    check_heads,
    check_ints,
    check_tensor,
)
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Varlen:
    """Sequence i owns the rows cu_seqlens_q[i] … cu_seqlens_q[i + 1] of q, and likewise those of k and v.

    Both are int32 `[sequences + 1]`, start with 0, never fall, and end with the number of rows. A sequence may be
    empty on either side. k and v are `[total_k, kv_heads, head_dim]`.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    checked: ClassVar[Checked | None] = None  # only `check_once` gives an object its own


@dataclass(frozen=True, eq=False)
class Paged:
    """Keys and values lie in the blocks of a cache; sequence i's logical block b is physical block block_table[i, b].

    `cu_seqlens_q` is as in `Varlen`; `block_table` is int32 `[sequences, most blocks of one]`; `kv_lens` is int32
    `[sequences]`, how many keys each sequence has. k and v are `[num_blocks, block_size, kv_heads, head_dim]`. Slots
    and table entries behind a sequence's last key may hold anything, NaN too: they are not read.
    """

    cu_seqlens_q: torch.Tensor
    block_table: torch.Tensor
    kv_lens: torch.Tensor
    checked: ClassVar[Checked | None] = None  # only `check_once` gives an object its own


Layout = Varlen | Paged
AnyLayout = TypeVar("AnyLayout", bound=Layout)


@dataclass(frozen=True)
class Sequences:
    """The sizes of a call: `q_starts` has one entry more than there are sequences, `kv_lens` one for each.

    `runs`, of a Paged one, has for each sequence the first of its blocks where they follow one another in memory, and
    -1 where they do not.
    """

    shape: AttentionShape  # batch is the number of sequences; q_len and kv_len are the longest
    q_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    runs: tuple[int, ...] = ()

    def shape_of(self, index: int) -> AttentionShape:
        """Return the sizes of one sequence, as a batch of 1."""
        q_len = self.q_starts[index + 1] - self.q_starts[index]
        s = self.shape
        return AttentionShape(1, q_len, self.kv_lens[index], s.q_heads, s.kv_heads, s.head_dim)


@dataclass(frozen=True)
class Checked:
    """What was found of a layout when it was checked, and the sizes of k that it was checked for.

    `kv_size` is (num_blocks, block_size) of a Paged, (total_k,) of a Varlen.
    """

    sequences: Sequences
    kv_size: tuple[int, ...]
    device: torch.device


def check_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AnyLayout) -> AnyLayout:
    """Return a copy of `layout` that is checked, and whose tensors `check_layout` need not read again.

    For many calls with one layout, such as those of a model's layers: on a GPU each reading waits for it. The layout's
    tensors must not change from then on. Raises as `check_layout`.
    """
    sequences = check_layout(q, k, v, layout)
    copy = replace(layout)
    object.__setattr__(copy, "checked", Checked(sequences, _kv_size(k, layout), q.device))
    return copy


def check_layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> Sequences:
    """Return the sizes of the sequences of `layout`, which q, k and v must fit. Reads the layout's tensors.

    Raises InvalidArgumentError, naming the argument and what it should be, when they do not fit.
    """
    if not isinstance(layout, Varlen | Paged):
        raise InvalidArgumentError(f"layout is of type {type(layout).__name__}; give a Varlen, a Paged or None.")
    paged = isinstance(layout, Paged)
    ranks = {"q": (q, "[total_q, q_heads, head_dim]", 3)}
    kv = ("[num_blocks, block_size, kv_heads, head_dim]", 4) if paged else ("[total_k, kv_heads, head_dim]", 3)
    ranks |= {"k": (k, *kv), "v": (v, *kv)}
    for name, (tensor, wanted, rank) in ranks.items():
        check_tensor(name, tensor, f" {wanted}")
        if tensor.dim() != rank:
            raise InvalidArgumentError(
                f"{name} has shape {list(tensor.shape)}; with {type(layout).__name__} it must be {wanted}."
            )
    check_dtypes_and_devices(q, k, v)
    check_heads(q, k)
    known = layout.checked
    # Of other sizes, the whole check says what does not fit.
    if known is not None and (known.kv_size, known.device) == (_kv_size(k, layout), q.device):
        found = known.sequences
        if found.q_starts[-1] == len(q):
            sizes = found.shape.batch, found.shape.q_len, found.shape.kv_len
            return replace(found, shape=AttentionShape(*sizes, q.shape[-2], k.shape[-2], q.shape[-1]))
    starts = _starts("cu_seqlens_q", layout.cu_seqlens_q, len(q), q.device)
    q_lens = [end - start for start, end in pairwise(starts)]
    runs: tuple[int, ...] = ()
    if isinstance(layout, Paged):
        kv_lens, runs = _read_table(layout, k, len(q_lens))
    else:
        k_starts = _starts("cu_seqlens_k", layout.cu_seqlens_k, len(k), q.device)
        if len(k_starts) != len(starts):
            raise InvalidArgumentError(
                f"cu_seqlens_k describes {len(k_starts) - 1} sequences and cu_seqlens_q {len(q_lens)}; make them equal."
            )
        kv_lens = [end - start for start, end in pairwise(k_starts)]
    shape = AttentionShape(
        len(q_lens), max(q_lens, default=0), max(kv_lens, default=0), q.shape[-2], k.shape[-2], q.shape[-1]
    )
    return Sequences(shape, tuple(starts), tuple(kv_lens), runs)


def each_sequence(
    k: torch.Tensor, v: torch.Tensor, layout: Layout, sequences: Sequences
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield, for each sequence, its rows of q and its keys and values `[kv_len, kv_heads, head_dim]`.

    Those of a Varlen are views, and so are those of a Paged whose blocks follow one another in memory. Scattered blocks
    are gathered, which copies them.
    """
    k_start = 0
    for index, kv_len in enumerate(sequences.kv_lens):
        rows = slice(sequences.q_starts[index], sequences.q_starts[index + 1])
        if isinstance(layout, Varlen):
            yield rows, k[k_start : k_start + kv_len], v[k_start : k_start + kv_len]
            k_start += kv_len
            continue
        num_blocks = -(-kv_len // k.shape[1])
        if (first := sequences.runs[index]) >= 0:
            run = slice(first, first + num_blocks)
            yield rows, k[run].flatten(0, 1)[:kv_len], v[run].flatten(0, 1)[:kv_len]
        else:
            blocks = layout.block_table[index, :num_blocks].long()
            yield rows, k[blocks].flatten(0, 1)[:kv_len], v[blocks].flatten(0, 1)[:kv_len]


def _starts(name: str, starts: torch.Tensor, total: int, device: torch.device) -> list[int]:
    """Return the tensor `starts`, the argument `name`, as a list; its last entry must be `total`."""
    check_ints(name, starts, (None,), device)
    values = starts.tolist()
    falls = any(end < start for start, end in pairwise(values))
    if not values or values[0] != 0 or falls or values[-1] != total:
        raise InvalidArgumentError(
            f"{name} is {_shorten(values)}; it must start with 0, never fall and end with {total}, the number of rows."
        )
    return values


def _read_table(layout: Paged, k: torch.Tensor, sequences: int) -> tuple[list[int], tuple[int, ...]]:
    """Return the lengths of a Paged, and `Sequences.runs`."""
    check_ints("kv_lens", layout.kv_lens, (sequences,), k.device)
    check_ints("block_table", layout.block_table, (sequences, None), k.device)
    num_blocks, block_size = k.shape[:2]
    if block_size == 0:
        raise InvalidArgumentError(f"k has shape {list(k.shape)}; its blocks must hold at least one key.")
    kv_lens = layout.kv_lens.tolist()
    width = layout.block_table.shape[1]
    for kv_len in kv_lens:
        if not 0 <= kv_len <= width * block_size:
            raise InvalidArgumentError(
                f"kv_lens holds {kv_len}; block_table has room for 0 to {width * block_size} keys "
                f"({width} blocks of {block_size})."
            )
    table = layout.block_table.cpu()  # [sequences, width]
    counts = torch.tensor([-(-kv_len // block_size) for kv_len in kv_lens], dtype=torch.int64, device="cpu")
    used = torch.arange(width, device="cpu") < counts[:, None]  # [sequences, width]
    wrong = table[used & ((table < 0) | (table >= num_blocks))]
    if len(wrong):
        raise InvalidArgumentError(f"block_table holds {wrong[0]}; k has the blocks 0 to {num_blocks - 1}.")
    if width == 0:
        return kv_lens, (0,) * sequences
    following = ((table[:, 1:] == table[:, :-1] + 1) | ~used[:, 1:]).all(dim=1)  # [sequences]
    return kv_lens, tuple(torch.where(following, table[:, 0].where(used[:, 0], 0), -1).tolist())


def _kv_size(k: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    return tuple(k.shape[:2]) if isinstance(layout, Paged) else (len(k),)


def _shorten(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, …, {values[-1]}]"
