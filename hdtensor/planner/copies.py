"""``find_copies``: which devices and nodes hold the only copy of something, so that a running job loses it with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from hdtensor.planner.emit import Planned
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy


class Lost(NamedTuple):
    """What of a model nobody holds any more once some ranks are gone.

    Attributes:
        embedding: Whether the embedding is lost.
        layers: First and last layer of each run of layers of which a part or all is lost.
        head: Whether the head is lost, or the norm before it, which is in last stages even if the head is the embedding.
        states: Whether a part of the optimizer's states is lost, by ZeRO or with the weights.
    """

    embedding: bool
    layers: tuple[tuple[int, int], ...]
    head: bool
    states: bool

    @property
    def has_weights(self) -> bool:
        """Whether weights are among it."""
        return self.embedding or bool(self.layers) or self.head

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        layers = [list(run) for run in self.layers]
        return {"embedding": self.embedding, "layers": layers, "head": self.head}

    def words(self, num_layers: int | None = None) -> str:
        """Return the weights in words.

        >>> Lost(True, ((0, 3), (8, 8)), False, True).words(16)
        'the embedding, layers 0-3,8'

        Args:
            num_layers: Of the model; all of them are called so.
        """
        runs = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.layers)
        is_one = len(self.layers) == 1 and self.layers[0][0] == self.layers[0][1]
        layers = f"layer{'' if is_one else 's'} {runs}"
        if num_layers is not None and self.layers == ((0, num_layers - 1),):
            layers = "all layers"
        parts = [
            "the embedding" if self.embedding else "",
            layers if self.layers else "",
            "the head" if self.head else "",
        ]
        return ", ".join(filter(None, parts))


class Copies(NamedTuple):
    """What a plan's devices and nodes alone hold, and so which losses it survives.

    Attributes:
        devices: Rank -> the weights of which nobody else has a copy; ranks that others can stand in for are left out.
        nodes: Number of a node -> likewise, if all of its ranks are gone at once.
        has_states: Whether what holds of weights holds of the optimizer's states too. With ZeRO each part of them is
            on one device only.
        num_layers: Layers of the model.
    """

    devices: dict[int, Lost]
    nodes: dict[int, Lost]
    has_states: bool
    num_layers: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "any_device_may_die": self.has_states and not self.devices,
            "any_node_may_die": self.has_states and not self.nodes,
            "optimizer_states_have_copies": self.has_states,
            "only_on_device": [{"rank": r, **lost.to_dict()} for r, lost in self.devices.items()],
            "only_on_node": [{"node": n, **lost.to_dict()} for n, lost in self.nodes.items()],
        }


def find_copies(planned: Planned) -> Copies:
    """Return what each single device, and each single node, alone holds of a plan's model.

    Args:
        planned: The strategy, and what it is for.
    """
    strategy, model, cluster, workload = planned
    runs = _runs(strategy)
    # Whoever takes something along has a part in every stage that holds it.
    holders = [_common([stage.ranks for stage in stages]) for _, stages in runs]
    nodes = [_common([map(cluster.node_of, stage.ranks) for stage in stages]) for _, stages in runs]
    devices = {
        rank: lost
        for rank in sorted(set().union(*holders))
        if (lost := _lost(planned, runs, {rank})).has_weights
    }
    alone = {
        node: lost
        for node in sorted(set().union(*nodes))
        if (lost := _lost(planned, runs, set(cluster.ranks_of(node)))).has_weights
    }
    return Copies(devices, alone, workload.zero == 0, model.num_layers)


def find_lost(planned: Planned, dead: Collection[int]) -> Lost:
    """Return what the ranks that are left cannot restore once some are gone, so that it needs a checkpoint.

    Source: ``hdtensor.plan_switch``, which takes what dead ranks held from others; see docs/elastic.md.

    Args:
        planned: The strategy that ran, and what it is for.
        dead: The ranks that are gone.
    """
    return _lost(planned, _runs(planned.strategy), set(dead))


#: First and last layer, and the stage of each lane that holds them.
_Run = tuple[tuple[int, int], tuple[StageChoice, ...]]


def _runs(strategy: Strategy) -> list[_Run]:
    """Return the runs of layers that are in one stage of each lane."""
    firsts = [_first_layers(lane) for lane in strategy.lanes]
    cuts = sorted({first for each in firsts for first in each})
    place = [0] * len(firsts)
    runs = []
    for first, end in pairwise(cuts):
        for lane, mine in enumerate(firsts):
            while mine[place[lane] + 1] <= first:
                place[lane] += 1
        stages = zip(strategy.lanes, place, strict=True)
        runs.append(((first, end - 1), tuple(lane.stages[at] for lane, at in stages)))
    return runs


def _first_layers(lane: LaneChoice) -> tuple[int, ...]:
    """Return the first layer of each stage, and the end."""
    return tuple(accumulate((stage.num_layers for stage in lane.stages), initial=0))


def _common(groups: Sequence[Iterable[int]]) -> set[int]:
    return set.intersection(*map(set, groups))


def _lost(planned: Planned, runs: Sequence[_Run], dead: set[int]) -> Lost:
    layers: list[tuple[int, int]] = []
    for (first, last), stages in runs:
        if not _is_whole(stages, dead):
            if layers and layers[-1][1] == first - 1:
                layers[-1] = (layers[-1][0], last)
            else:
                layers.append((first, last))
    # Every rank of the first stage holds the embedding, of the last one the head: TP does not cut them.
    starts, ends = runs[0][1], runs[-1][1]
    embedding = _is_gone((*starts, *ends) if planned.model.is_tied else starts, dead)
    head = _is_gone(ends, dead)
    used = {rank for _, stages in runs for stage in stages for rank in stage.ranks}
    states = bool(layers) or embedding or head or (planned.workload.zero > 0 and bool(used & dead))
    return Lost(embedding, tuple(layers), head, states)


def _is_gone(stages: Iterable[StageChoice], dead: set[int]) -> bool:
    return all(dead.issuperset(stage.ranks) for stage in stages)


def _is_whole(stages: Sequence[StageChoice], dead: set[int]) -> bool:
    """Return whether the ranks that are left hold every part of what some stages hold copies of.

    Ranks of a stage are cp x tp, and rank i of its tp holds the i-th of tp equal parts.
    """
    if any(dead.isdisjoint(stage.ranks) for stage in stages):
        return True
    parts = sorted(
        {
            (Fraction(number % stage.tp, stage.tp), Fraction(number % stage.tp + 1, stage.tp))
            for stage in stages
            for number, rank in enumerate(stage.ranks)
            if rank not in dead
        }
    )
    done = Fraction(0)
    for start, end in parts:
        if start > done:
            return False
        done = max(done, end)
    return done == 1
