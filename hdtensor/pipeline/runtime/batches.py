"""A step's batch as micro-batches: rows for each lane, and of those for each micro-batch. Pure, on plain tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hdtensor.errors import PlanError
from hdtensor.pipeline.schedule.choose import microbatch_sizes
from hdtensor.placements import HDSpec
from hdtensor.placements.layout import check_top_sizes


def map_tensors(batch: Any, change: Callable[[str, torch.Tensor], Any], name: str = "") -> Any:
    """Return a batch with ``change(name, tensor)`` for each of its tensors; mappings become dicts."""
    if isinstance(batch, torch.Tensor):
        return change(name, batch)
    if isinstance(batch, Mapping):
        return {k: map_tensors(v, change, str(k)) for k, v in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(v, change, f"{name}[{i}]") for i, v in enumerate(batch))
    return batch


def signature(batch: Any) -> Any:
    """Return the shapes and element types of a batch's tensors, a key for what depends on nothing else of them."""
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        return tuple([(k, signature(v)) for k, v in batch.items()])
    if isinstance(batch, list | tuple):
        return tuple([signature(v) for v in batch])
    return None


def num_rows(batch: Any) -> int:
    """Return the number of samples of a batch: the length of dim 0 of all its tensors.

    Raises:
        PlanError: If there is no tensor with dims, or lengths differ.
    """
    found: dict[int, str] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        if tensor.ndim:
            found.setdefault(tensor.shape[0], name or "the batch")

    map_tensors(batch, note)
    if len(found) != 1:
        listing = ", ".join(f"{name} has {n}" for n, name in found.items())
        raise PlanError(
            f"a batch is one or more tensors with the samples along dim 0, got {listing or 'no tensor with dims'}."
        )
    return next(iter(found))


def rows(batch: Any, start: int, stop: int) -> Any:
    """Return some samples of a batch: the same memory, of which autograd counts changes apart from those of others."""
    return map_tensors(batch, lambda _, t: t[start:stop].data if t.ndim else t)


def lane_rows(inputs: HDSpec, num: int) -> tuple[tuple[int, int], ...]:
    """Return (first, past the last) sample of each lane, by the shares of the plan.

    >>> lane_rows(HDSpec.from_text("S0[3:1] / 0:R 1:R"), 8)
    ((0, 6), (6, 8))
    """
    sizes = check_top_sizes(inputs, (num,), None) or (num,)
    ends = list(itertools.accumulate(sizes, initial=0))
    return tuple(itertools.pairwise(ends))


def microbatches(batch: Any, num_microbatches: int | None, size: int | None = None) -> list[Any]:
    """Return a lane's samples as micro-batches.

    Args:
        batch: The lane's samples.
        num_microbatches: How many; fewer if there are fewer samples. None: as many as have ``size`` samples, the last
            one perhaps fewer.
        size: Samples of each, where the plan says it and they fit.
    """
    num = num_rows(batch)
    if num == 0:
        return []
    if num_microbatches is None:
        assert size is not None, "their number or their size is known"
        return [rows(batch, start, start + size) for start in range(0, num, size)]
    count = min(num_microbatches, num)
    sizes: Sequence[int] = microbatch_sizes(num, count)
    if size is not None and size * num_microbatches == num:
        sizes = [size] * num_microbatches
    return _split(batch, list(sizes))


def _split(batch: Any, sizes: list[int]) -> list[Any]:
    """Return a batch in parts of so many rows; what has no rows is in all."""
    if isinstance(batch, torch.Tensor):
        if not batch.ndim:
            return [batch] * len(sizes)
        # A model may work in place on its part: autograd would see a change of all parts of one tensor.
        return [part.data for part in torch.split(batch, sizes)]
    if isinstance(batch, Mapping):
        parts = {k: _split(v, sizes) for k, v in batch.items()}
        return [{k: v[i] for k, v in parts.items()} for i in range(len(sizes))]
    if isinstance(batch, list | tuple):
        columns = [_split(v, sizes) for v in batch]
        return [type(batch)([c[i] for c in columns]) for i in range(len(sizes))]
    return [batch] * len(sizes)
