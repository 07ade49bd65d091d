"""``Call``: one operator call as deduction sees it, what must hold of its operands, and the errors that say so."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import TensorMeta
from hdtensor.errors import DeductionError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.propagate import (
    Path,
    map_operands,
    operands,
)
from hdtensor.placements import checks
from hdtensor.placements.layout import contiguous_stride
from hdtensor.placements.sizes import exact_quotient, total
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup


aten = torch.ops.aten


#: Views that regroup elements, whose cut dims ``views.py`` follows. Value: position of the shape.
RESHAPES = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.reshape.default: 1,
    aten.view_copy.default: 1,
}


#: Other operators with a global shape among their arguments, which becomes the block's or the rank's.
SHAPE_ARGS = RESHAPES | {
    aten.expand.default: 1,
    aten.expand_copy.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.new_zeros.default: 1,
    aten.new_empty.default: 1,
    aten.new_ones.default: 1,
    aten.new_full.default: 1,
    aten.new_empty_strided.default: 1,
    aten.diagonal_backward.default: 1,
    aten.unfold_backward.default: 1,
    aten._upsample_bicubic2d_aa_backward.default: 2,
    aten._upsample_bilinear2d_aa_backward.default: 2,
    aten._upsample_lanczos2d_aa_backward.default: 2,
    aten._upsample_nearest_exact1d_backward.default: 2,
    aten._upsample_nearest_exact2d_backward.default: 2,
    aten._upsample_nearest_exact3d_backward.default: 2,
    aten.upsample_bicubic2d_backward.default: 2,
    aten.upsample_bilinear2d_backward.default: 2,
    aten.upsample_linear1d_backward.default: 2,
    aten.upsample_nearest1d_backward.default: 2,
    aten.upsample_nearest2d_backward.default: 2,
    aten.upsample_nearest3d_backward.default: 2,
    aten.upsample_trilinear3d_backward.default: 2,
}


#: Operators that take batch size, channels and elements a channel as three numbers: the operand whose they are, and
#: the position of the first.
SIZE_ARGS: dict[Any, tuple[Path, int]] = {
    aten.native_group_norm.default: ((0,), 3),
    aten.native_group_norm_backward.default: ((1,), 5),
}


#: Strides among the arguments.
STRIDE_ARGS = {aten.new_empty_strided.default: 2}


@dataclass(slots=True)
class Call:
    """One operator call as deduction sees it: a ``BoundSpec`` for every tensor.

    Attributes:
        func: The operator.
        args: Arguments; lists stay lists.
        kwargs: Keyword arguments.
        plain: Paths of operands that are plain tensors, taken as replicated.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plain: frozenset[Path] = frozenset()
    specs: dict[Path, BoundSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.specs = {
            path: value
            for path, value in operands(self.args, self.kwargs)
            if isinstance(value, BoundSpec)
        }

    @property
    def subgroups(self) -> tuple[Subgroup, ...]:
        """The first operand's subgroups."""
        return next(iter(self.specs.values())).spec.subgroups

    def name_of(self, path: Path) -> str:
        """Return the operand's name in the operator's schema."""
        head = path[0]
        if isinstance(head, str):
            return head
        arguments = self.func._schema.arguments
        name = arguments[head].name if head < len(arguments) else f"argument {head}"
        return name if len(path) == 1 else f"{name}[{path[1]}]"

    def with_spec(self, path: Path, bound: BoundSpec) -> Call:
        """Return the call with another spec for one operand."""
        args, kwargs = map_operands(lambda p, v: bound if p == path else v, self.args, self.kwargs)
        return Call(self.func, args, kwargs, self.plain)

    def tier(self, view: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``view(bound)`` for every tensor."""
        return map_operands(
            lambda _, v: view(v) if isinstance(v, BoundSpec) else v, self.args, self.kwargs
        )


@functools.lru_cache(maxsize=4096)
def is_view(func: Any) -> bool:
    """Return whether the operator's results share memory with an operand."""
    returns = func._schema.returns
    return not func._schema.is_mutable and any(r.alias_info is not None for r in returns)


def check_same_subgroups(call: Call) -> None:
    """Raise unless all operands live on the same subgroups (paper Sec. 6.1).

    Raises:
        DeductionError: Naming both operands, their rank sets and the call to insert.
    """
    items = iter(call.specs.items())
    first_path, first = next(items)
    want = [(g.ranks, g.mesh_shape) for g in first.spec.subgroups]
    for path, bound in items:
        if bound.spec is first.spec:
            continue
        if [(g.ranks, g.mesh_shape) for g in bound.spec.subgroups] != want:
            name = call.name_of(path)
            target = repr(str(first.spec)) if bound.shape == first.shape else "spec"
            raise DeductionError(
                f"{call.func}: operand {call.name_of(first_path)!r} lives on "
                f"{_rank_sets(first.spec)}, operand {name!r} on {_rank_sets(bound.spec)} "
                f"({call.name_of(first_path)}: {first}; {name}: {bound}). Operators stay on one list "
                f"of subgroups; bring one operand over: {name}.redistribute({target}), with a spec on "
                f"{_rank_sets(first.spec)}."
            )


def check_same_cut(call: Call) -> None:
    """Raise unless operands that the top tier cuts are cut in the same proportion.

    DTensor cannot see this: extents are no part of its specs, and a block of 1 would broadcast.

    Raises:
        DeductionError: Naming both operands and their extents.
    """
    cut = [(p, b) for p, b in call.specs.items() if b.top_sizes is not None]
    for path, bound in cut[1:]:
        first_path, first = cut[0]
        a, b = first.top_sizes, bound.top_sizes
        if a == b or _proportional(a, b):  # type: ignore[arg-type]
            continue
        name = call.name_of(path)
        if bound.shape == first.shape and bound.spec.top != first.spec.top:  # cut on another dim
            target, sizes = first.spec, a
        else:
            target = bound.spec.replace(top_ratio=first.spec.top_ratio)
            sizes = _sizes_like(first, bound)  # type: ignore[assignment]
        raise DeductionError(
            f"{call.func}: operand {call.name_of(first_path)!r} is cut {a} between subgroups, "
            f"operand {name!r} {b} ({call.name_of(first_path)}: {first}; {name}: {bound}). Cut both alike: "
            f"{name}.redistribute({str(target)!r}, top_sizes={sizes})."
        )


#: Operators that broadcast their operands without the tag that says so.
_BROADCASTING = {
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.copy_.default,
    aten.mse_loss.default,
    aten.huber_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
}


_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
_EXPANDS = {aten.expand.default, aten.expand_copy.default}


def check_single_row(call: Call) -> None:
    """Raise if an operand whose one row lies in one subgroup must be repeated in the others, or lose that dim.

    Raises:
        DeductionError: With the ``redistribute`` to insert.
    """
    for path, bound in call.specs.items():
        if bound.top_sizes is None or total(bound.top_sizes) != 1:
            continue
        dim = bound.spec.top.dim - len(bound.shape)  # type: ignore[attr-defined]
        if call.func in _SQUEEZES or call.func in _EXPANDS:
            is_used = _uses_dim(call, dim, len(bound.shape))
        elif torch.Tag.pointwise in call.func.tags or call.func in _BROADCASTING:
            others = (b.shape for b in call.specs.values())
            is_used = any(len(shape) >= -dim and shape[dim] != 1 for shape in others)
        else:
            is_used = False
        if is_used:
            raise needs_communication(call, path, Replicate())


def _uses_dim(call: Call, dim: int, num_dims: int) -> bool:
    """Whether a squeeze removes the dim, or an expansion repeats it; ``dim`` counts from the end."""
    if len(call.args) < 2:
        return True
    if call.func in _EXPANDS:
        return bool(call.args[1][dim] not in (1, -1))
    dims = call.args[1] if isinstance(call.args[1], list | tuple) else [call.args[1]]
    return dim % num_dims in [d % num_dims for d in dims]


_STRIDED = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}


def reads_memory(call: Call) -> bool:
    """Return whether the operator may address memory beside the operand's own elements, which copies do not have."""
    if call.func not in _STRIDED:
        return False
    bound = call.specs[(0,)]
    size, stride, *offset = call.args[2 if call.func is aten.as_strided_scatter.default else 1 :]
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    is_own = bound.stride == contiguous_stride(bound.shape) and reach <= math.prod(bound.shape)
    return not is_own or bool(offset and offset[0] is not None)


def _sizes_like(first: BoundSpec, bound: BoundSpec) -> tuple[int, ...] | str:
    """Return extents for ``bound`` in the proportion of ``first``'s, for a message."""
    a, b = first.top_sizes or (), bound.top_sizes or ()
    whole, length = total(a), total(b)
    if whole and not any(size * length % whole for size in a):
        return tuple(size * length // whole for size in a)
    return "..."


def _proportional(a: Sequence[int], b: Sequence[int]) -> bool:
    total_a, total_b = total(a), total(b)
    return all(x * total_b == y * total_a for x, y in zip(a, b, strict=True))


def _rank_sets(spec: HDSpec) -> str:
    """Return each subgroup's ranks, with the mesh's shape where that says more."""
    return " + ".join(
        str(list(g.ranks))
        + (f" as {'x'.join(map(str, g.mesh_shape))}" if len(g.mesh_shape) > 1 else "")
        for g in spec.subgroups
    )


def as_list(metas: Any) -> list[Any]:
    """Return output metas as a list: a ``TensorMeta`` is itself a tuple."""
    if isinstance(metas, TensorMeta) or metas is None:
        return [metas]
    return list(metas)


def needs_communication(call: Call, path: Path, wanted: Placement) -> DeductionError:
    """Return the error for an operand that must move between subgroups, with the call to insert."""
    bound, name = call.specs[path], call.name_of(path)
    target = bound.spec.replace(top=wanted)
    return DeductionError(
        f"{call.func}: operand {name!r} ({bound}) must be {checks.placement_text(wanted)} at the top "
        f"tier but is {checks.placement_text(bound.spec.top)}; that moves data between subgroups, "
        f"which operators never do. Insert before it: "
        f"{name} = {name}.redistribute({str(target)!r})."
    )


def refused(call: Call, tier: str, error: Exception) -> DeductionError:
    """Return the error for a call that a tier's rule refused."""
    listing = "; ".join(f"{call.name_of(p)}: {b}" for p, b in call.specs.items())
    hint = ""
    for path, bound in call.specs.items():
        spec = bound.spec.map_bottom(lambda _: Replicate()) if tier == "bottom" else bound.spec
        whole = spec.replace(top=Replicate())
        if whole is not bound.spec:
            name = call.name_of(path)
            hint = f" Insert before it: {name} = {name}.redistribute({str(whole)!r})."
            break
    if isinstance(error, NotImplementedError):
        return DeductionError(
            f"{call.func} has no sharding rule at the {tier} tier ({listing}).{hint} Or run it on local tensors: "
            f"hdtensor.local_map. ({error})"
        )
    reason = " ".join(map(str, error.args)) or repr(error)
    return DeductionError(f"{call.func}: refused at the {tier} tier ({listing}): {reason}{hint}")


def converted(call: Call, path: Path, top: Placement) -> BoundSpec:
    """Return an operand's bound spec after a free conversion from top ``Replicate``."""
    bound = call.specs[path]
    dim = checks.shard_dim(top)
    if dim is None:
        return bound.with_spec(bound.spec.replace(top=top))
    # A dim that the top tier cuts is not cut by the bottom tier before.
    spec = bound.spec.map_bottom(lambda p: Replicate() if checks.shard_dim(p) == dim else p)
    reference = _cut_alike(call, bound.shape[dim])
    ratio = None if reference is None else reference.spec.top_ratio
    sizes = None if reference is None else reference.top_sizes
    return bound.with_spec(spec.replace(top=top, top_ratio=ratio), sizes)


def _cut_alike(call: Call, length: int) -> BoundSpec | None:
    for bound in call.specs.values():
        if bound.top_sizes is not None and total(bound.top_sizes) == length:
            return bound
    return None


def sizes_from(call: Call) -> Path | None:
    """Return the first operand that the top tier cuts: results follow its extents."""
    return next((p for p, b in call.specs.items() if b.top_sizes is not None), None)


def out_top_sizes(call: Call, path: Path, top: Placement, shape: Sequence[int]) -> tuple[int, ...]:
    """Return an output's exact top extents: the operand's, scaled to the output's length.

    Raises:
        DeductionError: If an extent is no whole number: the cut cannot be represented.
    """
    bound = call.specs[path]
    sizes = bound.top_sizes or ()
    whole, length = total(sizes), shape[top.dim]  # type: ignore[attr-defined]
    if whole == length:
        return sizes
    scaled = [exact_quotient(size * length, whole) if whole else None for size in sizes]
    if None in scaled:
        raise DeductionError(
            f"{call.func}: a cut {sizes} of operand {call.name_of(path)!r} is no cut of the result's "
            f"dim {top.dim} of length {length} into whole rows. "  # type: ignore[attr-defined]
            f"Redistribute it to a top Replicate() first."
        )
    return tuple(size for size in scaled if size is not None)
