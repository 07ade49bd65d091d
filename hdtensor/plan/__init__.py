"""Annotation plans: which rank holds what, as JSON or as values. Pure; no process groups."""

from hdtensor.plan.annotation import AnnotationPlan
from hdtensor.plan.expanded import ExpandedPlan, RedistributePoint
from hdtensor.plan.families import BUILT_IN_PATTERNS, LLAMA_PATTERNS, VOCAB_PARALLEL
from hdtensor.plan.model import ModelDescription, ParameterDescription
from hdtensor.plan.patterns import Pattern, Role
from hdtensor.plan.stages import About, Pipeline, Stage, Uniform
from hdtensor.plan.strategy import StrategyPlan


__all__ = [
    "BUILT_IN_PATTERNS",
    "LLAMA_PATTERNS",
    "VOCAB_PARALLEL",
    "About",
    "AnnotationPlan",
    "ExpandedPlan",
    "ModelDescription",
    "ParameterDescription",
    "Pattern",
    "Pipeline",
    "RedistributePoint",
    "Role",
    "Stage",
    "StrategyPlan",
    "Uniform",
]
