"""An optimizer's groups of options, where those of the checkpoint hold other parameters than the optimizer's.

A group is known by its parameters' names. Groups may be split, joined and reordered, as long as the parameters of each have
one set of options in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hdtensor.checkpoint.checks import listed
from hdtensor.errors import CheckpointError


def saved_groups(metadata: Metadata, name: str) -> list[dict[str, Any]]:
    """Return room for the groups that a checkpoint has; none where it has them by parameter.

    Args:
        metadata: The checkpoint's table of contents.
        name: Of the optimizer in it.
    """
    prefix = f"{name}.param_groups."
    found: dict[int, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        number, _, option = key.removeprefix(prefix).partition(".")
        if not key.startswith(prefix):
            continue
        if not number.isdigit() or "." in option:
            return []
        is_tensor = isinstance(entry, TensorStorageMetadata)
        room = torch.zeros(entry.size, dtype=entry.properties.dtype) if is_tensor else None  # type: ignore[union-attr]
        found.setdefault(int(number), {})[option] = room
    return [found[number] for number in sorted(found)]


def regrouped(
    own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], strict: bool
) -> list[dict[str, Any]] | None:
    """Return the optimizer's groups with the checkpoint's options; None where the groups are the same.

    Raises:
        CheckpointError: If parameters of one group have unlike options in the checkpoint, or options of other names.
    """
    if [g["params"] for g in own] == [g.get("params") for g in saved]:
        return None
    home = {parameter: group for group in saved for parameter in group.get("params") or ()}
    groups = []
    for number, group in enumerate(own):
        first: Mapping[str, Any] | None = None
        for parameter in group["params"]:
            options = home.get(parameter)
            first = first or options
            if options is None or first is None or options is first:
                continue
            unlike = [
                key
                for key in options
                if key != "params" and not _same(options[key], first.get(key))
            ]
            if unlike:
                raise CheckpointError(
                    f"group {number} of the optimizer's param_groups joins parameters that have unlike options in the "
                    f"checkpoint: {parameter} has {listed([f'{k} {options[k]}' for k in unlike])}, "
                    f"{group['params'][0]} {listed([f'{k} {first.get(k)}' for k in unlike])}. Make the same groups."
                )
        names = {key for key in group if key != "params"}
        kept = {key: value for key, value in (first or group).items() if key != "params"}
        if strict and names != set(kept):
            raise CheckpointError(
                f"group {number} of the optimizer's param_groups has other options than the checkpoint's: "
                f"{listed(sorted(names ^ set(kept)))}."
            )
        groups.append({**group, **kept, "params": list(group["params"])})
    return groups


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)
