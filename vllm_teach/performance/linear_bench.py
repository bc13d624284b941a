"""Products with quantised weights beside PyTorch's: our CPU kernel, PyTorch's own packed ones, and bfloat16.

Each figure is one pass over the layers of a whole model, so that weights come from memory and not from a cache that
holds only the one layer being timed. All figures of a case come from the same rounds (`race`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.quantized_matmul import PackedWeight, gated_matmul, matmul, pack, unavailable
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.side_by_side import race
from vllm_teach.performance.timing import check_calls

BASELINE = "bf16 F.linear"
_GROUP = 64
_THEIR_ROWS = 16  # PyTorch packs 4 bits of a multiple of so many rows


@dataclass(frozen=True)
class LinearShapes:
    """The sizes of a decoder's matrices; SmolLM2-135M's by default."""

    hidden: int = 576
    kv: int = 192
    inner: int = 1536
    vocab: int = 49152
    layers: int = 30

    def products(self) -> dict[str, tuple[int, int, int]]:
        """Return (in, out, how many different ones) of the products that are timed alone."""
        hidden, inner = self.hidden, self.inner
        return {
            f"{hidden} -> {hidden}": (hidden, hidden, self.layers),
            f"{hidden} -> {inner}": (hidden, inner, self.layers),
            f"{inner} -> {hidden}": (inner, hidden, self.layers),
            f"{hidden} -> {self.vocab}": (hidden, self.vocab, 1),
        }


@dataclass(frozen=True)
class LinearRow:
    """One line: `seconds` of one pass over a case's weights, and its ratio to the baseline of the same round.

    `weight_bytes` is what the weights of the case take in memory.
    """

    case: str
    tokens: int
    method: str
    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    weight_bytes: int


@dataclass(frozen=True)
class LinearBench:
    """The whole result, and what it ran on; `why_plain` is why our products ran in plain PyTorch, if they did."""

    rows: list[LinearRow]
    rounds: int
    shapes: LinearShapes
    why_plain: str | None
    environment: dict[str, object]

    def to_json(self) -> dict[str, object]:
        """Return the result as what `json.dump` takes."""
        return asdict(self)


@dataclass(frozen=True)
class _Method:
    """A way to multiply: the product with each of its weights, and the bytes that these take."""

    products: list[Callable[[Tensor], Tensor]]
    num_bytes: int


def bench_linear(
    *,
    rounds: int = 7,
    tokens: tuple[int, ...] = (1, 8, 64, 512),
    shapes: LinearShapes | None = None,
    progress: bool = True,
) -> LinearBench:
    """Time the products of `shapes` alone, and a model's whole stack of linear layers, for each number of `tokens`.

    In the stack, a layer is q, k and v in one product, o, gate and up with what SwiGLU makes of them, and down. Weights
    are random; `shapes.hidden` and `.inner` must be multiples of 64, `.vocab` of 16. Needs some 0.6 GB for SmolLM2's
    shapes.

    Raises InvalidArgumentError for `rounds` or `tokens` below 1 and for other sizes.
    """
    from tqdm import tqdm

    check_calls("rounds", rounds, 1, "measures nothing")
    for count in tokens:
        check_calls("tokens", count, 1, "is nothing to multiply")
    shapes = shapes or LinearShapes()
    for name, size in vars(shapes).items():
        check_count(f"shapes.{name}", size, 1)
    for name, unit in (("hidden", _GROUP), ("inner", _GROUP), ("vocab", _THEIR_ROWS)):
        if (size := getattr(shapes, name)) % unit:
            raise InvalidArgumentError(f"shapes.{name}={size} is not valid: use a multiple of {unit}.")
    rows: list[LinearRow] = []
    cases = shapes.products()
    with tqdm(total=len(tokens) * (len(cases) + 1), desc="bench linear", disable=not progress) as bar:
        for case, (size, out, count) in cases.items():
            methods = _methods([_draw(size, out, seed) for seed in range(count)])
            for number in tokens:
                x = _input(number, size)
                passes = {name: partial(_multiply_all, x, method) for name, method in methods.items()}
                held = {name: method.num_bytes for name, method in methods.items()}
                rows += _time(case, number, passes, held, rounds)
                bar.update()
        stack = _Stack(shapes)
        for number in tokens:
            x = _input(number, shapes.hidden)
            runners = {name: partial(run, x) for name, run in stack.runners().items()}
            rows += _time(f"{shapes.layers} layers", number, runners, stack.num_bytes(), rounds)
            bar.update()
    return LinearBench(rows, rounds, shapes, unavailable(), asdict(describe_environment()))


def _time(
    case: str, tokens: int, runners: Mapping[str, Callable[[], object]], held: dict[str, int], rounds: int
) -> list[LinearRow]:
    with torch.inference_mode():
        result = race(runners, BASELINE, rounds=rounds, warmup=2)
    return [
        LinearRow(case, tokens, name, result.seconds[name].median, ratio.median, ratio.low, ratio.high, held[name])
        for name, ratio in result.ratios.items()
    ]


@dataclass(frozen=True)
class _Quantized:
    """A random weight in 4 bits with groups and in 8 bits with one group."""

    codes4: Tensor
    scales4: Tensor
    codes8: Tensor
    scales8: Tensor

    def dense(self) -> Tensor:
        """Return it in bfloat16; the 8 bits' values, which take as long as any."""
        return ((self.codes8.float() - 128) * self.scales8.float()).bfloat16()


