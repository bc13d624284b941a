"""The kernels compiled for three generations of GPUs, none of which is here.

`python -m vllm_teach.kernels.triton_kernels.ahead_of_time` compiles every candidate tile; here it is a selection.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux only)"
)

# In a process of its own, which has no interpreter switched on; prints one line for each compiled kernel.
COMPILE = """
import json
import torch
from vllm_teach.kernels.triton_kernels import ahead_of_time, tuning

def report(name, sm, dtype, head_dim, tile, compiled):
    print(json.dumps({
        "name": name, "sm": sm, "dtype": str(dtype), "head_dim": head_dim, "tile": str(tile),
        "shared": compiled.shared_bytes, "code": compiled.machine_code_bytes,
        "target": next(line for line in compiled.ptx.splitlines() if line.startswith(".target")),
    }), flush=True)

def compile_one(name, head_dim, dtype, sm, tile, *features):
    report(name, sm, dtype, head_dim, tile, ahead_of_time.compile_tiled(name, head_dim, dtype, sm, tile, *features))

small = tuning.Tile(16, 16, 4, 1)
for sm in (80, 90, 100):
    for name in ahead_of_time.TILED:
        compile_one(name, 64, torch.bfloat16, sm, tuning.candidates(name, 64, torch.bfloat16)[0])
    for compiled in ahead_of_time.compile_small(torch.bfloat16, sm):
        report("small", sm, torch.bfloat16, 128, None, compiled)
    report("4 bits", sm, torch.bfloat16, 0, None, ahead_of_time.compile_dequantize(torch.bfloat16, sm, 4))
# float16 uses the same units as bfloat16, and float32 none of those that differ between generations.
for name in ahead_of_time.TILED:
    compile_one(name, 16, torch.float32, 80, small)
    compile_one(name, 16, torch.float16, 90, small, ahead_of_time.FEATURES)
report("8 bits", 80, torch.float32, 0, None, ahead_of_time.compile_dequantize(torch.float32, 80, 8))
report("2 bits", 90, torch.float16, 0, None, ahead_of_time.compile_dequantize(torch.float16, 90, 2, one_group=False))
# The article's tile for an A100 and FlashAttention 2's: which are candidates, and must fit.
for tile in tuning.candidates("forward", 128, torch.bfloat16):
    if (tile.q, tile.k) in ((128, 128), (128, 64)):
        compile_one("forward", 128, torch.bfloat16, 80, tile)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_every_kernel_compiles_for_every_generation_and_every_dtype(compiled):
    names = ("forward", "backward_keys", "backward_queries", "block_sparse", "paged")
    wanted = {(name, sm, "torch.bfloat16") for name in (*names, "small", "4 bits") for sm in (80, 90, 100)}
    wanted |= {(name, sm, f"torch.{dtype}") for name in names for sm, dtype in ((80, "float32"), (90, "float16"))}
    wanted |= {("8 bits", 80, "torch.float32"), ("2 bits", 90, "torch.float16")}
    assert {(one["name"], one["sm"], one["dtype"]) for one in compiled} == wanted
    for one in compiled:
        assert f"sm_{one['sm']}" in one["target"], one
        assert one["code"] > 1000, one


def test_the_default_tiles_fit_a_consumer_gpu_and_so_every_other(compiled):
    for one in compiled:
        assert 0 < one["shared"] <= 99 * 1024, one


def test_the_articles_tile_fits_an_a100(compiled):
    tiles = {one["tile"]: one["shared"] for one in compiled if one["head_dim"] == 128 and one["name"] == "forward"}
    assert {"128x128", "128x64"} <= {tile.split(",")[0] for tile in tiles}
    assert max(tiles.values()) <= 163 * 1024


def test_the_table_of_candidates():
    from vllm_teach.kernels.triton_kernels.tuning import candidate_table

    for kernel, table in candidate_table().items():
        assert set(table) == {(size, dim) for size in (2, 4) for dim in (64, 128, 256)}, kernel
        for case, tiles in table.items():
            assert len(set(tiles)) == len(tiles) >= 1, (kernel, case)
            for tile in tiles:
                for side in (tile.q, tile.k):
                    assert side >= 16, tile
                    assert side & (side - 1) == 0, tile
    forward = candidate_table()["forward"]
    assert {(128, 128), (128, 64)} <= {(tile.q, tile.k) for tile in forward[2, 128]}  # the articles', FlashAttention's
