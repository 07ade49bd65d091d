"""What ``torch.distributed.checkpoint`` asks of a tensor: what to write, what to read, and where that lies.

A checkpoint knows boxes only, no ranks and no specs. So what one plan wrote any other reads, and plain tensors and
``DTensor``s read and write the same files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hdtensor.checkpoint.pieces import local_pieces, pieces
from hdtensor.errors import CheckpointError
from hdtensor.placements.box import Box


if TYPE_CHECKING:
    from hdtensor.tensor import HDTensor


def write_items(tensor: HDTensor, name: str) -> list[WriteItem]:
    """Return what this rank writes of a tensor; all ranks' items tile it, each element once.

    Args:
        tensor: No reduction may be pending.
        name: Its name in the state dict; it decides which of several holders writes.

    Raises:
        CheckpointError: On every rank, for a ``Partial`` tensor.
    """
    _refuse_partial(tensor, name)
    bound = tensor._spec
    shape = tuple(bound.shape)
    if not tensor.numel():  # Without an entry a reader would miss the name.
        return [_write_item(tensor, name, Box.whole(shape))] if _is_first(tensor) else []
    every = pieces(bound.spec, shape, bound.top_sizes, bound.dtype.itemsize)
    return [
        _write_item(tensor, name, box)
        for number, box, _ in local_pieces(bound).values()
        if every[number].writer(name, number) == bound.rank
    ]


def chunk_list(tensor: HDTensor) -> list[ChunkStorageMetadata]:
    """Return the boxes that this rank holds and wants read; none outside every subgroup.

    Raises:
        CheckpointError: On every rank, for a ``Partial`` tensor.
    """
    _refuse_partial(tensor, None)
    return [_chunk(box) for _, box, _ in local_pieces(tensor._spec).values()]


def tensor_shard(tensor: HDTensor, index: MetadataIndex) -> torch.Tensor:
    """Return the memory of one of this rank's boxes: a view of the local tensor.

    Args:
        tensor: The tensor.
        index: Names the box by its start.

    Raises:
        CheckpointError: If no box of this rank starts there.
    """
    local = tensor._local_tensor.detach()
    start = (0,) * tensor.ndim if index.offset is None else tuple(index.offset)
    found = local_pieces(tensor._spec).get(start)
    if found is not None:
        return local[found[2]]
    if not tensor.numel() and not any(start):
        return local.new_empty(tensor.shape)
    raise CheckpointError(
        f"{index.fqn}: rank {tensor._spec.rank} holds no box of {tensor!r} that starts at {start}. Write and read with the "
        f"same layout as the checkpoint was planned with."
    )


def _write_item(tensor: HDTensor, name: str, box: Box) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, box.start),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(box),
            properties=TensorProperties.create_from_tensor(tensor._local_tensor.detach()),
            size=tensor.shape,
        ),
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))


def _is_first(tensor: HDTensor) -> bool:
    return tensor._spec.rank == tensor.spec.ranks[0]


def _refuse_partial(tensor: HDTensor, name: str | None) -> None:
    if tensor.spec.has_partial():
        what = f"{tensor!r}" if name is None else f"{name}, {tensor!r},"
        raise CheckpointError(
            f"{what} has a reduction pending, so no rank holds its values. Redistribute it first, to "
            f"Replicate() or Shard(d) in place of Partial."
        )
