"""LBFGS over cut parameters: torch's own steps on one vector, an ``HDTensor`` of all elements, cut evenly over all ranks.

Every rank of the world holds a part, so every rank reads the sums and maxima that the steps decide by, one that holds no
parameter too. A vector is made of gradients, and parameters move along one, by way of whole rows::

    parameters            rows, each on the rank where it begins       even: torch's order, torch.chunk's cut
    w (3, 4), b (2,)  ->  0: w[0:2]   1: w[2:3] b[0:2]            ->   0: 0..6   1: 7..13

So the history is in torch's own form: it is saved, switched and loaded as any ``HDTensor``, also from one device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.optim import LBFGS

from hdtensor._rank import current_rank
from hdtensor._torch_compat import new_wrapper, replace_lbfgs_parts
from hdtensor.api.agreement import communicates
from hdtensor.api.distribute import distribute_tensor
from hdtensor.api.local import prepare_groups
from hdtensor.collectives import observe
from hdtensor.errors import DeductionError
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.tensor import HDTensor


def begin_step(optimizer: LBFGS, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Have a step run on vectors of all ranks; return what ``step`` is called with instead, None for plain parameters.

    Raises:
        DeductionError: On every rank, if the history is of other parameters.
    """
    params: list[Any] = optimizer.param_groups[0]["params"]
    if not any(isinstance(p, HDTensor) for p in params):
        return None
    vector = _Vector(params, optimizer.param_groups[0].get("maximize", False))
    vector.adopt(optimizer.state[params[0]])
    replace_lbfgs_parts(optimizer, vector.gradient, vector.add)

    def evaluated(closure: Any) -> Any:
        def evaluate() -> Any:
            loss = closure()
            if not isinstance(loss, HDTensor):
                return loss
            value: Any = loss.detach()
            return value.redistribute(vector.whole)

        return evaluate

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluated(kwargs["closure"])}
    return (args[0], *map(evaluated, args[1:2]), *args[2:]), kwargs


def end_step(optimizer: LBFGS) -> None:
    """Leave no sum pending in the history, and numbers as plain ones, alike on all ranks, as torch keeps them."""
    params: list[Any] = optimizer.param_groups[0]["params"]
    if not any(isinstance(p, HDTensor) for p in params):
        return
    state: dict[str, Any] = optimizer.state[params[0]]
    even = vector_spec(range(_world_size()))

    def settled(value: Any) -> Any:
        if not isinstance(value, HDTensor):
            return value
        return value.redistribute(even) if value.ndim else value.full_tensor()

    for key, value in state.items():
        state[key] = [settled(v) for v in value] if isinstance(value, list) else settled(value)


def _world_size() -> int:
    return dist.get_world_size() if communicates() else 1


def vector_spec(ranks: Iterable[int]) -> HDSpec:
    """Return how a vector is cut: evenly over the ranks."""
    return HDSpec([Subgroup(tuple(ranks), (Shard(0),))])


class _Piece(NamedTuple):
    """What the vector has of one parameter.

    Attributes:
        tensor: The parameter.
        rows: Its shape; of a scalar (1,).
        sizes: How many rows each rank has on the way.
        mine: The shape of this rank's rows.
        numel: Real elements among them.
    """

    tensor: Any
    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    mine: tuple[int, ...]
    numel: int


