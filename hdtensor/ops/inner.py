"""The tensors inside an ``HDTensor`` that a compiler sees as the inputs of its program.

The first is the local tensor. Where the top extents do not follow from the spec and the shape, a second one has them for its
shape, and holds nothing: so they are sizes like others, which the compiler takes for fixed as long as they do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hdtensor._torch_compat import without_modes
from hdtensor._torch_compilers import is_marked_dynamic, mark_dynamic
from hdtensor.errors import SpecError
from hdtensor.ops.bound import BoundSpec, Layout, OwnSizes, SymbolicBound, rebound
from hdtensor.ops.registry import wrap
from hdtensor.placements import checks
from hdtensor.placements.layout import default_top_sizes
from hdtensor.placements.sizes import extent, is_symbolic, total


_ONE, _TWO = ["_local_tensor"], ["_extents", "_local_tensor"]


def flattened(tensor: Any) -> tuple[list[str], BoundSpec | Layout]:
    """Return the attributes with inner tensors, and all else but values: ``HDTensor.__tensor_flatten__``."""
    bound = tensor._spec
    if bound.index is None:
        _keep_own_empty(tensor)
    if bound.top_sizes is not None and _has_extents(tensor, bound):
        return _TWO, bound.layout(has_own_cut=False)
    if not isinstance(bound, SymbolicBound):
        if bound.is_alone is None and bound.has_own_cut and bound.index is not None:
            bound.is_alone = True
        return _ONE, bound
    bound.close_strided()
    return _ONE, bound.layout(has_own_cut=True)


def _keep_own_empty(tensor: Any) -> None:
    """Give a tensor of a rank outside an empty tensor of its own.

    Operators let their results share them. A compiler guards which inputs are one object, and compiled again when others were.
    """
    local = tensor._local_tensor
    if type(local) is not torch.Tensor or getattr(tensor, "_has_own_empty", False):
        return
    with torch.inference_mode(False), without_modes():
        tensor._local_tensor = local.new_empty(local.shape)
    tensor._has_own_empty = True


def _has_extents(tensor: Any, bound: BoundSpec) -> bool:
    """Whether the extents are an inner tensor. One that had them as an input or an output keeps them.

    What a program computes in fixed sizes needs none: they are as fixed as all.
    """
    made = getattr(tensor, "_made_extents", None)
    if made is not None:
        return made is not False
    is_open = bound.is_symbolic or type(tensor._local_tensor) is torch.Tensor
    return is_open and not bound.has_own_cut


def with_inner(tensor: Any, *, has_extents: bool) -> Any:
    """Return the tensor with or without extents inside; itself where it is so."""
    if (len(flattened(tensor)[0]) > 1) is has_extents:
        return tensor
    tensor = wrap(tensor._local_tensor, tensor._spec)
    keep_extents(tensor, has_extents and make_extents(tensor._local_tensor, tensor._spec))
    return tensor


def keep_extents(tensor: Any, extents: torch.Tensor | bool) -> None:
    """Give a tensor its extents, or False for none; others of its bound spec are asked for theirs from now on."""
    tensor._made_extents = extents
    tensor._spec.is_alone = False


def extents_of(tensor: Any) -> torch.Tensor:
    """Return the tensor that has the top extents for its shape, the same one each time.

    They are open sizes where the dim that they cut is.
    """
    bound = tensor._spec
    sizes = bound.top_sizes
    found: Any = getattr(tensor, "_made_extents", None)
    if found is None or (not bound.is_symbolic and found.shape[-len(sizes) :] != sizes):
        found = make_extents(tensor._local_tensor, bound)
        keep_extents(tensor, found)
    if is_marked_dynamic(tensor, bound.spec.top.dim):
        mark_dynamic(found, range(found.ndim - len(sizes), found.ndim))
    return found


def refuse_limits(tensor: Any, dim: int) -> None:
    """Refuse limits of the length of a dim that a tier cuts.

    Raises:
        SpecError: If one does; it says what to do.
    """
    spec = tensor._spec.spec
    tiers = (spec.top, *(p for g in spec.subgroups for p in g.placements))
    if dim % tensor.ndim in map(checks.shard_dim, tiers):
        raise SpecError(
            f"mark_dynamic(t, {dim}, min=..., max=...): {spec} cuts dim {dim}, and torch would have to show that one program "
            f"fits all lengths between, but how they divide decides. Leave out min and max: mark_dynamic(t, {dim})."
        )


def make_extents(local: torch.Tensor, bound: BoundSpec) -> torch.Tensor:
    """Return a tensor without elements that has the top extents at the end of its shape.

    Its number of dims is none of the wrapper's: torch marks the dims of all inner tensors that have as many.
    """
    sizes = bound.top_sizes or ()
    front = 1 if len(sizes) + 1 != len(bound.shape) else 2
    return local.new_empty((*(0,) * front, *sizes))


def bound_of(
    inner: dict[str, torch.Tensor],
    known: BoundSpec | Layout,
    shape: Sequence[int],
    stride: Sequence[int],
) -> BoundSpec:
    """Return the bound spec of the wrapper around ``inner``.

    Args:
        inner: The inner tensors by their names.
        known: What ``__tensor_flatten__`` gave, of perhaps other sizes.
        shape: Global shape.
        stride: Global strides.

    Raises:
        SpecError: If the local tensor is not this rank's part of such a tensor.
    """
    extents = inner.get("_extents")
    top_sizes = None if extents is None else tuple(extents.shape[-known.spec.num_subgroups :])
    if is_symbolic(shape) or is_symbolic(top_sizes or ()):
        local = inner["_local_tensor"]
        bound = rebound(known, shape, stride, _open_sizes(known, shape, top_sizes, local))
        _relate(local, bound)
        return bound
    is_same = (
        isinstance(known, BoundSpec) and known.shape == shape and known.stride == tuple(stride)
    )
    if isinstance(known, BoundSpec) and is_same and top_sizes in (None, known.top_sizes):
        return known
    return rebound(known, shape, stride, top_sizes)


def _open_sizes(
    known: BoundSpec | Layout,
    shape: Sequence[int],
    given: tuple[int, ...] | None,
    local: torch.Tensor,
) -> tuple[int, ...] | None:
    """Return open extents: the rank's own is its local tensor's, and one is what the others leave.

    Told so by equations, a compiler would express what it has by what it does not have yet, or go on with two names of one
    size.
    """
    whole = default_top_sizes(known.spec, shape) if given is None else given
    index = known.spec.index_of(known.rank)
    if whole is None or len(whole) == 1 or checks.is_strided(known.spec.top):
        return whole
    dim = known.spec.top.dim  # type: ignore[attr-defined]
    sizes = list(whole)
    if index is not None:
        placements = known.spec.subgroups[index].placements
        if any(checks.shard_dim(p) == dim for p in placements):
            return whole
        sizes[index] = local.shape[dim]
    rest = 1 if index == 0 else 0
    sizes[rest] = extent(total(sizes[:rest] + sizes[rest + 1 :]), shape[dim])
    return OwnSizes.of(sizes, known.spec) if given is None else tuple(sizes)


def _relate(local: torch.Tensor, bound: BoundSpec) -> None:
    """Let the compiler know that local sizes follow from global ones, so that it need not take them for sizes of their own."""
    expected = bound.local_shape()
    if len(expected) != local.ndim or any(
        a != b for a, b in zip(local.shape, expected, strict=True)
    ):
        raise SpecError(
            f"a tensor of {bound} has local shape {expected} here, but what is inside has {tuple(local.shape)}."
        )
