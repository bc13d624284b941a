"""What a norm moves between slow and fast memory, operation by operation and fused: formulas, and what PyTorch did.

`counters` states the memory model: an operation reads each tensor it is given once and writes each that it makes once.
Written as operations, LayerNorm is nine of them, and each but two passes over the whole tensor. A fused kernel passes
over it once; the weights are counted once, as all but the first row find them in the cache. `traced_traffic` reads the
same off PyTorch as it runs, whatever it is asked to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_teach.attention.shapes import check_count
from vllm_teach.counters import Tally
from vllm_teach.errors import InvalidArgumentError

KINDS = ("layer_norm", "rms_norm")
_WIDE = 4  # bytes of a float32, in which the statistics are computed


def op_by_op_norm(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Return the norm `kind` of x, or of x + residual, `[rows, size]`: one PyTorch operation after the other.

    Statistics are float32's, so that half-precision tensors are converted first and last. `weight` and `bias` are
    `[size]`; RMSNorm has no bias. Raises InvalidArgumentError for another kind.
    """
    _check_kind(kind)
    total = x if residual is None else x + residual
    wide = total.float()
    if kind == "rms_norm":
        scaled = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
        return scaled.to(x.dtype) * weight
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scaled = centred * torch.rsqrt((centred * centred).mean(dim=-1, keepdim=True) + eps)
    out = scaled * weight
    return (out if bias is None else out + bias).to(x.dtype)


def op_by_op_traffic(
    *, kind: str, rows: int, size: int, input_bytes: int, residual: bool = False, bias: bool = True
) -> Tally:
    """Return what `op_by_op_norm` moves, by operation; `input_bytes` are those of one element of x.

    Raises InvalidArgumentError for another kind and for a size that cannot be.
    """
    _check_kind(kind)
    rows, size, input_bytes = _check_sizes(rows, size, input_bytes)
    narrow, wide = rows * size * input_bytes, rows * size * _WIDE
    row, parameter = rows * _WIDE, size * input_bytes  # one number for each row; a weight or a bias
    converts = input_bytes < _WIDE

    steps: list[tuple[str, int, int]] = []  # name, bytes read, bytes written
    if residual:
        steps.append(("x + residual", 2 * narrow, narrow))
    if converts:
        steps.append(("to float32", narrow, wide))
    if kind == "layer_norm":
        steps += [("mean", wide, row), ("x - mean", wide + row, wide)]
    steps += [
        ("square", wide, wide),
        ("mean of squares", wide, row),
        ("+ eps", row, row),
        ("1 / square root", row, row),
        ("* 1 / square root", wide + row, wide),
    ]
    to_narrow = [("to the input's dtype", wide, narrow)] if converts else []
    if kind == "rms_norm":
        steps += [*to_narrow, ("* weight", narrow + parameter, narrow)]
    else:
        steps.append(("* weight", wide + parameter, wide))
        steps += [("+ bias", wide + parameter, wide)] if bias else []
        steps += to_narrow

    tally = Tally()
    for name, read, written in steps:
        tally.charge(name, {"bytes_read": read, "bytes_written": written})
    return tally


def fused_traffic(
    *,
    kind: str,
    rows: int,
    size: int,
    input_bytes: int,
    residual: bool = False,
    bias: bool = True,
    fast_memory_bytes: int = 100 * 1024,
) -> Tally:
    """Return what a fused kernel moves: x and the residual read once, the result and the sum written once.

    A row that does not fit the fast memory is read again for each further pass: over the sum, if there is one, for
    LayerNorm's mean, for the squares and for the result. Raises as `op_by_op_traffic`.
    """
    _check_kind(kind)
    rows, size, input_bytes = _check_sizes(rows, size, input_bytes)
    fast_memory_bytes = check_count("fast_memory_bytes", fast_memory_bytes, 1)
    tensor, parameters = rows * size * input_bytes, size * input_bytes * (2 if bias and kind == "layer_norm" else 1)
    tally = Tally(fast_memory_bytes=fast_memory_bytes)
    tensors = 2 if residual else 1
    tally.charge(kind, {"bytes_read": tensors * tensor + parameters, "bytes_written": tensors * tensor})
    if size * input_bytes > fast_memory_bytes:
        again = (2 if kind == "layer_norm" else 1) + residual  # the passes, less the one that comes first anyway
        tally.charge("rows read again", {"bytes_read": again * tensor})
    return tally


def traced_traffic(run: Callable[[], object]) -> Tally:
    """Call `run` and return what its PyTorch operations move, by operation, in the same model.

    An operation that returns a view moves nothing. Of what one operation does inside, nothing is seen.
    """
    with _Trace() as trace:
        run()
    return trace.tally


class _Trace(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        read, written = _tensors((args, kwargs)), _tensors(result)
        if not function._schema.is_mutable:
            given = {_storage(tensor) for tensor in read.values()}
            written = {key: tensor for key, tensor in written.items() if _storage(tensor) not in given}  # no views
        if written:
            amounts = {
                "bytes_read": sum(tensor.nbytes for tensor in read.values()),
                "bytes_written": sum(tensor.nbytes for tensor in written.values()),
            }
            self.tally.charge(function.overloadpacket.__name__, amounts)
        return result


def _tensors(tree: object) -> dict[object, torch.Tensor]:
    """Return the tensors in nested arguments by where they lie: `x * x` reads x once."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {(tensor.data_ptr(), tensor.shape, tensor.stride()): tensor for tensor in tensors}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise InvalidArgumentError(f"kind is {kind!r}; choose one of {', '.join(KINDS)}.")


def _check_sizes(rows: int, size: int, input_bytes: int) -> tuple[int, int, int]:
    return check_count("rows", rows, 1), check_count("size", size, 1), check_count("input_bytes", input_bytes, 1)
