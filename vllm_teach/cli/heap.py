"""What the C library does with memory that a command has freed."""

import ctypes
import platform

_M_MMAP_THRESHOLD = -3  # from malloc.h
_LARGE = 2**20


def return_large_blocks() -> None:
    """Have glibc give each block of a mebibyte or more back to the system when it is freed, in this whole process.

    By itself it learns from the first large block that is freed to keep all of up to 32 MiB in its heap, where smaller
    ones settle between them: quantising then holds up to twice the memory that its tensors take. Other C libraries are
    left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE)
