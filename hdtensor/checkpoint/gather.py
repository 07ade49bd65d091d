"""Whole plain tensors out of cut ones: everywhere, or on one rank, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hdtensor._rank import current_rank
from hdtensor.api.agreement import communicates
from hdtensor.checkpoint.pieces import local_pieces, pieces
from hdtensor.collectives import p2p
from hdtensor.errors import SpecError
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.tensor import HDTensor


def full_state_dict(
    state_dict: Mapping[str, Any],
    *,
    rank: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Return a state dict with a whole plain tensor in place of each ``HDTensor``; every rank of the world calls it.

    Args:
        state_dict: Dicts and lists of tensors, as ``get_model_state_dict`` and ``get_optimizer_state_dict`` give. The
            same on every rank.
        rank: The one rank that gets it, tensor by tensor; the others get ``{}``. None: every rank.
        device: Where the tensors are put, one after the other; default: where they are.

    Raises:
        SpecError: If ``rank`` is none of the world's.
    """
    size = dist.get_world_size() if communicates() else 1
    if rank is not None and not 0 <= rank < size:
        raise SpecError(f"rank {rank} is no rank of the world of {size}.")
    whole = {name: _whole(value, rank, device) for name, value in state_dict.items()}
    return whole if rank is None or rank == current_rank() else {}


def gathered(tensor: HDTensor, rank: int) -> torch.Tensor | None:
    """Return the whole tensor on one rank, None on the others; every rank of the world calls it.

    Piece by piece, so that beside the whole tensor one piece at most is in memory.
    """
    if tensor.spec.has_partial():
        with torch.no_grad():
            tensor = tensor.redistribute(HDSpec([Subgroup((rank,))]))
    bound, me = tensor._spec, current_rank()
    shape = tuple(bound.shape)
    local = tensor._local_tensor.detach().resolve_conj().resolve_neg()
    whole = local.new_empty(shape) if me == rank else None
    held = local_pieces(bound)
    for number, piece in enumerate(
        pieces(bound.spec, shape, bound.top_sizes, bound.dtype.itemsize)
    ):
        source = rank if rank in piece.holders else piece.writer("", number)
        place = piece.box.slices_from((0,) * len(shape))
        if whole is None:
            if source == me:
                p2p.exchange({rank: local[held[piece.box.start][2]].contiguous()}, {})
        elif source == me:
            whole[place].copy_(local[held[piece.box.start][2]])
        elif whole[place].is_contiguous():
            p2p.exchange({}, {source: whole[place]})
        else:
            arriving = local.new_empty(piece.box.shape)
            p2p.exchange({}, {source: arriving})
            whole[place].copy_(arriving)
    return whole


def _whole(value: Any, rank: int | None, device: torch.device | str | None) -> Any:
    if isinstance(value, HDTensor):
        with torch.no_grad():
            whole = value.full_tensor() if rank is None else gathered(value, rank)
        return whole if whole is None or device is None else whole.to(device)
    if isinstance(value, Mapping):
        return {key: _whole(inner, rank, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_whole(inner, rank, device) for inner in value)
    if isinstance(value, torch.Tensor) and device is not None:
        return value.to(device)
    return value
