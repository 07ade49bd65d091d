"""Micro-batches that one rank has loaded, for the ranks that need them: shapes in a letter, values in one message a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hdtensor.api.parameters import device_of
from hdtensor.collectives import p2p
from hdtensor.pipeline.runtime.batches import map_tensors
from hdtensor.pipeline.runtime.inputs import InputLayout


class Outline(NamedTuple):
    """What a letter says of a tensor.

    Attributes:
        shape: Its shape.
        dtype: Its element type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def outlined(part: Any) -> Any:
    """Return a micro-batch with outlines in place of its tensors."""
    return map_tensors(part, lambda _, t: Outline(tuple(t.shape), t.dtype))


def stand_ins(outline: Any) -> Any:
    """Return a micro-batch of which only the shapes are right; its tensors hold one element each."""
    if isinstance(outline, Outline):
        return torch.zeros((), dtype=outline.dtype).expand(outline.shape)
    if isinstance(outline, Mapping):
        return {key: stand_ins(value) for key, value in outline.items()}
    if isinstance(outline, list | tuple):
        return type(outline)(map(stand_ins, outline))
    return outline


def send(parts_of: Mapping[int, Sequence[Any]], layouts: Sequence[InputLayout]) -> None:
    """Send every rank of every lane but this one what it needs.

    Args:
        parts_of: Lane -> its micro-batches.
        layouts: Of each lane.
    """
    buffers = {}
    for lane, layout in enumerate(layouts):
        for rank in layout.ranks:
            pieces = [_as_bytes(t) for _, _, t in _needed(parts_of[lane], layout, rank)]
            if pieces:
                buffers[rank] = torch.cat(pieces)
    buffers.pop(dist.get_rank(), None)
    p2p.exchange({rank: buffer for rank, buffer in buffers.items() if buffer.numel()}, {})


def receive(parts: Sequence[Any], layout: InputLayout, source: int) -> list[Any]:
    """Return a lane's micro-batches with what this rank needs in place of stand-ins.

    Args:
        parts: Stand-ins.
        layout: Of the lane.
        source: Rank that sends.
    """
    needed = list(_needed(parts, layout, dist.get_rank()))
    lengths = [t.numel() * t.itemsize for _, _, t in needed]
    buffer = torch.empty(sum(lengths), dtype=torch.uint8, device=device_of(None))
    p2p.exchange({}, {source: buffer} if buffer.numel() else {})
    values = {}
    for (number, name, tensor), piece in zip(needed, torch.split(buffer, lengths), strict=True):
        # A copy, since a piece may begin where its element type may not.
        values[number, name] = piece.clone().view(tensor.dtype).view(tensor.shape)
    return [
        map_tensors(part, lambda name, t, n=number: values.get((n, name), t))  # type: ignore[misc]
        for number, part in enumerate(parts)
    ]


def _needed(
    parts: Sequence[Any], layout: InputLayout, rank: int
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (micro-batch, name, tensor) of what a rank needs, in an order that all ranks share."""
    for number, part in enumerate(parts):
        for name, tensor in layout.needed_by(rank, part):
            yield number, name, tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().to(device_of(None))
    return tensor.contiguous().reshape(-1).view(torch.uint8)
