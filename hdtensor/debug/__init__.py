"""Looking at specs, plans, trainings and communication: pictures as text and as SVG, and counts."""

from hdtensor.debug.communication import CommunicationCount, count_communication
from hdtensor.debug.svg import svg
from hdtensor.debug.training import write_training_picture
from hdtensor.debug.transfers import transfer_svg, write_transfer_picture
from hdtensor.debug.visualize import visualize


__all__ = [
    "CommunicationCount",
    "count_communication",
    "svg",
    "transfer_svg",
    "visualize",
    "write_training_picture",
    "write_transfer_picture",
]
