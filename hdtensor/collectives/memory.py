"""New memory for what is received: large CPU buffers in huge pages.

A fresh buffer's first touch costs a page fault for every 4 KiB, which takes several times as long as
copying the same bytes. Linux gives 2 MiB pages to who asks for them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


#: Smaller buffers come from memory that the allocator kept, and cost no faults.
LARGE_BYTES = 4 << 20


def new_buffer(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised contiguous tensor on the device of ``like``.

    Args:
        like: Gives the device, and the dtype unless one is given.
        shape: Extents.
        dtype: Element type.
    """
    out = like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtype)
    if type(out) is Tensor and out.nbytes >= LARGE_BYTES and out.device.type == "cpu":
        _ask_for_huge_pages(out)
    return out


def _ask_for_huge_pages(out: Tensor) -> None:
    """Ask for huge pages where nothing was touched yet; a system that has none goes on without."""
    advise = _madvise()
    if advise is not None:
        page = mmap.PAGESIZE
        start = -(-out.data_ptr() // page) * page
        stop = (out.data_ptr() + out.nbytes) // page * page
        advise(start, stop - start, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's ``madvise``; None on systems without huge pages on request."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
