"""Looking at specs and trainings: pictures as text and as SVG. Pure; no process groups."""

from hdtensor.debug.svg import svg
from hdtensor.debug.training import write_training_picture
from hdtensor.debug.visualize import visualize


__all__ = ["svg", "visualize", "write_training_picture"]
