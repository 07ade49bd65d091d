"""LBFGS in a checkpoint: its history is as long as it happens to be, so that only the checkpoint knows what to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hdtensor.api.agreement import communicates
from hdtensor.api.distribute import distribute_tensor
from hdtensor.api.lbfgs import vector_spec


def begin(optimizer: torch.optim.LBFGS) -> None:
    """Give an optimizer that made no step an empty state: torch would make one by a step, which LBFGS takes no part in."""
    if not optimizer.state:
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {}


def expect(state: Mapping[str, Any], name: str, metadata: Metadata) -> None:
    """Make room for the history that a checkpoint has; the optimizer's own stays as it is.

    Args:
        state: The optimizer's state dict, by parameters' names; its history is replaced.
        name: Its name in the checkpoint.
        metadata: The checkpoint's table of contents.
    """
    (first,) = state["state"]
    prefix = f"{name}.state.{first}."
    found: dict[str, Any] = {}
    saved = metadata.state_dict_metadata
    for key in sorted(k for k in saved if k.startswith(prefix)):
        field, _, number = key.removeprefix(prefix).partition(".")
        room = _room(saved[key])
        if number:
            entries = found.setdefault(field, [])
            entries.extend([None] * (int(number) + 1 - len(entries)))
            entries[int(number)] = room
        else:
            found[field] = room
    state["state"][first] = found


def _room(entry: Any) -> torch.Tensor | None:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    empty = torch.zeros(entry.size, dtype=entry.properties.dtype)
    if not entry.size:
        return empty
    ranks = range(dist.get_world_size() if communicates() else 1)
    return distribute_tensor(empty, vector_spec(ranks), src_data_rank=None)
