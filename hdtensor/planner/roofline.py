"""``RooflineCosts``: seconds and bytes from datasheets, for devices and models that nobody has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Link
from hdtensor.planner.collective_times import all_reduce_seconds, gather_seconds, send_seconds
from hdtensor.planner.costs import (
    CostModel,
    LayerSpan,
    StageGroup,
    StageMemory,
    Unit,
    UnitSeconds,
)
from hdtensor.planner.devices import Device
from hdtensor.planner.model import ModelShape
from hdtensor.planner.unit_sizes import (
    Work,
    span_parameters,
    unit_activations,
    unit_work,
)
from hdtensor.planner.workload import Workload


#: Bytes of an element.
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Optimizer -> values of float32 that it keeps for a parameter.
STATES: Mapping[str, int] = {"adam": 2, "adamw": 2, "sgd_momentum": 1, "sgd": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What part of a datasheet's rates training reaches.

    Attributes:
        matmul: Of the dense rate, by large matrix products alone.
        attention: Of the dense rate, by fused attention.
        memory: Of the memory bandwidth.
        link: Of links' bandwidth.
        kernel_seconds: Seconds of a launch that nothing hides.
    """

    matmul: float = 0.7
    attention: float = 0.45
    memory: float = 0.8
    link: float = 0.8
    kernel_seconds: float = 3e-6


