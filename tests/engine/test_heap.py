"""Large blocks go back to the system where glibc would keep them, and stay where it would give them back."""

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import psutil
from vllm_teach.engine.heap import return_large_blocks

if sys.argv[1] == "ours":
    return_large_blocks()
del (first := [bytearray(16 * 2**20)])[:]  # from now on glibc keeps blocks of this size
large, small = [], []
for _ in range(16):
    large.append(bytearray(b"x") * (4 * 2**20))
    small.append(bytearray(b"x") * 100_000)  # holds its place between them
before = psutil.Process().memory_info().rss
del large
print((before - psutil.Process().memory_info().rss) // 2**20)
"""


KEPT = """
import sys
import psutil
from vllm_teach.engine.heap import keep_large_blocks

if sys.argv[1] == "engine":
    import torch
    from vllm_teach.engine.model_runner import ModelRunner
    from vllm_teach.kvcache.storage import KVStorage
    from vllm_teach.models.decoder import Decoder
    from vllm_teach.models.config import ModelConfig

    model = Decoder(ModelConfig("LlamaForCausalLM", 90, 16, 24, 1, 2, 1, 8, 512)).init_random()
    ModelRunner(model, KVStorage(1, 4, 16, 1, 8, torch.float32, "cpu"))
elif sys.argv[1] == "ours":
    keep_large_blocks()
block = bytearray(b"x") * (24 * 2**20)  # the first of its size: glibc has not learnt to keep it
before = psutil.Process().memory_info().rss
del block
print((before - psutil.Process().memory_info().rss) // 2**20)
"""

only_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")


def run(script: str, way: str, **environment: str) -> int:
    command = [sys.executable, "-c", script, way]
    told = {**os.environ, **environment}
    return int(subprocess.run(command, capture_output=True, check=True, text=True, env=told).stdout)


@only_glibc
def test_what_a_layer_frees_is_there_for_the_next_one():
    freed = {way: run(KEPT, way) for way in ("engine", "ours", "glibc")}
    assert freed["engine"] < 4
    assert freed["ours"] < 4
    assert freed["glibc"] >= 20  # of 24 MiB


@only_glibc
def test_only_thresholds_of_the_users_give_it_back():
    """Who sets one knows what for; another of glibc's tunables says nothing of it."""
    others = "glibc.rtld.optional_static_tls=2048:glibc.malloc.arena_max=4"
    assert run(KEPT, "ours", GLIBC_TUNABLES=others) < 4
    assert run(KEPT, "ours", GLIBC_TUNABLES=f"{others}:glibc.malloc.mmap_threshold=1048576") >= 20
    assert run(KEPT, "ours", MALLOC_MMAP_THRESHOLD_="1048576") >= 20


@only_glibc
def test_freed_blocks_go_back_to_the_system():
    freed = {way: run(SCRIPT, way) for way in ("glibc", "ours")}
    assert freed["ours"] >= 60  # of 64 MiB
    assert freed["glibc"] < 30


@only_glibc
@pytest.mark.parametrize("by", [{"MALLOC_MMAP_THRESHOLD_": "{}"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold={}"}])
def test_blocks_below_a_threshold_of_the_users_stay(by):
    assert run(SCRIPT, "ours", **{name: value.format(2**25) for name, value in by.items()}) < 30
