"""What the C library does with memory that has been freed, in this whole process. Only glibc is told; others stay.

Where the environment sets a threshold, by glibc's variables or tunables, nothing is changed.
"""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_LARGE = 2**20
_LARGEST = 2**25  # that glibc's heap takes: larger blocks always come from the system and go back there
_KEPT = 2**29
_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
_TUNABLES = {"glibc.malloc.trim_threshold", "glibc.malloc.mmap_threshold"}


def keep_large_blocks() -> None:
    """Have freed blocks of up to 32 MiB stay in the heap until 512 MiB lie free at its end.

    Every layer of a step allocates the same large tensors and frees them again. By itself glibc gives most of them back
    to the system each time, and each comes back as thousands of page faults: a quarter of a long prompt's time.
    """
    _tell({_M_MMAP_THRESHOLD: _LARGEST, _M_TRIM_THRESHOLD: _KEPT})


def return_large_blocks() -> None:
    """Have each block of a mebibyte or more go back to the system when it is freed.

    By itself glibc learns from the first large block that is freed to keep all of up to 32 MiB in its heap, where
    smaller ones settle between them: quantising then holds up to twice the memory that its tensors take.
    """
    _tell({_M_MMAP_THRESHOLD: _LARGE})


def _tell(thresholds: dict[int, int]) -> None:
    if platform.libc_ver()[0] == "glibc" and not _set_by_the_user():
        for parameter, value in thresholds.items():
            ctypes.CDLL("libc.so.6").mallopt(parameter, value)


def _set_by_the_user() -> bool:
    tunables = {each.partition("=")[0] for each in os.environ.get("GLIBC_TUNABLES", "").split(":")}
    return bool(_VARIABLES & os.environ.keys() or _TUNABLES & tunables)
