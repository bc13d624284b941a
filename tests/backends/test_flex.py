"""FlexAttention: the whole table unfused, a few rows compiled, and what the compiled kernels depend on."""

import os
import subprocess
import sys

import pytest
import torch

from vllm_teach.attention.patterns import BlockSparsePattern, Causal, GlobalTokens, LocalWindow, Pattern
from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends import flex, flex_mask
from vllm_teach.backends.conformance import ROWS, Row, check_forward
from vllm_teach.errors import InvalidArgumentError

SERVED = [row for row in ROWS if flex.supports(row.spec()) is None]
COMPILED = ("softcap, alibi and window fp32",)


@pytest.mark.parametrize("row", SERVED, ids=lambda row: row.name)
def test_the_masks_and_scores_are_right(row: Row, uncompiled_flex: None) -> None:
    check_forward(flex.run, row)


@pytest.mark.parametrize("row", [row for row in SERVED if row.name in COMPILED], ids=lambda row: row.name)
def test_the_compiled_kernel_is_right_or_it_is_said_why_there_is_none(row: Row) -> None:
    if (reason := flex.unavailable()) is None:
        check_forward(flex.run, row)
    else:
        assert "compiler" in reason or "AVX2" in reason


def test_one_kernel_serves_other_patterns_and_lengths() -> None:
    """Compiling takes seconds, so the pattern, softcap, slopes and exact lengths must not be compiled in."""
    if flex.unavailable() is not None:
        return  # the reasons are tested below
    import torch._dynamo.utils as dynamo

    generator = torch.Generator().manual_seed(0)
    compiled = []
    for q_len, kv_len, pattern in ((100, 250, Causal()), (120, 200, LocalWindow(9)), (65, 130, GlobalTokens(3))):
        q, k, v = (torch.randn(1, n, 2, 32, generator=generator) for n in (q_len, kv_len, kv_len))
        out = flex.run(q, k, v, pattern=pattern)
        torch.testing.assert_close(out, naive_attention(q, k, v, pattern=pattern), rtol=0, atol=1e-5)
        compiled.append(dynamo.counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[1] == compiled[2] > 0


PATTERNS = [
    (None, 130, 300),
    (Causal(), 300, 300),
    (Causal(), 1, 1),
    (Causal(), 200, 140),
    (LocalWindow(140, 3), 500, 600),
    (BlockSparsePattern([[a != b for b in range(3)] for a in range(3)], 128), 384, 384),
]


@pytest.mark.parametrize(("pattern", "q_len", "kv_len"), PATTERNS, ids=str)
def test_the_block_mask_shows_what_the_pattern_shows(pattern: Pattern | None, q_len: int, kv_len: int) -> None:
    """Tile lists and looked-up pairs together; what FlexAttention computes is their conjunction."""
    mask = flex_mask.block_mask(pattern, q_len, kv_len, torch.device("cpu"))
    rows, keys = flex_mask.room(q_len), flex_mask.room(kv_len)
    assert mask.seq_lengths == (rows, keys)
    zero = torch.tensor(0)
    pairs = mask.mask_mod(zero, zero, torch.arange(rows)[:, None], torch.arange(keys)[None, :])
    counts = {"kv_num_blocks": "kv_indices", "full_kv_num_blocks": "full_kv_indices"}
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for count_name, index_name in counts.items():
        for row, (count, order) in enumerate(
            zip(getattr(mask, count_name)[0, 0], getattr(mask, index_name)[0, 0], strict=True)
        ):
            for tile in order[:count].tolist():
                at = slice(128 * row, 128 * row + 128), slice(128 * tile, 128 * tile + 128)
                assert not seen[at].any()  # no tile twice
                seen[at] = pairs[at] if count_name == "kv_num_blocks" else True
                assert count_name == "kv_num_blocks" or pairs[at].all()
    wanted = torch.ones(q_len, kv_len, dtype=torch.bool) if pattern is None else pattern.mask(q_len, kv_len)
    assert (seen[:q_len, :kv_len] == wanted).all()
    assert not seen[:q_len, kv_len:].any()


def test_empty_tiles_are_skipped() -> None:
    mask = flex_mask.block_mask(LocalWindow(100), 4096, 4096, torch.device("cpu"))
    assert int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) == 2 * 32 - 1


def test_room_takes_few_values() -> None:
    assert [flex_mask.room(n) for n in (1, 128, 129, 256, 257, 1111)] == [128, 128, 256, 256, 512, 2048]
    assert len({flex_mask.room(n) for n in range(1, 5000)}) == 7


def test_a_gradient_is_refused_on_a_cpu() -> None:
    q = torch.randn(1, 4, 2, 16, requires_grad=True)
    with pytest.raises(InvalidArgumentError, match="no backward pass on CPUs"):
        flex.run(q, q.detach(), q.detach())


@pytest.mark.parametrize(
    ("change", "words"),
    [({"PATH": "/nonexistent"}, "no C++ compiler"), ({"ATEN_CPU_CAPABILITY": "default"}, "CPUs with AVX2")],
)
def test_a_machine_that_cannot_compile_says_so(change: dict[str, str], words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | change
    code = "import sys; from vllm_teach.backends import flex; sys.stdout.write(flex.unavailable() or 'usable')"
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert words in said.stdout or (words == "CPUs with AVX2" and "no C++ compiler" in said.stdout)


def test_a_compiler_that_fails_is_remembered_and_another_backend_serves(tmp_path) -> None:
    """There is a program of the compiler's name, so the backend counts as usable until it is first called."""
    code = (
        "import warnings, torch\n"
        "from vllm_teach import backends\n"
        "from vllm_teach.errors import MissingDependencyError\n"
        "from vllm_teach.backends import flex\n"
        "flex._has_avx2 = lambda: True\n"
        "assert flex.unavailable() is None\n"
        "q = torch.randn(1, 5, 2, 16)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    backends.attend(q, q, q, softcap=2.0)\n"
        "assert list(backends.calls()) == ['memory_efficient'], backends.calls()\n"
        "assert any('flex failed' in str(one.message) for one in caught), caught\n"
        "try: flex.run(q, q, q)\n"
        "except MissingDependencyError as error: print(error)\n"
        "print(flex.unavailable())\n"
    )
    environment = os.environ | {
        "CXX": sys.executable, "VLLM_TEACH_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, reason = done.stdout.splitlines()
    assert error == reason
    assert "could not compile FlexAttention here (" in reason
    assert reason.endswith(").")
