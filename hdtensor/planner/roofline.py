"""``RooflineCosts``: seconds and bytes from datasheets, for devices and models that nobody has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Link
from hdtensor.planner.collective_times import all_reduce_seconds, gather_seconds, send_seconds
from hdtensor.planner.costs import (
    LayerSpan,
    StageGroup,
    StageMemory,
    SummedCosts,
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

    With these numbers matrix products reach 225 of an A100's 312 TFLOPS, 640 of an H800's 990 and 133 of an
    H20's 148; and the time of a layer on an H20 over that on an H800 is what explains the layers that the HSPMD
    paper gives them (table 9).

    Attributes:
        matmul: Of the dense rate, by large matrix products alone.
        attention: Of the dense rate, by fused attention.
        memory: Of the memory bandwidth.
        link: Of links' bandwidth.
        kernel_seconds: Seconds of a launch that nothing hides.
        reuse: Operations for each element that a matrix product moves between memory and tiles. So devices
            with many operations for each byte of bandwidth reach a smaller part of their rate.
    """

    matmul: float = 0.95
    attention: float = 0.7
    memory: float = 0.8
    reuse: float = 1500.0
    link: float = 0.75
    kernel_seconds: float = 3e-6


@dataclass(frozen=True, kw_only=True)
class RooflineCosts(SummedCosts):
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
    _cache: dict[tuple[Unit, StageGroup, int], UnitSeconds] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.workload.precision not in BYTES:
            raise PlannerError(
                f"precision: there is no {self.workload.precision!r}; there are {', '.join(BYTES)}."
            )
        if self.workload.optimizer not in STATES:
            raise PlannerError(
                f"optimizer: there is no {self.workload.optimizer!r}; there are {', '.join(STATES)}."
            )

    def slowed(self, factors: Mapping[str, float]) -> RooflineCosts:
        """Return costs whose devices compute slower by these factors: name of a device -> factor."""
        slowness = {
            **self.slowness,
            **{name: self.slowness.get(name, 1.0) * by for name, by in factors.items()},
        }
        return replace(self, slowness=slowness)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters and activations."""
        return BYTES[self.workload.precision]

    def terms(self, unit: Unit, group: StageGroup, mbs: int) -> dict[str, UnitSeconds]:
        """Return the seconds of each part of a unit's passes."""
        tokens = mbs * self.workload.context / group.cp
        work = unit_work(self.model, unit, group.tp, tokens, self.workload.context)
        parts = {
            name: UnitSeconds(seconds, 2 * seconds)
            for name, seconds in self._compute(work, group.device).items()
        }
        reduce = self.tensor_parallel_seconds(unit, group, tokens)
        ring = self.context_parallel_seconds(unit, group, tokens)
        if group.tp > 1:
            back = 0.0 if unit == "embedding" else reduce
            parts["all-reduces of tensor parallelism"] = UnitSeconds(reduce, back)
        if group.cp > 1:
            parts["gathers of context parallelism"] = UnitSeconds(ring, 2 * ring)
        if unit == "layer" and self.workload.recompute == "full":
            forward = sum(part.forward for part in parts.values())
            parts["computed again"] = UnitSeconds(0.0, forward)
        return parts

    def _compute(self, work: Work, device: Device) -> dict[str, float]:
        rate = device.flops_of(self.workload.precision)
        reached = self.efficiency
        moved = (work.moved + work.weights) * self.itemsize
        operands = (work.matmul + work.attention) / reached.reuse * self.itemsize
        bandwidth = device.memory_bandwidth * reached.memory
        factor = self.slowness.get(device.name, 1.0)
        return {
            "matrix products": work.matmul / (rate * reached.matmul) * factor,
            "attention": work.attention / (rate * reached.attention) * factor,
            "operands": operands / bandwidth * factor,
            "memory traffic": moved / bandwidth * factor,
            "launches": work.num_kernels * reached.kernel_seconds * factor,
        }

    def tensor_parallel_seconds(self, unit: Unit, group: StageGroup, tokens: float) -> float:
        """Return the seconds of tensor parallelism's all-reduces in a unit's forward."""
        num_bytes = tokens * self.model.hidden * self.itemsize
        times = 2 if unit == "layer" else 1
        return times * all_reduce_seconds(num_bytes, group.tp, self.reached(group.inside))

    def context_parallel_seconds(self, unit: Unit, group: StageGroup, tokens: float) -> float:
        """Return the seconds of gathering a layer's keys and values in its forward."""
        if unit != "layer" or group.cp == 1:
            return 0.0
        heads = max(self.model.num_kv_heads / group.tp, 1)
        num_bytes = 2 * tokens * group.cp * heads * self.model.head_dim * self.itemsize
        return gather_seconds(num_bytes, group.cp, self.reached(group.inside))

    def reached(self, link: Link) -> Link:
        """Return a link as fast as training finds it."""
        return Link(link.bandwidth * self.efficiency.link, link.latency)

    def message(self, sender: StageGroup, receiver: StageGroup, link: Link, mbs: int) -> float:
        """Return the seconds of a micro-batch's hidden states, or their gradient, over a link.

        The ranks of the smaller stage each send or receive their part at once.
        """
        tokens = mbs * self.workload.context
        num_ranks = min(sender.tp * sender.cp, receiver.tp * receiver.cp)
        num_bytes = tokens * self.model.hidden * self.itemsize / num_ranks
        return send_seconds(num_bytes, self.reached(link))

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
            optimizer=parameters * self.state_bytes(),
            activation=activation * self.itemsize,
            buffers=self.reserved_bytes + work * self.itemsize,
        )

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state of a parameter, with its master where that is another."""
        master = 0 if self.workload.precision == "float32" else 4
        return 4 * STATES[self.workload.optimizer] + master

    def synchronize(self, shares: tuple[StageGroup, ...], layers: LayerSpan, link: Link) -> float:
        """Return the seconds of summing gradients over copies of layers, and of gathering parameters.

        The stage with the fewest ranks has the largest part on each: it sets the time.
        """
        tp = min(share.tp for share in shares)
        num_bytes = span_parameters(self.model, layers, tp) * self.itemsize
        return all_reduce_seconds(num_bytes, len(shares), self.reached(link))

    def update(self, group: StageGroup, layers: LayerSpan, num_copies: int) -> float:
        """Return the seconds of the optimizer on each rank of a stage: all it holds is read and written."""
        parameters = span_parameters(self.model, layers, group.tp)
        if self.workload.zero:
            parameters /= num_copies
        num_bytes = parameters * (2 * self.state_bytes() + 2 * self.itemsize)
        return num_bytes / (group.device.memory_bandwidth * self.efficiency.memory)
