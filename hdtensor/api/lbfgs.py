"""LBFGS over shards: torch's own steps on a vector of which each rank holds the elements of its shards.

All that the steps decide by are the loss and sums and maxima over the vector. These are collectives of one number over
all ranks, so every rank decides alike, one that holds nothing too. The history is cut as the parameters are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hdtensor._rank import current_rank
from hdtensor._torch_compat import replaced_lbfgs_parts
from hdtensor.api.agreement import communicates
from hdtensor.api.clip import counts_elements
from hdtensor.api.collect import item
from hdtensor.collectives import groups, observe
from hdtensor.errors import DeductionError
from hdtensor.tensor import HDTensor


class FlatShards(torch.Tensor):
    """The elements of all parameters, of which this rank has those of its shards, first those that it counts.

    Sums, maxima and products of two vectors are over all ranks and alike on all; every rank calls them.

    Attributes:
        num_counted: How many elements no rank before this one holds.
        cuts: How all parameters are cut.
    """

    num_counted: int
    cuts: tuple[Any, ...]

    @staticmethod
    def of(pieces: Sequence[torch.Tensor], num_counted: int, cuts: tuple[Any, ...]) -> FlatShards:
        """Join pieces."""
        return _flat(torch.cat([*pieces]), num_counted, cuts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next((a for a in args if isinstance(a, FlatShards)), None)
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, FlatShards) else a for a in args]
        if first is None:
            return func(*args, **(kwargs or {}))
        if func in _OVER_RANKS and len(args) == (2 if func is torch.Tensor.dot else 1):
            return _over_ranks(func, [a[: first.num_counted] for a in plain])
        if func is torch.Tensor.__reduce_ex__:
            raise DeductionError(
                "LBFGS's history is cut as the parameters are, and can neither be saved nor moved: pass the model alone, and "
                "begin anew (optimizer.state.clear()). Within the program state_dict() keeps it."
            )
        out = func(*plain, **(kwargs or {}))
        is_vector = type(out) is torch.Tensor and out.shape == plain[0].shape
        return _flat(out, first.num_counted, first.cuts) if is_vector else out


def _flat(tensor: torch.Tensor, num_counted: int, cuts: tuple[Any, ...]) -> FlatShards:
    flat = tensor.as_subclass(FlatShards)
    flat.num_counted, flat.cuts = num_counted, cuts
    return flat


_OVER_RANKS = (torch.Tensor.dot, torch.Tensor.max, torch.Tensor.sum)


def _over_ranks(func: Any, counted: list[torch.Tensor]) -> torch.Tensor:
    """Reduce what each rank counts; every rank adds up the same numbers in the same order."""
    first = counted[0]
    if first.numel():
        mine = func(*counted).double()
    else:
        mine = first.new_tensor(-torch.inf if func is torch.Tensor.max else 0.0).double()
    if not communicates():
        return mine.to(first.dtype)
    size, rank = dist.get_world_size(), current_rank()
    # A row for each rank; of bytes, since a sum would make nan of an infinity.
    terms = torch.zeros(size, dtype=torch.float64)
    terms[rank] = mine
    words = terms.view(torch.int64).to(groups.device_type())
    observe.announce("a step of LBFGS", range(size), f"a {func.__name__} over all ranks")
    with observe.because("LBFGS"):
        observe.notify("all_reduce", tuple(range(size)), words.nbytes, tier="world")
    dist.all_reduce(words)
    parts = words.cpu().view(torch.float64)
    total = (
        parts.max() if func is torch.Tensor.max else sum(parts.unbind(), torch.zeros(()).double())
    )
    return total.to(first)


def step_over_shards(original: Callable[..., Any], optimizer: Any, closure: Any) -> Any:
    """Take a step of LBFGS; return the loss before it, as the closure gave it."""
    params: list[Any] = optimizer.param_groups[0]["params"]
    if not any(isinstance(p, HDTensor) for p in params):
        return original(optimizer, closure)
    shards = _Shards(params)
    shards.check(optimizer.state[params[0]])
    losses: list[Any] = []

    def evaluate() -> float:
        loss = closure()
        if not losses:
            losses.append(loss)
        value: Any = item(loss) if isinstance(loss, HDTensor) else loss
        return float(value)

    with replaced_lbfgs_parts(optimizer, shards.gradient, shards.add):
        original(optimizer, evaluate)
    return losses[0]


class _Shards:
    """All parameters as one vector on this rank."""

    def __init__(self, params: list[Any]) -> None:
        self.params = params
        self.cuts = tuple(_cut_of(p) for p in params)
        rank, is_alone = current_rank(), not communicates()

        @functools.cache
        def counts(spec: Any) -> bool:
            return counts_elements("LBFGS", spec, rank, is_alone)

        kinds: list[Any] = [p.spec if isinstance(p, HDTensor) else type(p) for p in params]
        counted = [counts(kind) for kind in kinds]
        self.order = sorted(range(len(params)), key=lambda i: not counted[i])
        self.num_counted = sum(
            _elements(p).numel()
            for p, is_counted in zip(params, counted, strict=True)
            if is_counted
        )

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a history of parameters that were cut otherwise.

        Raises:
            DeductionError: On every rank.
        """
        known = state.get("d")
        if known is not None and getattr(known, "cuts", None) != self.cuts:
            raise DeductionError(
                "LBFGS's history was made while the parameters were cut in another way, or on one device, and cannot "
                "follow them. Begin anew: optimizer.state.clear()."
            )

    def gradient(self) -> FlatShards:
        """Return the gradients, zeros where a parameter has none."""
        pieces = []
        for i in self.order:
            p = self.params[i]
            grad = p.grad
            if isinstance(p, HDTensor) and grad is not None:
                grad = grad.redistribute(p.spec, top_sizes=p.top_sizes)
            pieces.append(
                _elements(p).new_zeros(_elements(p).numel()) if grad is None else _elements(grad)
            )
        return FlatShards.of([piece.reshape(-1) for piece in pieces], self.num_counted, self.cuts)

    def add(self, step_size: Any, update: FlatShards) -> None:
        """Move all parameters along a direction."""
        offset, flat = 0, update.as_subclass(torch.Tensor)
        for i in self.order:
            elements = _elements(self.params[i])
            end = offset + elements.numel()
            elements.add_(flat[offset:end].view_as(elements), alpha=step_size)
            offset = end
        # What is written to inside a wrapper counts as written to the wrapper.
        torch.autograd.graph.increment_version(self.params)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real elements that this rank holds of a tensor: a view."""
    local = tensor._local_tensor if isinstance(tensor, HDTensor) else tensor.detach()
    return torch.view_as_real(local) if local.is_complex() else local


def _cut_of(tensor: torch.Tensor) -> Any:
    where = (tensor.spec, tensor.top_sizes) if isinstance(tensor, HDTensor) else None
    return tuple(tensor.shape), where
