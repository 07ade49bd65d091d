"""Schedules: who does what in which order, checked and timed without any process. Pure."""

from hdtensor.pipeline.schedule.actions import Action, Kind, Schedule
from hdtensor.pipeline.schedule.channels import Transport
from hdtensor.pipeline.schedule.choose import SCHEDULES, build_schedule, microbatch_sizes
from hdtensor.pipeline.schedule.events import Task, run_tasks
from hdtensor.pipeline.schedule.simulate import Durations, Event, LaneRun, simulate
from hdtensor.pipeline.schedule.timeline import Span, Timeline
from hdtensor.pipeline.schedule.validate import peak_activations, validate


__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "Event",
    "Kind",
    "LaneRun",
    "Schedule",
    "Span",
    "Task",
    "Timeline",
    "Transport",
    "build_schedule",
    "microbatch_sizes",
    "peak_activations",
    "run_tasks",
    "simulate",
    "validate",
]
