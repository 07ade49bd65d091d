"""safetensors files: written tensor by tensor, read box by box, so that neither side holds a file in memory.

The format is a header's length (8 bytes, little endian), the header (JSON: name -> dtype, shape, place), and the bytes of
all tensors without gaps.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hdtensor.errors import CheckpointError


DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor of a file.

    Attributes:
        dtype: Element type.
        shape: Extents.
        start: Its first byte, counted from the file's beginning.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorWriter:
    """A file that is being written; its tensors come in the order of the header.

    Args:
        path: Where to write.
        tensors: Name -> (dtype, shape), in order.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name, (dtype, shape) in tensors.items():
            stop = place + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [place, stop],
            }
            place = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._left = list(tensors)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor's elements."""
        assert self._left[:1] == [name], f"{name} is out of turn; next is {self._left[:1]}"
        del self._left[0]
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._file.write(flat.numpy().data)

    def close(self) -> None:
        """Have the operating system put everything on the disk."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


class TensorFile:
    """A file to read from; only the pages that are looked at are read.

    Args:
        path: Where it lies.

    Raises:
        CheckpointError: If it is missing, cut off or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.entries = _entries(file.read(8), file, size)
                # Copy on write: torch wants memory that it may write to. Nothing reaches the file.
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error or type(error).__name__}. Copy the file again."
            ) from error

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor whose memory is the file's; slice it before it is copied."""
        entry = self.entries[name]
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        flat = torch.frombuffer(
            self._memory, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start
        )
        if flat.data_ptr() % entry.dtype.itemsize:
            flat = (
                flat.clone()
            )  # a header that is no multiple of the element size, from another writer
        return flat.view(entry.dtype).view(entry.shape)


def is_storable(dtype: torch.dtype) -> bool:
    """Return whether a safetensors file can hold the dtype."""
    return dtype in _NAMES


def _entries(prefix: bytes, file: Any, size: int) -> dict[str, Entry]:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or 8 + length > size:
        raise ValueError(f"its {size} bytes are no header, or the file is cut off")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries, ends = {}, [0]
    for name, fields in header.items():
        start, stop = fields["data_offsets"]
        dtype, shape = DTYPES[fields["dtype"]], tuple(fields["shape"])
        entry = Entry(dtype, shape, 8 + length + start)
        if any(type(n) is not int or n < 0 for n in (*shape, start)):
            raise ValueError(f"the header says {fields} of {name}")
        if entry.num_bytes != stop - start:
            raise ValueError(
                f"{name} has {stop - start} bytes, which is not {shape} of {fields['dtype']}"
            )
        entries[name] = entry
        ends.append(stop)
    if 8 + length + max(ends) != size:
        raise ValueError(f"it has {size} bytes, its header says {8 + length + max(ends)}")
    return entries


def shard_files(sizes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Return which tensors go into which file: in order, each file up to a size, at least one tensor in each.

    >>> shard_files([6, 6, 2, 6, 2, 2], 10)
    [[0], [1, 2], [3, 4, 5]]
    """
    files: list[list[int]] = [[]]
    filled = 0
    for number, size in enumerate(sizes):
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(number)
        filled += size
    return files
