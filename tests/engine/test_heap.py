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


FAULTS = """
import resource
import sys

import torch
from vllm_teach.engine.model_runner import ModelRunner
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.config import ModelConfig

if sys.argv[1] == "engine":
    model = Decoder(ModelConfig("LlamaForCausalLM", 90, 16, 24, 1, 2, 1, 8, 512)).init_random()
    ModelRunner(model, KVStorage(1, 4, 16, 1, 8, torch.float32, "cpu"))


def layer():
    tensors = [torch.ones(2**21) for _ in range(4)]  # 32 MiB


for _ in range(3):
    layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

only_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")


def run(script: str, way: str, **environment: str) -> int:
    command = [sys.executable, "-c", script, way]
    told = {**os.environ, **environment}
    return int(subprocess.run(command, capture_output=True, check=True, text=True, env=told).stdout)


@only_glibc
def test_what_a_layer_frees_is_there_for_the_next_one():
    assert run(FAULTS, "engine") < 1000
    assert run(FAULTS, "no engine") > 10_000  # of 82,000 pages
    # Who sets glibc's own variables knows what for.
    assert run(FAULTS, "engine", MALLOC_MMAP_THRESHOLD_="1048576") > 10_000


@only_glibc
def test_only_the_tunables_of_malloc_are_about_memory():
    assert run(FAULTS, "engine", GLIBC_TUNABLES="glibc.malloc.mmap_threshold=1048576") > 10_000
    assert run(FAULTS, "engine", GLIBC_TUNABLES="glibc.rtld.optional_static_tls=2048") < 1000


@only_glibc
def test_freed_blocks_go_back_to_the_system():
    freed = {way: run(SCRIPT, way) for way in ("glibc", "ours")}
    assert freed["ours"] >= 60  # of 64 MiB
    assert freed["glibc"] < 30
