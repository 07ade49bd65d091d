"""Schedules: who does what in which order, checked and timed without any process. Pure."""

from hdtensor.pipeline.schedule.actions import Action, Kind, Schedule
from hdtensor.pipeline.schedule.channels import Transport
from hdtensor.pipeline.schedule.choose import SCHEDULES, build_schedule, microbatch_sizes
from hdtensor.pipeline.schedule.validate import peak_activations, validate


__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "Transport",
    "build_schedule",
    "microbatch_sizes",
    "peak_activations",
    "validate",
]
