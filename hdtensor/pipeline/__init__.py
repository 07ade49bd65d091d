"""Pipelines: lanes of stages found in a plan, and the schedules that order their work."""

from hdtensor.pipeline.exchanges import exchange_of, plan_exchanges, plan_lanes
from hdtensor.pipeline.lanes import Edge, Exchange, Lane, LaneStage, Place, find_lanes
from hdtensor.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    Transport,
    build_schedule,
    microbatch_sizes,
    peak_activations,
    validate,
)


__all__ = [
    "SCHEDULES",
    "Action",
    "Edge",
    "Exchange",
    "Kind",
    "Lane",
    "LaneStage",
    "Place",
    "Schedule",
    "Transport",
    "build_schedule",
    "exchange_of",
    "find_lanes",
    "microbatch_sizes",
    "peak_activations",
    "plan_exchanges",
    "plan_lanes",
    "validate",
]
