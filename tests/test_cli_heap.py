"""Large blocks go back to the system where glibc would keep them."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import psutil
from vllm_teach.cli.heap import return_large_blocks

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps large blocks")
def test_freed_blocks_go_back_to_the_system():
    freed = {
        way: int(subprocess.run([sys.executable, "-c", SCRIPT, way], capture_output=True, check=True, text=True).stdout)
        for way in ("glibc", "ours")
    }
    assert freed["ours"] >= 60  # of 64 MiB
    assert freed["glibc"] < 30