@dataclass(frozen=True, kw_only=True)
class RooflineCosts(CostModel):
    """Seconds from operations and bytes over the rates of a device (roofline, Williams et al. 2009).

    A unit's matrix products, its attention and what only moves memory follow one another, so their times add
    up. Backward has twice the work of forward. Tensor parallelism has two all-reduces a layer in each
    direction (Megatron-LM), as many bytes as sequence parallelism's gathers and scatters.

    Attributes:
        model: Sizes.
        workload: What is trained.
        efficiency: Parts of the rates that are reached.
        slowness: Name of a device -> factor on its seconds of computing, as ``calibrate`` finds it.
        reserved_bytes: What the runtime and the libraries take on each device.
    """

    model: ModelShape
    workload: Workload
    efficiency: Efficiency = field(default_factory=Efficiency)
    slowness: Mapping[str, float] = field(default_factory=dict)
    reserved_bytes: float = float(1 << 30)

    def __post_init__(self) -> None:
        if self.workload.precision not in BYTES:
            raise PlannerError(
                f"precision: there is no {self.workload.precision!r}; there are {', '.join(BYTES)}."
            )
        if self.workload.optimizer not in STATES:
            raise PlannerError(
                f"optimizer: there is no {self.workload.optimizer!r}; there are {', '.join(STATES)}."
            )
        object.__setattr__(self, "_seconds", lru_cache(maxsize=None)(self._unit_seconds))

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters and activations."""
        return BYTES[self.workload.precision]

    def seconds(self, unit: Unit, group: StageGroup, mbs: int) -> UnitSeconds:
        """Return what a unit takes for a micro-batch of ``mbs`` samples."""
        found: UnitSeconds = self._seconds(unit, group, mbs)  # type: ignore[attr-defined]
        return found

    def _unit_seconds(self, unit: Unit, group: StageGroup, mbs: int) -> UnitSeconds:
        tokens = mbs * self.workload.context / group.cp
        work = unit_work(self.model, unit, group.tp, tokens, self.workload.context)
        compute = self._compute(work, group.device)
        reduce = self._tensor_parallel(unit, group, tokens)
        ring = self._context_parallel(unit, group, tokens)
        forward = compute + reduce + ring
        backward = 2 * compute + (0.0 if unit == "embedding" else reduce) + 2 * ring
        if unit == "layer" and self.workload.recompute == "full":
            backward += forward
        return UnitSeconds(forward, backward)

    def _compute(self, work: Work, device: Device) -> float:
        rate = device.flops_of(self.workload.precision)
        reached = self.efficiency
        moved = (work.moved + work.weights) * self.itemsize
        seconds = (
            work.matmul / (rate * reached.matmul)
            + work.attention / (rate * reached.attention)
            + moved / (device.memory_bandwidth * reached.memory)
            + work.num_kernels * reached.kernel_seconds
        )
        return seconds * self.slowness.get(device.name, 1.0)

    def _tensor_parallel(self, unit: Unit, group: StageGroup, tokens: float) -> float:
        num_bytes = tokens * self.model.hidden * self.itemsize
        times = 2 if unit == "layer" else 1
        return times * all_reduce_seconds(num_bytes, group.tp, self._reached(group.inside))

    def _context_parallel(self, unit: Unit, group: StageGroup, tokens: float) -> float:
        if unit != "layer" or group.cp == 1:
            return 0.0
        heads = max(self.model.num_kv_heads / group.tp, 1)
        num_bytes = 2 * tokens * group.cp * heads * self.model.head_dim * self.itemsize
        return gather_seconds(num_bytes, group.cp, self._reached(group.inside))

    def _reached(self, link: Link) -> Link:
        return Link(link.bandwidth * self.efficiency.link, link.latency)

    def message(self, sender: StageGroup, receiver: StageGroup, link: Link, mbs: int) -> float:
        """Return the seconds of a micro-batch's hidden states, or their gradient, over a link.

        The ranks of the smaller stage each send or receive their part at once.
        """
        tokens = mbs * self.workload.context
        num_ranks = min(sender.tp * sender.cp, receiver.tp * receiver.cp)
        num_bytes = tokens * self.model.hidden * self.itemsize / num_ranks
        return send_seconds(num_bytes, self._reached(link))

    def memory(self, group: StageGroup, layers: LayerSpan, mbs: int) -> StageMemory:
        """Return the bytes on each rank of a stage that holds these layers."""
        parameters = span_parameters(self.model, layers, group.tp)
        tokens = mbs * self.workload.context / group.cp
        layer = unit_activations(self.model, "layer", group.tp, tokens)
        inputs = tokens * self.model.hidden / group.tp
        kept = inputs if self.workload.recompute == "full" else layer
        activation = layers.num_layers * kept
        if layers.is_last:
            activation += unit_activations(self.model, "head", group.tp, tokens)
        again = layer if self.workload.recompute == "full" else 0.0
        work = again + 4 * inputs * group.tp  # what a layer computes again, and messages both ways
        return StageMemory(
            parameters=parameters * self.itemsize,
            gradients=parameters * self.itemsize,
            optimizer=parameters * self._state_bytes(),
            activation=activation * self.itemsize,
            buffers=self.reserved_bytes + work * self.itemsize,
        )

    def _state_bytes(self) -> int:
        """Return the bytes of optimizer state of a parameter, with its master where that is another."""
        master = 0 if self.workload.precision == "float32" else 4
        return 4 * STATES[self.workload.optimizer] + master

    def synchronize(self, shares: tuple[StageGroup, ...], layers: LayerSpan, link: Link) -> float:
        """Return the seconds of summing gradients over copies of layers, and of gathering parameters.

        The stage with the fewest ranks has the largest part on each: it sets the time.
        """
        tp = min(share.tp for share in shares)
        num_bytes = span_parameters(self.model, layers, tp) * self.itemsize
        return all_reduce_seconds(num_bytes, len(shares), self._reached(link))

    def update(self, group: StageGroup, layers: LayerSpan, num_copies: int) -> float:
        """Return the seconds of the optimizer on each rank of a stage: all it holds is read and written."""
        parameters = span_parameters(self.model, layers, group.tp)
        if self.workload.zero:
            parameters /= num_copies
        num_bytes = parameters * (2 * self._state_bytes() + 2 * self.itemsize)
        return num_bytes / (group.device.memory_bandwidth * self.efficiency.memory)
