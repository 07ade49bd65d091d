"""``Binding``: a decision applied to exact sizes, for this rank: results, local conversions, rewritten arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import TensorMeta, observe_conversion
from hdtensor.collectives import observe
from hdtensor.errors import DeductionError
from hdtensor.ops.bound import BoundSpec, SymbolicBound
from hdtensor.ops.calls import (
    SHAPE_ARGS,
    SIZE_ARGS,
    STRIDE_ARGS,
    Call,
    as_list,
    converted,
    is_view,
    out_top_sizes,
)
from hdtensor.ops.decision import Decision
from hdtensor.ops.open_moves import move_inside
from hdtensor.ops.propagate import Path
from hdtensor.ops.registry import events
from hdtensor.placements import checks
from hdtensor.placements.layout import Segment, block_segments
from hdtensor.placements.sizes import is_symbolic
from hdtensor.redistribute.execute import make_converter


#: Views that only set a bit on the tensor, and what computes the values: collectives read a shard's memory.
LAZY = {
    torch.ops.aten._conj.default: torch.conj_physical,
    torch.ops.aten._neg_view.default: torch.neg,
}


class Binding:
    """A decision applied to exact sizes, for this rank."""

    def __init__(self, call: Call, decision: Decision, metas: Any) -> None:
        self.call = call
        self.decision = decision
        self.metas = as_list(metas)
        self.is_list = isinstance(metas, list)
        self.is_multi = isinstance(metas, list) or (
            isinstance(metas, tuple) and not isinstance(metas, TensorMeta)
        )
        self.index = next(iter(call.specs.values())).index
        self.after_top = call
        for path, top in decision.top_inputs.items():
            bound = converted(self.after_top, path, top)
            self.after_top = self.after_top.with_spec(path, bound)
        self.is_copy = self._is_copy()
        self.outs = [self._out(k, spec) for k, spec in enumerate(decision.outs)]
        self.mutated = mutated_argument(call.func)
        self._check_written()
        self.conversions: dict[Path, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.literals: dict[int, Any] = {}
        self.op: Any = call.func
        if self.index is not None:
            self._bind_local(self.index)
        self.watch = self._watch_others()

    def _watch_others(self) -> Callable[[], None] | None:
        """Return what reports a conversion inside another subgroup to torch's ``ExplicitRedistributionContext``.

        So a context that forbids it raises on every rank, and none goes on alone. None without such a conversion.
        """
        if self.index is not None and self.decision.bottom_inputs[self.index]:
            return None  # this rank's own conversion reports itself
        for index, inputs in enumerate(self.decision.bottom_inputs):
            for path, wanted in inputs.items():
                bound = self.after_top.specs[path]
                src = bound.sub(index)
                dst = type(src)(src.mesh, wanted, src.tensor_meta)
                ranks = list(bound.spec.subgroups[index].ranks)
                text = f"implicit redistribution inside {ranks}: {bound} -> {wanted}"
                return functools.partial(observe_conversion, src, dst, functools.partial(str, text))
        return None

    def _out(self, k: int, spec: Any) -> BoundSpec | None:
        meta = self.metas[k] if k < len(self.metas) else None
        if spec is None or not isinstance(meta, TensorMeta):
            return None
        sizes = None
        if checks.is_cut(spec.top):
            if self.decision.top_sizes is not None:
                sizes = self.decision.top_sizes[k]
            elif self.decision.out_sizes_from is not None:
                sizes = out_top_sizes(
                    self.after_top, self.decision.out_sizes_from, spec.top, meta.shape
                )
        return BoundSpec.of(spec, meta.shape, meta.stride, meta.dtype, sizes, self.is_copy)

    def _is_copy(self) -> bool:
        """Whether the results look like views but share no memory with the operand, on some rank."""
        if not is_view(self.call.func) or self.call.func is torch.ops.aten.detach.default:
            return False  # a gradient is detached before it becomes ``.grad``, which is written to
        moved = bool(self.decision.top_inputs) or any(self.decision.bottom_inputs)
        return (
            moved
            or self.call.func in LAZY
            or any(bound.is_copy for bound in self.call.specs.values())
        )

    def _check_written(self) -> None:
        for position in written_arguments(self.call.func):
            value = self.call.args[position] if position < len(self.call.args) else None
            if value is None or isinstance(value, list):
                continue  # lists are checked element by element, in ``foreach``
            self._check_written_at((position,))

    def _check_written_at(self, path: Path) -> None:
        own = self.call.specs[path]
        if path in self.call.plain:
            raise DeductionError(
                f"{self.call.func} writes to a plain tensor from distributed operands; write to an "
                f"HDTensor, or use hdtensor.full_tensor() on the operands."
            )
        name = self.call.name_of(path)
        check_writable(self.call.func, name, own)
        changes = path in self.decision.top_inputs or any(
            path in inputs for inputs in self.decision.bottom_inputs
        )
        out = self.outs[0] if self.outs and path == (self.mutated,) else None
        if changes or (
            out is not None and (out.spec.top != own.spec.top or _bottoms(out) != _bottoms(own))
        ):
            raise DeductionError(
                f"{self.call.func}: writing in place would change the layout of {name!r} from {own} to "
                f"{out or 'another'}. Use the out-of-place operator, or redistribute {name!r} first."
            )

    def _bind_local(self, index: int) -> None:
        decision = self.decision
        self.op = decision.ops[index]
        self.literals = dict(decision.literals[index])
        position = SHAPE_ARGS.get(self.call.func)
        if position is not None and self.outs[0] is not None:
            self.literals[position] = list(self.outs[0].local_shape())
            stride_position = STRIDE_ARGS.get(self.call.func)
            if stride_position is not None:
                self.literals[stride_position] = _local_stride(self.outs[0])
        if self.call.func in SIZE_ARGS:
            self.literals |= self._sizes(index)
        for path in {**decision.top_inputs, **decision.bottom_inputs[index]}:
            self.conversions[path] = self._conversion(path, index)

    def _sizes(self, index: int) -> dict[int, int]:
        """Return an operand's local batch size, channels and elements a channel, by argument position."""
        path, first = SIZE_ARGS[self.call.func]
        bound = self.after_top.specs[path]
        wanted = self.decision.bottom_inputs[index].get(path)
        if wanted is not None:
            groups = list(bound.spec.subgroups)
            groups[index] = groups[index].with_placements(wanted)
            bound = bound.with_spec(bound.spec.replace(subgroups=tuple(groups)))
        batch, channels, *rest = bound.local_shape()
        return {first: batch, first + 1: channels, first + 2: math.prod(rest)}

    def _conversion(self, path: Path, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        before, after = self.call.specs[path], self.after_top.specs[path]
        steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
        if path in self.decision.top_inputs:
            steps += _top_steps(self.call.func, before, after, index)
        wanted = self.decision.bottom_inputs[index].get(path)
        if wanted is not None:
            steps.append(_bottom_step(self.call.func, after, wanted, index))
        return functools.partial(_apply_all, tuple(steps)) if len(steps) != 1 else steps[0]


def _bottoms(bound: BoundSpec) -> list[Any]:
    return [g.placements for g in bound.spec.subgroups]


def _local_stride(bound: BoundSpec) -> list[int]:
    """Return local strides in the order of the global ones."""
    shape = bound.local_shape()
    order = sorted(range(len(shape)), key=lambda d: -bound.stride[d])
    strides = [0] * len(shape)
    step = 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return strides


def _apply_all(
    steps: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor
) -> torch.Tensor:
    for step in steps:
        x = step(x)
    return x


def _top_steps(
    func: Any, before: BoundSpec, after: BoundSpec, index: int
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Local conversions from a top ``Replicate``: take my block, or keep the value in one subgroup."""
    top = after.spec.top
    if checks.is_cut(top):
        steps = []
        wanted = after.spec.subgroups[index].placements
        if wanted != before.spec.subgroups[index].placements:
            steps.append(_bottom_step(func, before, wanted, index))
        dim = checks.shard_dim(top)
        assert dim is not None, f"{top} cuts a dim"
        runs = block_segments(after.spec, after.shape, index, after.top_sizes)[dim]
        steps.append(functools.partial(_block, dim, runs))
        return steps
    assert isinstance(top, Partial), f"no free conversion to {top}"
    neutral = {"sum": torch.zeros_like, "product": torch.ones_like}.get(top.reduce_op)
    return [functools.partial(_term, neutral if index > 0 else None)]


def _term(neutral: Any, x: torch.Tensor) -> torch.Tensor:
    events[0] += 1
    return x if neutral is None else neutral(x)


def _block(dim: int, runs: Sequence[Segment], x: torch.Tensor) -> torch.Tensor:
    """Take a subgroup's block of a whole tensor."""
    events[0] += 1
    parts = [x.narrow(dim, run.start, run.stop - run.start) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _bottom_step(
    func: Any, bound: BoundSpec, wanted: tuple[Placement, ...], index: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """An implicit conversion inside the subgroup, as DTensor makes it."""
    group = bound.spec.subgroups[index]
    block = bound.block_shape(index)
    if isinstance(bound, SymbolicBound):
        bound.close_strided()
    convert = (
        functools.partial(move_inside, group=group, wanted=wanted, shape=block)
        if is_symbolic(block)
        else make_converter(group, group.placements, wanted, block)
    )
    src = bound.sub(index)
    dst = type(src)(src.mesh, wanted, src.tensor_meta)

    def text() -> str:
        return f"implicit redistribution inside {list(group.ranks)}: {bound} -> {wanted}"

    def step(x: torch.Tensor) -> torch.Tensor:
        events[0] += 1
        observe_conversion(src, dst, text)
        with observe.profiled("implicit_redistribute"):
            if not observe.listeners:
                return convert(x)
            with observe.because(f"{func} (implicit, inside {list(group.ranks)})"):
                return convert(x)

    return step


def check_writable(func: Any, name: str, bound: BoundSpec) -> None:
    """Raise if what is written into the tensor would be lost in the tensor that it is a view of.

    Raises:
        DeductionError: With what to call instead.
    """
    if bound.is_copy and 0 not in bound.shape:
        raise DeductionError(
            f"{func}: {name!r} ({bound}) came out of a view that had to move data, so that it shares no memory with "
            f"the tensor it was taken from, which would stay as it is. Use the out-of-place operator or "
            f"{name}.clone(), or redistribute the tensor before the view."
        )


@functools.lru_cache(maxsize=4096)
def written_arguments(func: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that the operator writes to."""
    return tuple(
        i
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not argument.kwarg_only
    )


@functools.lru_cache(maxsize=4096)
def mutated_argument(func: Any) -> int | None:
    """Return the position of the argument that the operator writes to and returns, if it returns any; or None.

    An operator may write to an argument and return something else: batch norm and its running mean.
    """
    returns = func._schema.returns
    written = written_arguments(func)
    is_returned = any(r.alias_info is not None and r.alias_info.is_write for r in returns)
    return written[0] if written and (is_returned or not returns) else None
