"""``Strategy``: what the planner chooses. ``emit`` turns it into an ``AnnotationPlan``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StageChoice(NamedTuple):
    """One stage of a lane.

    Attributes:
        ranks: The ranks that hold it, ``tp * cp`` of them.
        num_layers: Decoder layers; the first stage has the embedding beside, the last one the head.
        tp: Degree of tensor parallelism.
        cp: Degree of context parallelism.
    """

    ranks: tuple[int, ...]
    num_layers: int
    tp: int
    cp: int = 1


class LaneChoice(NamedTuple):
    """One pipeline.

    Attributes:
        stages: In order.
        num_microbatches: Of a step.
        mbs: Samples of a micro-batch.
    """

    stages: tuple[StageChoice, ...]
    num_microbatches: int
    mbs: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """All lanes of a step; ranks that are in none are left idle.

    Attributes:
        lanes: The lanes.
    """

    lanes: tuple[LaneChoice, ...]