class _Vector:
    """All parameters as one vector.

    Args:
        params: The parameters.
        maximize: Whether the steps go uphill: torch takes the loss with its sign turned, from 2.14 on, and so the gradients.

    Attributes:
        even: Its spec, on every rank of the world.
        whole: The spec of a number on every rank.
    """

    def __init__(self, params: Sequence[Any], maximize: bool) -> None:
        self.maximize = maximize
        size, rank = _world_size(), current_rank()
        self.even = vector_spec(range(size))
        self.whole = HDSpec([Subgroup(tuple(range(size)))])
        self.by_rows = HDSpec([Subgroup((r,)) for r in range(size)], Shard(0))
        numels = [_real_numel(p) for p in params]
        self.numel = sum(numels)
        chunk = -(-self.numel // size)
        self.pieces = []
        starts = itertools.accumulate(numels, initial=0)
        for p, numel, start in zip(params, numels, starts, strict=False):
            rows = tuple(p.shape) or (1,)
            width = numel // rows[0] if numel else 1
            # A row is where its first element is; the last rank has all that is left.
            cuts = [min(max(-((start - r * chunk) // width), 0), rows[0]) for r in range(size)]
            sizes = tuple(b - a for a, b in itertools.pairwise([*cuts, rows[0]]))
            mine = (sizes[rank], *rows[1:])
            here = math.prod(mine) * (2 if p.is_complex() else 1)
            self.pieces.append(_Piece(p, rows, sizes, mine, here))
        self.dtype = torch.cat([_real(_local(p))[:0] for p in params]).dtype
        prepare_groups(self.even, self.whole, self.by_rows)

    def adopt(self, state: dict[str, Any]) -> None:
        """Bring a history that was loaded, or made under another plan, to this cut.

        Raises:
            DeductionError: On every rank.
        """
        for key in ("d", "prev_flat_grad"):
            if state.get(key) is not None:
                state[key] = self._adopted(key, state[key])
        for key in ("old_dirs", "old_stps"):
            if state.get(key):
                state[key] = [self._adopted(key, v) for v in state[key]]

    def _adopted(self, key: str, known: torch.Tensor) -> HDTensor:
        if tuple(known.shape) != (self.numel,):
            raise DeductionError(
                f"LBFGS's {key} has shape {tuple(known.shape)}, but the parameters have {self.numel} elements: the history "
                f"is of other parameters. Load that of these, or begin anew: optimizer.state.clear()."
            )
        if isinstance(known, HDTensor):
            return known.redistribute(self.even)
        return distribute_tensor(known.detach(), self.even, src_data_rank=None)

    def gradient(self) -> HDTensor:
        """Return the gradients, zeros where a parameter has none."""
        parts = []
        with observe.because("LBFGS"):
            for piece in self.pieces:
                grad = piece.tensor.grad
                if grad is None or not piece.tensor.numel():
                    parts.append(_local(piece.tensor).new_zeros(piece.numel, dtype=self.dtype))
                    continue
                moved: Any = self._wrapped(grad).reshape(piece.rows)
                moved = moved.redistribute(self.by_rows, top_sizes=self._extents(piece.sizes))
                parts.append(_real(moved._local_tensor))
            local = torch.cat(parts)
            local = local.neg_() if self.maximize else local
            rows = self._of_rows(local, (self.numel,), self._lengths())
            return rows.redistribute(self.even)

    def add(self, step_size: Any, update: HDTensor) -> None:
        """Move all parameters along a direction."""
        step_size = float(step_size)
        with observe.because("LBFGS"):
            rows = update.redistribute(self.by_rows, top_sizes=self._extents(self._lengths()))
            parts = rows._local_tensor.split([piece.numel for piece in self.pieces])
            for piece, part in zip(self.pieces, parts, strict=True):
                p = piece.tensor
                if not p.numel():
                    continue
                part = part.to(p.dtype.to_real())
                part = torch.view_as_complex(part.view(-1, 2)) if p.is_complex() else part
                moved: Any = self._of_rows(part.reshape(piece.mine), piece.rows, piece.sizes)
                target = self._wrapped(p)
                moved = (
                    moved.reshape(p.shape) if p.ndim else moved.redistribute(self.whole).reshape(())
                )
                target.add_(
                    moved.redistribute(target.spec, top_sizes=target.top_sizes), alpha=step_size
                )

    def _wrapped(self, tensor: Any) -> HDTensor:
        """Return the tensor; a plain one, which every rank has, as a wrapper around its memory."""
        if isinstance(tensor, HDTensor):
            return tensor
        bound = BoundSpec.bind(self.whole, tensor.shape, tensor.stride(), tensor.dtype)
        return new_wrapper(HDTensor, tensor.detach(), bound, False)

    def _of_rows(
        self, local: torch.Tensor, shape: tuple[int, ...], sizes: Sequence[int]
    ) -> HDTensor:
        bound = BoundSpec.bind(self.by_rows, shape, None, local.dtype, self._extents(sizes))
        return new_wrapper(HDTensor, local, bound, False)

    def _lengths(self) -> tuple[int, ...]:
        """Return how many elements each rank has on the way."""
        return tuple(
            sum(
                piece.sizes[r]
                * (_real_numel(piece.tensor) // piece.rows[0] if piece.rows[0] else 0)
                for piece in self.pieces
            )
            for r in range(len(self.pieces[0].sizes))
        )

    def _extents(self, sizes: Sequence[int]) -> Sequence[int] | None:
        return sizes if len(sizes) > 1 else None  # one subgroup has no top cut


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, HDTensor) else tensor.detach()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _real_numel(tensor: torch.Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)
