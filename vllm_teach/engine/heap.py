"""What the C library does with memory that has been freed, in this whole process. Only glibc is told; others stay."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_LARGE = 2**20
_LARGEST = 2**25  # that glibc's heap takes: larger blocks always come from the system and go back there
_KEPT = 2**29
_SET_BY_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_large_blocks() -> None:
    """Have freed blocks of up to 32 MiB stay in the heap until 512 MiB lie free at its end.

    Every layer of a step allocates the same large tensors and frees them again. By itself glibc gives most of them back
    to the system each time, and each comes back as thousands of page faults: a third of a long prompt's time. What the
    environment sets, by glibc's variables or tunables, stays as it is.
    """
    tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if not tuned and not any(name in os.environ for name in _SET_BY_THE_USER):
        _tell(_M_MMAP_THRESHOLD, _LARGEST)
        _tell(_M_TRIM_THRESHOLD, _KEPT)


def return_large_blocks() -> None:
    """Have each block of a mebibyte or more go back to the system when it is freed.

    By itself glibc learns from the first large block that is freed to keep all of up to 32 MiB in its heap, where
    smaller ones settle between them: quantising then holds up to twice the memory that its tensors take.
    """
    _tell(_M_MMAP_THRESHOLD, _LARGE)


def _tell(parameter: int, value: int) -> None:
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").mallopt(parameter, value)
