"""Modules that run on plain local tensors: what they compute depends on data, token by token.

Routed experts are such: which tokens an expert gets is in the data, so no operator inside has a shape that all ranks know.
But every row of the result follows from the same row of the inputs and from the parameters. So each rank runs the module on
its own rows, and the layouts follow, tier by tier and mesh axis by mesh axis:

==================  ==================  ====================================  ==========================================
rows of inputs      parameters          result                                gradients
==================  ==================  ====================================  ==========================================
cut                 whole               cut alike                             of parameters ``Partial``
whole               whole               whole                                 whole
whole               cut inside experts  ``Partial``: terms of one sum         of inputs ``Partial``, of parameters cut
cut                 cut                 refused                               -
==================  ==================  ====================================  ==========================================
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor.api.local_map import local_map
from hdtensor.api.region_leaf import parameters_as
from hdtensor.errors import DeductionError, PlanError
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec
from hdtensor.tensor import HDTensor


#: First parameters of the ``forward`` of ``transformers``' stacked experts, whatever the class is called.
_EXPERTS_SIGNATURES = (
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
)


def is_known(module: nn.Module) -> bool:
    """Return whether a module is one of stacked experts that takes its tokens with their routes."""
    if not any(p is not None and p.ndim == 3 for p in module._parameters.values()):
        return False
    names = list(inspect.signature(module.forward).parameters)
    return names[:3] in _EXPERTS_SIGNATURES


def install(model: nn.Module, globs: Sequence[str]) -> list[LocalModule]:
    """Have known modules, and those that the user names, run on local tensors.

    Args:
        model: The model.
        globs: Match a module's whole name, the end of one that begins after a dot, or its class's name.

    Raises:
        PlanError: If one is no text, or names no module.
    """
    if isinstance(globs, str):
        raise PlanError(f"local_modules must be a list of globs, got the text {globs!r}.")
    found: dict[str, nn.Module] = {}
    for index, glob in enumerate(globs):
        named = {name: m for name, m in model.named_modules() if name and _matches(glob, name, m)}
        if not named:
            kinds = sorted({type(m).__name__ for m in model.modules()})
            raise PlanError(
                f"local_modules[{index}]: {glob!r} names none of the model's modules. Give the name of one, or of "
                f"a class: {', '.join(kinds)}."
            )
        found.update(named)
    found.update((name, m) for name, m in model.named_modules() if name and is_known(m))
    outer = [n for n in found if not any(n.startswith(f"{other}.") for other in found)]
    return [LocalModule(name, found[name]) for name in outer]


def _matches(glob: str, name: str, module: nn.Module) -> bool:
    if not isinstance(glob, str):
        raise PlanError(f"local_modules holds globs, got {glob!r}.")
    names = (name, f".{name}", type(module).__name__)
    patterns = (glob, f"*.{glob}", glob)
    return any(map(fnmatch.fnmatchcase, names, patterns))


class LocalModule:
    """Stands in for a module's ``forward``."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.forward = module.forward
        module.forward = self._stand_in()
        #: Compilers run it while they trace, and keep what it does to tensors.
        self._in_graph = torch.compiler.allow_in_graph(lambda *args: self._run(*args))

    def _stand_in(self) -> Callable[..., Any]:
        @functools.wraps(self.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return forward

    def remove(self) -> None:
        """Give the module its own forward back."""
        del self.module.forward
        if self.module.forward != self.forward:
            self.module.forward = self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's rows.

        Raises:
            DeductionError: If rows and parameters are cut along one axis, or a reduction of an input is pending
                between subgroups.
        """
        names = [k for k, v in kwargs.items() if isinstance(v, HDTensor)]
        given = [*args, *(kwargs.pop(k) for k in names)]
        if not any(isinstance(a, HDTensor) for a in given):
            return self.forward(*args, **kwargs)
        run = self._in_graph if torch.compiler.is_compiling() else self._run
        return run(names, given, kwargs, list(self.module.parameters()))

    def _run(
        self, names: list[str], given: list[Any], kwargs: dict[str, Any], parameters: list[Any]
    ) -> Any:
        """Run the module on this rank's rows of the arguments, of which the last ones are called ``names``."""
        tokens = [a for a in given if isinstance(a, HDTensor)]
        num_unnamed = len(given) - len(names)
        held = [p for p in parameters if isinstance(p, HDTensor)]
        spec = self._rows(tokens)
        placed = [self._at(a, spec) if isinstance(a, HDTensor) else a for a in given]

        def run(*local: Any) -> Any:
            rows, weights = local[: len(given)], local[len(given) :]
            with parameters_as(self.module, lambda i, _: weights[i]):
                named = dict(zip(names, rows[num_unnamed:], strict=True))
                return self.forward(*rows[:num_unnamed], **named, **kwargs)

        first = next(a for a in placed if isinstance(a, HDTensor))
        mapped = local_map(run, self._result(spec, held), out_shapes=first.shape)
        return mapped(*placed, *parameters)

    def _rows(self, tokens: Sequence[HDTensor]) -> HDSpec:
        """Return how all inputs are to be cut: as the first one that is, with nothing pending."""
        for x in tokens:
            if isinstance(x.spec.top, Partial):
                raise DeductionError(
                    f"{self.name}: an input is pending between subgroups, {x!r}. Redistribute it before."
                )
        spec = tokens[0].spec
        tops = [x.spec.top for x in tokens]
        source = next((x.spec for x in tokens if checks.is_cut(x.spec.top)), spec)
        groups = []
        for index, group in enumerate(spec.subgroups):
            choices = zip(*(x.spec.subgroups[index].placements for x in tokens), strict=True)
            groups.append(group.with_placements([self._row_cut(axis) for axis in choices]))
        return HDSpec(groups, self._row_cut(tops), source.top_ratio)

    def _row_cut(self, placements: Sequence[Placement]) -> Placement:
        cuts = list(dict.fromkeys(p for p in placements if checks.is_cut(p)))
        if len(cuts) > 1 or any(checks.shard_dim(p) != 0 for p in cuts):
            raise DeductionError(
                f"{self.name} runs on the local rows of its inputs, which must be cut on dim 0 and alike, got "
                f"{', '.join(map(checks.placement_text, placements))}. Redistribute them before."
            )
        return cuts[0] if cuts else Replicate()

    def _at(self, x: HDTensor, spec: HDSpec) -> HDTensor:
        return x if x.spec is spec or x.spec == spec else x.redistribute(spec)

    def _result(self, rows: HDSpec, parameters: Sequence[HDTensor]) -> HDSpec:
        groups = []
        for index, group in enumerate(rows.subgroups):
            placements = []
            for axis, cut in enumerate(group.placements):
                have = [p.spec.subgroups[index].placements[axis] for p in parameters]
                placements.append(self._result_along(cut, have))
            groups.append(group.with_placements(placements))
        return rows.replace(subgroups=tuple(groups))

    def _result_along(self, rows: Placement, parameters: Sequence[Placement]) -> Placement:
        if not any(map(checks.is_cut, parameters)):
            return rows
        if checks.is_cut(rows):
            raise DeductionError(
                f"{self.name}: its parameters and the rows of its inputs are cut along the same mesh axis. "
                f"Gather the rows before it, or replicate its parameters by a pattern."
            )
        return Partial()
