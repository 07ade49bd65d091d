"""A lane's view of a model's parameters: leaves of the lane's own specs, of the same memory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hdtensor._torch_compat import new_wrapper
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements import HDSpec
from hdtensor.tensor import HDTensor


class _Place(NamedTuple):
    """Where a leaf stands in for a parameter.

    Attributes:
        home: The module's table of parameters.
        key: The parameter's name in it.
        parameter: What stands there otherwise.
    """

    home: dict[str, Any]
    key: str
    parameter: HDTensor


class LaneParameters:
    """Leaves that stand in for a model's parameters while its lane runs.

    A leaf is cut as its stage says, over one subgroup; its gradients add up micro-batch by micro-batch without leaving
    the stage. A tied weight has a leaf for each stage that uses it.

    Attributes:
        leaves: For each parameter in registration order its leaves in this lane.
        shared: Ids of leaves that stand in several places, so that a backward may reach them several times.
    """

    def __init__(
        self, model: nn.Module, slots: Mapping[str, HDSpec], gradient_dtype: torch.dtype | None
    ) -> None:
        """Make the leaves.

        Args:
            model: Its parameters are ``HDTensor``s.
            slots: Parameter, under each of its names -> spec on the stage that uses it there.
            gradient_dtype: In which gradients of parameters of lower precision add up; None: in their own.
        """
        self.leaves: list[tuple[HDTensor, list[HDTensor]]] = []
        self._places: list[tuple[_Place, HDTensor]] = []
        known: dict[tuple[int, HDSpec], HDTensor] = {}
        of_parameter: dict[int, list[HDTensor]] = {}
        for module_name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                assert isinstance(parameter, HDTensor), "parallelize has replaced every parameter"
                spec = slots[f"{module_name}.{key}" if module_name else key]
                leaf = known.get((id(parameter), spec))
                if leaf is None:
                    leaf = known[id(parameter), spec] = _leaf(parameter, spec)
                    leaf.grad_dtype = _gradient_dtype(parameter.dtype, gradient_dtype)
                    if id(parameter) not in of_parameter:
                        self.leaves.append((parameter, []))
                        of_parameter[id(parameter)] = self.leaves[-1][1]
                    of_parameter[id(parameter)].append(leaf)
                self._places.append((_Place(module._parameters, key, parameter), leaf))
        times = Counter(id(leaf) for _, leaf in self._places)
        self.shared = {leaf for leaf, num in times.items() if num > 1}
        self._local = [(p, leaf) for p, leaves in self.leaves for leaf in leaves if leaf.is_local]
        self._held_places = [(place, leaf) for place, leaf in self._places if leaf.is_local]
        self._needs_grad = [parameter.requires_grad for parameter, _ in self.leaves]

    def __iter__(self) -> Iterator[HDTensor]:
        for _, leaves in self.leaves:
            yield from leaves

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the leaves stand in for the parameters, with their present values and ``requires_grad``."""
        for parameter, leaf in self._local:
            if leaf._local_tensor.data_ptr() != parameter._local_tensor.data_ptr():
                leaf._local_tensor = parameter._local_tensor.detach()
        needs_grad = [parameter.requires_grad for parameter, _ in self.leaves]
        if needs_grad != self._needs_grad:
            self._needs_grad = needs_grad
            for (_, leaves), needs in zip(self.leaves, needs_grad, strict=True):
                for leaf in leaves:
                    leaf.requires_grad_(needs)
        for place, leaf in self._places:
            place.home[place.key] = leaf
        try:
            yield
        finally:
            for place, _ in self._places:
                place.home[place.key] = place.parameter

    def stand(self, plain: Mapping[int, torch.Tensor] | None) -> None:
        """Have plain tensors stand in for the leaves of which this rank has a part, or the leaves again.

        Args:
            plain: By the ids of the leaves; None: the leaves.
        """
        for place, leaf in self._held_places:
            place.home[place.key] = leaf if plain is None else plain[id(leaf)]

    def held(self) -> Iterator[HDTensor]:
        """Yield the leaves of which this rank has a part."""
        return (leaf for _, leaf in self._local)

    def drop_gradients(self) -> None:
        """Forget the leaves' gradients."""
        for _, leaf in self._local:
            leaf.grad = None


def _leaf(parameter: HDTensor, spec: HDSpec) -> HDTensor:
    bound = BoundSpec.bind(spec, parameter.shape, None, parameter.dtype)
    local = parameter._local_tensor.detach()
    if bound.index is None and local.numel():
        local = local.new_empty(0)  # the rank holds it for another stage
    return nn.Parameter(new_wrapper(HDTensor, local, bound, False), parameter.requires_grad)  # type: ignore[return-value]


def _gradient_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return in which dtype gradients of parameters of a dtype add up."""
    if wanted is None or not dtype.is_floating_point or dtype.itemsize >= wanted.itemsize:
        return dtype
    return wanted
