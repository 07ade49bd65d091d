"""Where hidden states get another spec on their way through a model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from hdtensor.placements import HDSpec
from hdtensor.plan.cuts import is_cut
from hdtensor.plan.expanded import RedistributePoint
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.sites import Site, Use, layer_sites, stages_at
from hdtensor.plan.stages import Pipeline


#: ``activation(site, sequence_parallel=...)`` is the spec of hidden states there.
Activation = Callable[..., HDSpec]


def find_points(
    pipelines: Sequence[Pipeline],
    model: ModelDescription,
    uses: Sequence[Use],
    activation: Activation,
    sequence_parallel: bool,
) -> Iterator[RedistributePoint]:
    """Yield each point once, in the order in which the parameters are registered.

    ==========================================  ===================================================  =====
    point                                       why                                                  kind
    ==========================================  ===================================================  =====
    input of a layer                            some pipeline's stage begins there                   stage
    input of the block around a column (or      its gradient is Partial inside the subgroup          tp
    heads) weight that is cut
    output of a row or vocab weight's module;   it is Partial inside the subgroup                    tp
    of the block around it, if that has experts
    input of the first layer                    cut on the sequence from here (sequence parallel)    tp
    output of the last layer                    whole again                                          tp
    ==========================================  ===================================================  =====
    """
    finder = _Finder(pipelines, model, uses, activation, sequence_parallel)
    seen: set[tuple[str, str]] = set()
    for use in uses:
        for point in finder.points_of(use):
            if (point.module, point.side) not in seen:
                seen.add((point.module, point.side))
                yield point


class _Finder:
    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        model: ModelDescription,
        uses: Sequence[Use],
        activation: Activation,
        sequence_parallel: bool,
    ) -> None:
        self._pipelines = pipelines
        self._model = model
        self._activation = activation
        self._is_sequence_parallel = sequence_parallel
        modules, by_layer = model.layer_modules, layer_sites(pipelines)
        self._modules = modules
        self._begins = {
            b: _turns(pipelines, by_layer[a], by_layer[b])
            for a, b in itertools.pairwise(modules)
            if by_layer[a] != by_layer[b]
        }
        self._firsts, self._lasts = _ends(modules)
        self._is_cut = functools.cache(self._is_use_cut)
        self._expert_blocks = {
            self._around(use) for use in uses if use.role.is_expert and self._is_cut(use)
        }

    def points_of(self, use: Use) -> Iterator[RedistributePoint]:
        """Yield the points that one use of a parameter asks for."""
        whole = between = self._activation(use.site)
        if use.layer is not None:
            if self._is_sequence_parallel:
                between = self._activation(use.site, sequence_parallel=True)
            yield from self._layer_points(use, whole, between)
        if self._is_cut(use):
            yield from self._block_points(use, whole, between)

    def _layer_points(
        self, use: Use, whole: HDSpec, between: HDSpec
    ) -> Iterator[RedistributePoint]:
        layer = self._layer_name(use)
        assert layer is not None, use.name
        assert use.layer is not None, use.name
        if use.layer in self._begins:
            for module in self._modules[use.layer]:
                yield RedistributePoint(
                    module=module,
                    side="input",
                    kind="stage",
                    spec=between,
                    turns=self._begins[use.layer],
                )
        elif between is not whole and layer in self._firsts:
            yield _point(layer, "input", "tp", between)
        if between is not whole and layer in self._lasts:
            yield _point(layer, "output", "tp", whole)

    def _block_points(
        self, use: Use, whole: HDSpec, between: HDSpec
    ) -> Iterator[RedistributePoint]:
        module, block = use.name.rpartition(".")[0], self._block(use)
        reads_block = block != module and self._reads_hidden_states(use)
        if reads_block or (between is not whole and block != module):
            yield _point(block, "input", "tp", whole)
        if use.role.cuts_input:
            ends = block if block in self._expert_blocks else module
            yield _point(ends, "output", "tp", between)
        elif not reads_block:
            yield _point(module, "input", "tp", whole)

    def _is_use_cut(self, use: Use) -> bool:
        return is_cut(use, stages_at(self._pipelines, use.site), self._model)

    def _layer_name(self, use: Use) -> str | None:
        found = self._model.layer_of(use.name)
        return None if found is None else found[0]

    def _around(self, use: Use) -> str:
        """Return the module around a parameter's module, or that itself if only a layer is around it."""
        module = use.name.rpartition(".")[0]
        around, layer = module.rpartition(".")[0], self._layer_name(use)
        return around if layer is not None and around.startswith(f"{layer}.") else module

    def _block(self, use: Use) -> str:
        """Return the module whose input all of its projections read, such as attention or an MLP.

        Shared experts belong to the block of the routed ones, whose terms are added up first.
        """
        around = self._around(use)
        inside = (b for b in self._expert_blocks if f"{around}.".startswith(f"{b}."))
        return next(inside, around)

    def _reads_hidden_states(self, use: Use) -> bool:
        """Whether a weight's input is that of its block, so that one point serves q, k and v.

        A projection of something narrower than hidden states reads a latent vector made inside the block.
        """
        if use.role.cuts_input:
            return False
        hidden = self._model.hidden_size
        if hidden is None or len(use.shape) != 2:
            return True
        return use.shape[0 if use.transposed else 1] == hidden


def _turns(pipelines: Sequence[Pipeline], before: Site, after: Site) -> tuple[int, ...]:
    """Return the pipelines in which a stage begins on the ranks of the stage before it."""
    return tuple(
        p
        for p, (pipeline, a, b) in enumerate(zip(pipelines, before, after, strict=True))
        if a != b and pipeline.stages[a].ranks == pipeline.stages[b].ranks
    )


def _ends(modules: Mapping[int, tuple[str, ...]]) -> tuple[set[str], set[str]]:
    """Return the first and the last layer of each stack of layers."""
    stacks: dict[str, list[str]] = {}
    for names in modules.values():
        for name in names:
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
    return {names[0] for names in stacks.values()}, {names[-1] for names in stacks.values()}


def _point(
    module: str, side: Literal["input", "output"], kind: Literal["stage", "tp"], spec: HDSpec
) -> RedistributePoint:
    return RedistributePoint(module=module, side=side, kind=kind, spec=spec)
