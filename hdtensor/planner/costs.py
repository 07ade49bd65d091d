"""``CostModel``: what every other part of the planner asks for seconds and bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, TypeAlias

from hdtensor.planner.cluster import Link
from hdtensor.planner.devices import Device


#: A unit of a model: what stands before the layers, one decoder layer, what stands behind them.
Unit: TypeAlias = Literal["embedding", "layer", "head"]


class StageGroup(NamedTuple):
    """The like devices that hold a stage.

    Attributes:
        device: Their kind.
        inside: The slowest link between two of them.
        tp: Degree of tensor parallelism.
        cp: Degree of context parallelism.
    """

    device: Device
    inside: Link
    tp: int
    cp: int = 1


class UnitSeconds(NamedTuple):
    """What a unit takes for one micro-batch, communication inside of the stage included.

    Attributes:
        forward: Seconds.
        backward: Seconds, with what is computed again.
    """

    forward: float
    backward: float


class StageMemory(NamedTuple):
    """Bytes on each rank of a stage, all but what depends on how many ranks share optimizer state.

    Attributes:
        parameters: Bytes.
        gradients: Bytes.
        optimizer: Bytes of state and masters, before ZeRO divides them.
        activation: Bytes that one micro-batch in flight keeps.
        buffers: Bytes of communication buffers, workspaces and the runtime, once.
    """

    parameters: float
    gradients: float
    optimizer: float
    activation: float
    buffers: float


class CostModel(ABC):
    """Seconds and bytes of one model and workload on any stage. All numbers depend only on the arguments."""

    @abstractmethod
    def seconds(self, unit: Unit, group: StageGroup, mbs: int) -> UnitSeconds:
        """Return what a unit takes for a micro-batch of ``mbs`` samples."""

    @abstractmethod
    def message(self, sender: StageGroup, receiver: StageGroup, link: Link, mbs: int) -> float:
        """Return the seconds of a micro-batch's hidden states, or their gradient, over a link."""

    @abstractmethod
    def memory(
        self, group: StageGroup, num_layers: int, mbs: int, *, is_first: bool, is_last: bool
    ) -> StageMemory:
        """Return the bytes on each rank of a stage."""

    @abstractmethod
    def synchronize(self, num_layers: int, groups: tuple[StageGroup, ...], link: Link) -> float:
        """Return the seconds of summing the gradients of layers that these stages hold, and gathering parameters.

        Args:
            num_layers: Decoder layers.
            groups: The stages that hold copies; one alone has nothing to sum.
            link: The slowest link between them.
        """

    @abstractmethod
    def update(self, group: StageGroup, num_layers: int, num_ranks: int) -> float:
        """Return the seconds of the optimizer for layers whose state is cut over a number of ranks."""
