"""Pipelines: lanes of stages found in a plan, and the schedules that order their work."""

from hdtensor.pipeline.exchanges import exchange_of, plan_exchanges, plan_lanes
from hdtensor.pipeline.lanes import Edge, Exchange, Lane, LaneStage, Place, find_lanes
from hdtensor.pipeline.runtime import Runner, RunnerOptions, causal_lm_loss
from hdtensor.pipeline.sampler import LaneSampler
from hdtensor.pipeline.schedule import (
    SCHEDULES,
    Action,
    Durations,
    Event,
    Kind,
    LaneRun,
    Schedule,
    Span,
    Task,
    Timeline,
    Transport,
    build_schedule,
    microbatch_sizes,
    peak_activations,
    run_tasks,
    simulate,
    validate,
)


__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "Edge",
    "Event",
    "Exchange",
    "Kind",
    "Lane",
    "LaneRun",
    "LaneSampler",
    "LaneStage",
    "Place",
    "Runner",
    "RunnerOptions",
    "Schedule",
    "Span",
    "Task",
    "Timeline",
    "Transport",
    "build_schedule",
    "causal_lm_loss",
    "exchange_of",
    "find_lanes",
    "microbatch_sizes",
    "peak_activations",
    "plan_exchanges",
    "plan_lanes",
    "run_tasks",
    "simulate",
    "validate",
]
