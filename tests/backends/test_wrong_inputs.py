"""Inputs that are wrong or odd, on every backend: a typed error that names the argument, or the right result."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.layout import Paged, Varlen
from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError

Q, K = (2, 5, 4, 16), (2, 7, 2, 16)
FLAT_Q, FLAT_K, CACHE = (6, 4, 16), (9, 2, 16), (4, 16, 2, 16)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def varlen(q: Any = (0, 2, 6), k: Any = (0, 5, 9)) -> Varlen:
    return Varlen(int32(*q), int32(*k))


def paged(table: Any = ((0, 1), (2, 3)), kv_lens: Any = (20, 3)) -> Paged:
    return Paged(int32(0, 2, 6), int32(*table), int32(*kv_lens))


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype=dtype, device=device)


half = torch.float16
# (q, k, v), keyword arguments, words of the error: what is wrong, and both shapes, dtypes or devices
WRONG: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any], str]] = {
    "no tensor": ((draw(*Q), draw(*K), None), {}, "v is of type NoneType"),
    "three dimensions": ((draw(*Q[1:]), draw(*K), draw(*K)), {}, "q has shape [5, 4, 16]"),
    "v unlike k": ((draw(*Q), draw(*K), draw(2, 6, 2, 16)), {}, "v has shape [2, 6, 2, 16] and k [2, 7, 2, 16]"),
    "batch": ((draw(*Q), draw(3, 7, 2, 16), draw(3, 7, 2, 16)), {}, "k has shape [3, 7, 2, 16] and q [2, 5, 4, 16]"),
    "head_dim": ((draw(*Q), draw(2, 7, 2, 8), draw(2, 7, 2, 8)), {}, "k has shape [2, 7, 2, 8] and q [2, 5, 4, 16]"),
    "heads": ((draw(*Q), draw(2, 7, 3, 16), draw(2, 7, 3, 16)), {}, "the 4 heads of q must be a multiple of the 3"),
    "no heads": ((draw(2, 5, 0, 16), draw(*K), draw(*K)), {}, "the 0 heads of q must be a multiple of the 2"),
    "no head_dim": ((draw(2, 5, 4, 0), draw(2, 7, 2, 0), draw(2, 7, 2, 0)), {}, "last sizes, 0 and 0, must be equal"),
    "dtypes": ((draw(*Q), draw(*K, dtype=half), draw(*K, dtype=half)), {}, "k has dtype torch.float16 and q torch.f"),
    "whole numbers": ((draw(*Q).int(), draw(*K).int(), draw(*K).int()), {}, "q has dtype torch.int32"),
    "devices": ((draw(*Q), draw(*K, device="meta"), draw(*K)), {}, "k is on meta and q on cpu"),
    "no numbers": (tuple(draw(*s, device="meta") for s in (Q, K, K)), {}, "q is on meta"),
    "scale": ((draw(*Q), draw(*K), draw(*K)), {"scale": float("nan")}, "scale is nan"),
    "scale of text": ((draw(*Q), draw(*K), draw(*K)), {"scale": "x"}, "scale is of type str"),
    "causal": ((draw(*Q), draw(*K), draw(*K)), {"causal": 1}, "causal is 1"),
    "window": ((draw(*Q), draw(*K), draw(*K)), {"window_size": (-2, 0)}, "window_size[0] is -2"),
    "window of one": ((draw(*Q), draw(*K), draw(*K)), {"window_size": 3}, "window_size is 3"),
    "pattern": ((draw(*Q), draw(*K), draw(*K)), {"pattern": "causal"}, "pattern is of type str"),
    "softcap": ((draw(*Q), draw(*K), draw(*K)), {"softcap": -1.0}, "softcap is -1.0"),
    "slopes": ((draw(*Q), draw(*K), draw(*K)), {"alibi_slopes": draw(3)}, "alibi_slopes has dtype torch.float32 and s"),
    "dropout": ((draw(*Q), draw(*K), draw(*K)), {"dropout_p": 1.0}, "dropout_p is 1.0"),
    "layout": ((draw(*Q), draw(*K), draw(*K)), {"layout": "varlen"}, "layout is of type str"),
    "dense with varlen": ((draw(*Q), draw(*K), draw(*K)), {"layout": varlen()}, "q has shape [2, 5, 4, 16]; with Varl"),
    "starts": (
        (draw(*FLAT_Q), draw(*FLAT_K), draw(*FLAT_K)),
        {"layout": varlen((0, 2, 5))},
        "cu_seqlens_q is [0, 2",
    ),
    "falling": (
        (draw(*FLAT_Q), draw(*FLAT_K), draw(*FLAT_K)),
        {"layout": varlen(k=(0, 10, 9))},
        "cu_seqlens_k is [0",
    ),
    "counts": ((draw(*FLAT_Q), draw(*FLAT_K), draw(*FLAT_K)), {"layout": varlen(k=(0, 9))}, "cu_seqlens_k describes 1"),
    "int64": (
        (draw(*FLAT_Q), draw(*FLAT_K), draw(*FLAT_K)),
        {"layout": Varlen(int32(0, 2, 6).long(), int32(0, 5, 9))},
        "cu_seqlens_q has dtype torch.int64",
    ),
    "starts elsewhere": (
        (draw(*FLAT_Q), draw(*FLAT_K), draw(*FLAT_K)),
        {"layout": Varlen(int32(0, 2, 6), int32(0, 5, 9).to("meta"))},
        "cu_seqlens_k is on meta and q on cpu",
    ),
    "block": ((draw(*FLAT_Q), draw(*CACHE), draw(*CACHE)), {"layout": paged(((0, 4), (2, 3)))}, "block_table holds 4"),
    "kv_lens": ((draw(*FLAT_Q), draw(*CACHE), draw(*CACHE)), {"layout": paged(kv_lens=(33, 3))}, "kv_lens holds 33"),
    "tables": (
        (draw(*FLAT_Q), draw(*CACHE), draw(*CACHE)),
        {"layout": paged(((0, 1),))},
        "block_table has dtype torch.int32 and shape [1",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", backends.names())
def test_what_is_wrong_is_named(name: str, what: str) -> None:
    (q, k, v), arguments, words = WRONG[what]
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(words)}|; .*{re.escape(words)}") as caught:
        backends.get(name).run(q, k, v, **arguments)
    assert str(caught.value).endswith(".")


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with gaps of another tensor between them in every dimension."""
    room = torch.full([2 * size for size in tensor.shape], torch.nan)
    view = room[tuple(slice(None, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


ODD: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "transposed": lambda: tuple(draw(*s).transpose(1, 2).contiguous().transpose(1, 2) for s in (Q, K, K)),
    "gaps everywhere": lambda: tuple(spread(draw(*s)) for s in (Q, K, K)),
    "one key repeated": lambda: (draw(*Q), *(draw(2, 1, 2, 16).expand(K) for _ in "kv")),
    "k is v": lambda: (draw(*Q), *(draw(*K),) * 2),
    "sliced from one": lambda: tuple(draw(2, 6, 4, 48)[..., 16 * i : 16 * i + 16] for i in range(3)),
    "no batch": lambda: (draw(0, 5, 4, 16), draw(0, 7, 2, 16), draw(0, 7, 2, 16)),
    "no query": lambda: (draw(2, 0, 4, 16), draw(*K), draw(*K)),
    "no key": lambda: (draw(*Q), draw(2, 0, 2, 16), draw(2, 0, 2, 16)),
    "nothing": lambda: (draw(2, 0, 4, 16), draw(2, 0, 2, 16), draw(2, 0, 2, 16)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("name", backends.names())
def test_what_is_odd_is_right_or_refused(name: str, what: str, causal: bool, uncompiled_flex: None) -> None:
    q, k, v = ODD[what]()
    backend, spec = backends.get(name), AttentionSpec.of(q, k, v, causal=causal)
    if (reason := backend.supports(spec)) is not None:
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(reason)}$"):
            backend.run(q, k, v, causal=causal)
    elif backend.unavailable() is None:
        out = backend.run(q, k, v, causal=causal)
        expected = naive_attention(*(part.contiguous().double() for part in (q, k, v)), causal=causal)
        torch.testing.assert_close(out, expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", backends.names())
@pytest.mark.parametrize(
    ("layout", "keys"),
    [(Varlen(int32(0), int32(0)), (0, 2, 16)), (Paged(int32(0), int32().view(0, 3), int32()), CACHE)],
    ids=["varlen", "paged"],
)
def test_no_sequence_at_all(name: str, layout: Varlen | Paged, keys: tuple[int, ...], uncompiled_flex: None) -> None:
    q, k, v = draw(0, 4, 16), draw(*keys), draw(*keys)
    backend = backends.get(name)
    if backend.unavailable() is None and backend.supports(AttentionSpec.of(q, k, v, layout=layout)) is None:
        assert backend.run(q, k, v, layout=layout, causal=True).shape == (0, 4, 16)