def _draw(size: int, out: int, seed: int) -> _Quantized:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (out, size), generator=generator, dtype=torch.uint8)
    scale = 1 / (128 * size**0.5)
    return _Quantized(
        codes >> 4, torch.full((out, size // _GROUP), 16 * scale).half(), codes, torch.full((out, 1), scale).half()
    )


def _input(tokens: int, size: int) -> Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(0)).bfloat16()


def _methods(drawn: list[_Quantized]) -> dict[str, _Method]:
    dense = [weight.dense() for weight in drawn]
    int4, int8 = [_pack4(weight) for weight in drawn], [_pack8(weight) for weight in drawn]
    their4, their8 = [_their_int4(weight) for weight in drawn], [_their_int8(weight) for weight in drawn]
    return {
        BASELINE: _Method([partial(F.linear, weight=weight) for weight in dense], _num_bytes(dense)),
        "int4": _Method([partial(matmul, packed=weight) for weight in int4], sum(each.num_bytes for each in int4)),
        "int8": _Method([partial(matmul, packed=weight) for weight in int8], sum(each.num_bytes for each in int8)),
        "int4 of PyTorch": _Method(
            [partial(_multiply_their_int4, weight=pair) for pair in their4], _num_bytes(*their4)
        ),
        "int8 of PyTorch": _Method(
            [partial(_multiply_their_int8, weight=pair) for pair in their8], _num_bytes(*their8)
        ),
    }


def _num_bytes(*tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for some in tensors for tensor in some)


def _multiply_all(x: Tensor, method: _Method) -> None:
    for product in method.products:
        product(x)


def _multiply_their_int4(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight[0], _GROUP, weight[1])


def _multiply_their_int8(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.ops.aten._weight_int8pack_mm(x, *weight)


def _pack4(weight: _Quantized) -> PackedWeight:
    return pack(weight.codes4, weight.scales4, torch.full(weight.scales4.shape, 8, dtype=torch.uint8), 4)


def _pack8(weight: _Quantized) -> PackedWeight:
    return pack(weight.codes8, weight.scales8, torch.full(weight.scales8.shape, 128, dtype=torch.uint8), 8)


def _their_int4(weight: _Quantized) -> tuple[Tensor, Tensor]:
    """Return (codes, scales and offsets `[groups, out, 2]`): w = (code - 8) · scale + offset."""
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes4.int(), 1)
    scales = weight.scales4.bfloat16().T
    return codes, torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()


def _their_int8(weight: _Quantized) -> tuple[Tensor, Tensor]:
    return (weight.codes8.short() - 128).to(torch.int8), weight.scales8.flatten().bfloat16()


class _Stack:
    """The linear layers of a whole model, each layer fed with the same input."""

    def __init__(self, shapes: LinearShapes) -> None:
        hidden, inner = shapes.hidden, shapes.inner
        self._hidden, self._layers = hidden, shapes.layers
        sizes = {"qkv": (hidden, hidden + 2 * shapes.kv), "o": (hidden, hidden), "down": (inner, hidden)}
        sizes |= {"gate": (hidden, inner), "up": (hidden, inner), "gate_up": (hidden, 2 * inner)}
        drawn = {
            name: [_draw(*size, seed * 10 + index) for seed in range(shapes.layers)]
            for index, (name, size) in enumerate(sizes.items())
        }
        self._dense = {name: [weight.dense() for weight in drawn[name]] for name in drawn if name != "gate_up"}
        joined = [name for name in drawn if name not in ("gate", "up")]
        self._packed = {
            "int4": {name: [_pack4(weight) for weight in drawn[name]] for name in joined},
            "int8": {name: [_pack8(weight) for weight in drawn[name]] for name in joined},
        }

    def runners(self) -> dict[str, Callable[[Tensor], Tensor]]:
        runners: dict[str, Callable[[Tensor], Tensor]] = {BASELINE: self._run_dense}
        return runners | {bits: partial(self._run_packed, bits) for bits in self._packed}

    def num_bytes(self) -> dict[str, int]:
        dense = sum(weight.nbytes for weights in self._dense.values() for weight in weights)
        return {BASELINE: dense} | {
            bits: sum(weight.num_bytes for weights in packed.values() for weight in weights)
            for bits, packed in self._packed.items()
        }

    def _run_dense(self, x: Tensor) -> Tensor:
        weights = self._dense
        for i in range(self._layers):
            q = F.linear(x, weights["qkv"][i])[:, : self._hidden]
            y = F.linear(q, weights["o"][i])
            y = F.silu(F.linear(y, weights["gate"][i])) * F.linear(y, weights["up"][i])
            y = F.linear(y, weights["down"][i])
        return y

    def _run_packed(self, bits: str, x: Tensor) -> Tensor:
        weights = self._packed[bits]
        for i in range(self._layers):
            q = matmul(x, weights["qkv"][i])[:, : self._hidden]
            y = matmul(q, weights["o"][i])
            y = gated_matmul(y, weights["gate_up"][i])
            y = matmul(y, weights["down"][i])
        return y


def format_linear(bench: LinearBench) -> str:
    """Return the result as a table of plain text."""
    lines = [
        f"bfloat16 input and output, int4 in groups of {_GROUP}, int8 with a scale per row; ratios within a round, "
        f"median of {bench.rounds} (lowest to highest); below 1 is faster than {BASELINE}; a figure is one pass over "
        "all matrices of that shape that the model has"
    ]
    if bench.why_plain is not None:
        lines.append(f"our int4 and int8 ran in plain PyTorch: {bench.why_plain}")
    case: tuple[str, int] | None = None
    for row in bench.rows:
        if (row.case, row.tokens) != case:
            case = row.case, row.tokens
            lines += ["", f"{row.case}, {row.tokens} token{'s' if row.tokens > 1 else ''}"]
        spread = f"({row.ratio_low:.2f} to {row.ratio_high:.2f})"
        size = f"{row.weight_bytes / 1e6:.1f} MB"
        lines.append(f"  {row.method:<18}{row.ratio:7.2f} x {spread:<20}{row.seconds * 1e3:10.3f} ms{size:>12}")
    return "\n".join(lines)
