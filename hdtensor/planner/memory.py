"""``rank_memory``: bytes on each rank, by what they are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hdtensor.pipeline.schedule.actions import Kind, Schedule
from hdtensor.planner.costs import CostModel
from hdtensor.planner.decompose import PlacedStage


class RankMemory(NamedTuple):
    """Bytes on a rank at the moment of its peak.

    Attributes:
        parameters: Bytes.
        gradients: Bytes.
        optimizer: Bytes of state and masters, as ZeRO divides them.
        activations: Bytes of all micro-batches in flight.
        buffers: Bytes of communication buffers, workspaces and the runtime.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def in_flight(schedule: Schedule) -> dict[int, int]:
    """Return, for each stage, the most micro-batches whose activations are held at once.

    They follow from the order of a stage's passes alone, however long these take.

    >>> in_flight(Schedule.parse("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1"))
    {0: 2, 1: 1}
    """
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for row in schedule.rows:
        for action in row:
            change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
            held[action.stage] = held.get(action.stage, 0) + change.get(action.kind, 0)
            most[action.stage] = max(most.get(action.stage, 0), held[action.stage])
    return most


def held_microbatches(schedule: str, num_stages: int, num_microbatches: int) -> list[int]:
    """Return, for each stage, the most micro-batches in flight at once.

    >>> held_microbatches("1F1B", 3, 2)
    [2, 2, 1]
    """
    if schedule.lower() == "gpipe":
        return [num_microbatches] * num_stages
    if (
        schedule.lower() == "zb-h1"
    ):  # a weight's part of backward is put off by the number of its stage
        return [min(num_microbatches, num_stages)] * num_stages
    return [min(num_microbatches, num_stages - stage) for stage in range(num_stages)]


def rank_memory(
    stages: Sequence[PlacedStage],
    held: Mapping[int, int],
    mbs: int,
    costs: CostModel,
    num_sharers: int,
) -> dict[int, RankMemory]:
    """Return the bytes on each rank of a lane.

    Args:
        stages: Of the lane.
        held: Number of a stage -> micro-batches in flight.
        mbs: Samples of a micro-batch.
        costs: What knows bytes.
        num_sharers: Copies of the layers that divide optimizer state among them; 1 without ZeRO.
    """
    ranks: dict[int, RankMemory] = {}
    for number, stage in enumerate(stages):
        parts = costs.memory(stage.group, stage.layers, mbs)
        new = RankMemory(
            parts.parameters,
            parts.gradients,
            parts.optimizer / num_sharers,
            parts.activation * held.get(number, 0),
            parts.buffers,
        )
        for rank in stage.choice.ranks:
            old = ranks.get(rank)
            if old is None:
                ranks[rank] = new
            else:  # several stages on a rank share its buffers
                sums = RankMemory(*(a + b for a, b in zip(old, new, strict=True)))
                ranks[rank] = sums._replace(buffers=max(old.buffers, new.buffers))
    return ranks
