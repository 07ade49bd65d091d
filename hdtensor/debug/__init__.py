"""Looking at specs, plans, trainings and communication: pictures as text and as SVG, counts, and whether ranks agree."""

from hdtensor._config import CONFIG
from hdtensor.debug import agreement, operators
from hdtensor.debug.agreement import check_agreement
from hdtensor.debug.communication import CommunicationCount, count_communication
from hdtensor.debug.executable import executable_graph
from hdtensor.debug.graph import ExecutableGraph
from hdtensor.debug.svg import svg
from hdtensor.debug.training import write_training_picture
from hdtensor.debug.transfers import transfer_svg, write_transfer_picture
from hdtensor.debug.visualize import visualize


__all__ = [
    "CommunicationCount",
    "ExecutableGraph",
    "check_agreement",
    "count_communication",
    "executable_graph",
    "svg",
    "transfer_svg",
    "visualize",
    "write_training_picture",
    "write_transfer_picture",
]

if CONFIG.debug:
    _check = agreement.start(CONFIG.debug_seconds, keeps_operators=CONFIG.debug > 1)
    agreement.tell_ends(_check)
    if CONFIG.debug > 1:
        operators.log_operators(_check.note)
