"""Running pipelines: the runner, and what it is made of."""

from hdtensor.pipeline.runtime.losses import causal_lm_loss
from hdtensor.pipeline.runtime.options import RunnerOptions
from hdtensor.pipeline.runtime.runner import Runner


__all__ = ["Runner", "RunnerOptions", "causal_lm_loss"]
