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


class LayerSpan(NamedTuple):
    """Layers one after another, and whether the units before and behind all layers are with them.

    Attributes:
        num_layers: Decoder layers.
        is_first: Whether the embedding is with them.
        is_last: Whether the head is with them.
    """

    num_layers: int
    is_first: bool = False
    is_last: bool = False


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


class RuntimeTraits(NamedTuple):
    """What depends on the software that trains.

    Attributes:
        is_blocking: Whether sender and receiver do nothing else during a message.
        start: Seconds of a step before a lane of several stages begins its passes, and after it ends them:
            agreeing on the loss, the first launches.
    """

    is_blocking: bool = False
    start: float = 0.0


class CostModel(ABC):
    """Seconds and bytes of one model and workload on any stage. All numbers depend only on the arguments.

    The search asks for few numbers and derives all others, and its lower bound is one only if these hold:

    * Layers are alike. A stage's passes take the sum of its units' ``seconds``. Of a model with unlike layers,
      such as DeepSeek's dense first ones, a layer stands for their mean: seconds of the whole model are right,
      those of the stage with the unlike layers are not.
    * Each field of ``memory`` grows by the same bytes with each layer from the first one on, and by as many for
      the embedding, and for the head, whatever the layers; both together may be less (a tied head).
    * ``synchronize`` and ``update`` grow with layers. Cut in two, layers take no less in all. Copies that are
      unlike take no less than like ones of the kind of any of them, more copies and slower links no less than
      fewer and faster ones.
    * All numbers are 0 or more.
    """

    @abstractmethod
    def seconds(self, unit: Unit, group: StageGroup, mbs: int) -> UnitSeconds:
        """Return what a unit takes for a micro-batch of ``mbs`` samples."""

    def terms(self, unit: Unit, group: StageGroup, mbs: int) -> dict[str, UnitSeconds]:
        """Return what ``seconds`` is made of: name of a part -> its seconds. They add up to it."""
        return {"all": self.seconds(unit, group, mbs)}

    @abstractmethod
    def message(self, sender: StageGroup, receiver: StageGroup, link: Link, mbs: int) -> float:
        """Return the seconds of a micro-batch's hidden states, or their gradient, over a link."""

    @abstractmethod
    def memory(self, group: StageGroup, layers: LayerSpan, mbs: int) -> StageMemory:
        """Return the bytes on each rank of a stage that holds these layers."""

    @abstractmethod
    def synchronize(self, shares: tuple[StageGroup, ...], layers: LayerSpan, link: Link) -> float:
        """Return the seconds of summing gradients over copies of layers, and of gathering parameters.

        Args:
            shares: The stages that hold copies; one alone has nothing to sum.
            layers: What they hold in common.
            link: The slowest link between them, as fast as it is while all their ranks use it.
        """

    @abstractmethod
    def update(self, group: StageGroup, layers: LayerSpan, num_copies: int) -> float:
        """Return the seconds of the optimizer on each rank of a stage.

        Args:
            group: The stage.
            layers: What it holds.
            num_copies: Copies of the layers; ZeRO divides the work among them.
        """

    def runtime(self) -> RuntimeTraits:
        """Return what depends on the software; that of this package sends while it computes."""
        return RuntimeTraits()


class SummedCosts(CostModel):
    """A cost model whose seconds are the sums of its terms, each asked for once."""

    _cache: dict[tuple[Unit, StageGroup, int], UnitSeconds]

    def seconds(self, unit: Unit, group: StageGroup, mbs: int) -> UnitSeconds:
        """Return what a unit takes for a micro-batch of ``mbs`` samples."""
        key = (unit, group, mbs)
        if key not in self._cache:
            parts = self.terms(unit, group, mbs).values()
            sums = UnitSeconds(sum(p.forward for p in parts), sum(p.backward for p in parts))
            self._cache[key] = sums
        return self._cache[key]

    @abstractmethod
    def terms(self, unit: Unit, group: StageGroup, mbs: int) -> dict[str, UnitSeconds]:
        """Return the seconds of each part of a unit's passes."""
