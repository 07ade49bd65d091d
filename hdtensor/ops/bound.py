"""``BoundSpec``: an ``HDSpec`` bound to one tensor's shape, strides and dtype, as one rank sees it.

This is what an ``HDTensor`` carries and what the dispatch cache is keyed by. It is interned, so that a
key compares by identity, and it answers the questions of deduction: the top tier's ``DTensorSpec``
(one axis of subgroups) and each subgroup's (its own mesh, its block's shape).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hdtensor._rank import current_rank
from hdtensor._torch_compat import DTensorSpec, TensorMeta, abstract_mesh
from hdtensor._torch_compilers import keep_first_names
from hdtensor.placements import checks
from hdtensor.placements.layout import (
    block_shape,
    check_top_sizes,
    contiguous_stride,
    default_top_sizes,
    local_shape,
)
from hdtensor.placements.normal_form import normalized
from hdtensor.placements.sizes import hints, same
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup


#: Bound specs kept in the intern table; past it the table starts anew. Tensors keep their own.
MAX_INTERNED = 32768


class BoundSpec:
    """Everything about one ``HDTensor`` but its values.

    Attributes:
        spec: How the tensor is cut; bottom dims are non-negative.
        tensor_meta: Global (shape, stride, dtype); the C++ constructor of the wrapper reads it.
        top_sizes: Exact extents of the blocks along a top ``Shard``'s dim, else None.
        rank: Whose view this is.
        index: The rank's subgroup, None where the rank is outside all of them.
        is_alone: Whether a compiler sees no inner tensor beside the local one (``ops.inner``); None as long as nobody asked.
        is_copy: Whether a view operator had to move data to make the tensor, so that it shares no memory with what it is
            a view of. Writing into it would be lost there; operators that write refuse it.
    """

    #: Whether sizes are still open (``SymbolicBound``).
    is_symbolic = False

    __slots__ = (
        "_local",
        "_own_cut",
        "_subs",
        "_top",
        "dtype",
        "index",
        "is_alone",
        "is_copy",
        "rank",
        "shape",
        "spec",
        "stride",
        "tensor_meta",
        "top_sizes",
    )

    spec: HDSpec
    tensor_meta: TensorMeta
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    top_sizes: tuple[int, ...] | None
    rank: int
    index: int | None
    is_copy: bool
    is_alone: bool | None
    _local: tuple[int, ...] | None
    _own_cut: bool | None
    _top: DTensorSpec | None
    _subs: list[DTensorSpec | None]

    _interned: dict[tuple[Any, ...], BoundSpec] = {}  # noqa: RUF012 - the intern table

    def __init__(self) -> None:
        raise TypeError("use BoundSpec.of(...): bound specs are interned.")

    @classmethod
    def of(
        cls,
        spec: HDSpec,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        top_sizes: tuple[int, ...] | None,
        is_copy: bool = False,
    ) -> BoundSpec:
        """Return the interned value; ``top_sizes`` must be exact (``check_top_sizes``)."""
        rank = current_rank()
        key = (spec, tuple(shape), tuple(stride), dtype, top_sizes, rank, is_copy)
        try:
            found = cls._interned.get(key)
        except TypeError:  # sizes that a compiler has not fixed
            keep_first_names()
            return SymbolicBound._build(*key)
        if found is None:
            if len(cls._interned) >= MAX_INTERNED:
                cls._interned.clear()
            found = cls._interned[key] = cls._build(*key)
        return found

    @classmethod
    def bind(
        cls,
        spec: HDSpec,
        shape: Sequence[int],
        stride: Sequence[int] | None,
        dtype: torch.dtype,
        top_sizes: Sequence[int] | None = None,
    ) -> BoundSpec:
        """Check a user's spec against a tensor and bind it.

        Args:
            spec: May have negative bottom dims.
            shape: Global shape.
            stride: Global strides in elements; None for contiguous.
            dtype: Element type.
            top_sizes: Exact top extents, or None for the spec's own cut.

        Raises:
            SpecError: If the spec names a dim that the tensor does not have, or the extents do not
                add up.
        """
        spec = normalized(spec, len(shape))
        sizes = check_top_sizes(spec, shape, top_sizes)
        return cls.of(
            spec, shape, contiguous_stride(shape) if stride is None else stride, dtype, sizes
        )

    @classmethod
    def _build(cls, spec, shape, stride, dtype, top_sizes, rank, is_copy) -> BoundSpec:
        bound = object.__new__(cls)
        bound.spec = spec
        bound.tensor_meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
        bound.shape, bound.stride, bound.dtype = bound.tensor_meta
        bound.top_sizes = top_sizes
        bound.rank = rank
        bound.is_copy = is_copy
        bound.index = spec.index_of(rank)
        bound._local = None
        bound._own_cut = None
        bound.is_alone = None
        bound._top = None
        bound._subs = [None] * spec.num_subgroups
        return bound

    def __copy__(self) -> BoundSpec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundSpec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.spec, tuple(self.shape), self.stride, self.dtype, self.top_sizes)
        return bound_from_parts, (*parts, self.is_copy) if self.is_copy else parts

    def __repr__(self) -> str:
        sizes = "" if self.top_sizes is None else f" top_sizes={self.top_sizes}"
        return f"{tuple(self.shape)} {str(self.dtype)[6:]} {self.spec}{sizes}"

    @property
    def has_own_cut(self) -> bool:
        """Whether the spec and the shape tell the top extents: they are no ones of a user's choice, nor a view's."""
        found = self._own_cut
        if found is None:
            sizes = self.top_sizes
            found = sizes is None or (
                isinstance(sizes, OwnSizes) and sizes.top_ratio == self.spec.top_ratio
            )
            if sizes is not None and not found:
                own = default_top_sizes(self.spec, self.shape)
                found = all(map(same, sizes, own or ()))
            self._own_cut = found
        return found

    def layout(self, *, has_own_cut: bool) -> Layout:
        """Return all but sizes."""
        return Layout(self.spec, self.dtype, self.rank, self.is_copy, has_own_cut)

    def with_spec(self, spec: HDSpec, top_sizes: tuple[int, ...] | None = None) -> BoundSpec:
        """Return the same tensor cut otherwise; without ``top_sizes`` by the spec's own cut.

        A spec with the same top placement keeps the extents.
        """
        if top_sizes is None:
            if spec.top == self.spec.top and spec.num_subgroups == self.spec.num_subgroups:
                top_sizes = self.top_sizes
            else:
                top_sizes = check_top_sizes(spec, self.shape, None)
        return BoundSpec.of(spec, self.shape, self.stride, self.dtype, top_sizes)

    def block_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of subgroup ``index``'s block."""
        return block_shape(self.spec, tuple(self.shape), index, self.top_sizes)

    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's local tensor, ``(0,)`` outside."""
        found = self._local
        if found is None:
            index = self.index
            if index is None:
                found = (0,)
            elif not any(map(checks.is_cut, self.spec.subgroups[index].placements)):
                found = self.block_shape(index)
            else:
                found = local_shape(self.spec, tuple(self.shape), self.top_sizes, self.rank)
            self._local = found
        return found

    def top(self) -> DTensorSpec:
        """Return the top tier as a DTensor spec: one mesh axis of subgroups, the global shape."""
        if self._top is None:
            mesh = abstract_mesh((self.spec.num_subgroups,), 0)
            self._top = DTensorSpec(mesh, (self.spec.top,), self.tensor_meta)
        return self._top

    def sub(self, index: int) -> DTensorSpec:
        """Return subgroup ``index``'s tier as a DTensor spec: its mesh and its block's shape."""
        found = self._subs[index]
        if found is None:
            group = self.spec.subgroups[index]
            mesh = abstract_mesh(group.mesh_shape, self._position(group))
            shape = self.block_shape(index)
            meta = TensorMeta(torch.Size(shape), self.block_stride(index), self.dtype)
            found = self._subs[index] = DTensorSpec(mesh, group.placements, meta)
        return found

    def block_stride(self, index: int) -> tuple[int, ...]:
        """Return a block's strides: those above the cut dim shrink with the block."""
        if self.top_sizes is None:
            return self.stride
        dim, size = self.spec.top.dim, self.top_sizes[index]  # type: ignore[attr-defined]
        length = self.shape[dim]
        if length in (0, size):
            return self.stride
        own = self.stride[dim]
        return tuple(
            step if d == dim or step < own * length else step * size // length
            for d, step in enumerate(self.stride)
        )

    def _position(self, group: Subgroup) -> int:
        return group.ranks.index(self.rank) if self.rank in group.ranks else 0


def is_like(traced: BoundSpec | Layout, other: BoundSpec | Layout) -> bool:
    """Return whether a program traced for the one runs on the other: all but sizes, which the tracer guards itself."""
    return (
        other.spec is traced.spec
        and other.has_own_cut == traced.has_own_cut
        and other.rank == traced.rank
        and other.is_copy == traced.is_copy
    )


class SymbolicBound(BoundSpec):
    """A bound spec with sizes that a compiler has not fixed. It is in no table: those would keep what is being traced."""

    __slots__ = ()

    is_symbolic = True

    def __hash__(self) -> int:
        raise TypeError("a bound spec with symbolic sizes is no key of a table.")

    def close_strided(self) -> None:
        """Fix the sizes where a strided shard has the number of pieces of those that stand for them: what leaves a
        program, or goes elsewhere, is cut into just as many.
        """
        tiers = (self.spec.top, *(p for g in self.spec.subgroups for p in g.placements))
        if any(map(checks.is_strided, tiers)):
            for size in self.shape:
                int(size)

    def hinted(self) -> BoundSpec:
        """Return the bound spec of the sizes that stand for the symbols."""
        sizes = None if self.top_sizes is None else hints(self.top_sizes)
        return BoundSpec.of(
            self.spec, hints(self.shape), hints(self.stride), self.dtype, sizes, self.is_copy
        )


class OwnSizes(tuple[int, ...]):
    """Open top extents known to be a spec's own cut, whatever names a compiler has for them; operators hand them on.

    Attributes:
        top_ratio: That spec's.
    """

    top_ratio: tuple[int, ...] | None

    @classmethod
    def of(cls, sizes: Sequence[int], spec: HDSpec) -> OwnSizes:
        """Return the extents of a tensor that ``spec`` cuts."""
        own = cls(sizes)
        own.top_ratio = spec.top_ratio
        return own


class Layout(NamedTuple):
    """A bound spec without sizes: what a compiled program keeps of a tensor whose sizes change.

    Attributes:
        spec: How the tensor is cut.
        dtype: Its elements' type.
        rank: Whose view this is.
        is_copy: As ``BoundSpec.is_copy``.
        has_own_cut: Whether spec and shape tell the top extents.
    """

    spec: HDSpec
    dtype: torch.dtype
    rank: int
    is_copy: bool
    has_own_cut: bool


def rebound(
    known: BoundSpec | Layout,
    shape: Sequence[int],
    stride: Sequence[int],
    top_sizes: tuple[int, ...] | None,
) -> BoundSpec:
    """Return the bound spec of a tensor of other sizes.

    Args:
        known: The bound spec, or what is known of it.
        shape: Global shape.
        stride: Global strides.
        top_sizes: Exact top extents; None for the spec's own cut.
    """
    if top_sizes is None:
        top_sizes = default_top_sizes(known.spec, shape)
    return BoundSpec.of(known.spec, shape, stride, known.dtype, top_sizes, known.is_copy)


def bound_from_parts(
    spec: HDSpec,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    top_sizes: tuple[int, ...] | None,
    is_copy: bool = False,
) -> BoundSpec:
    """Return ``BoundSpec.of(...)``, by a name that pickles."""
    return BoundSpec.of(spec, shape, stride, dtype, top_sizes, is_copy)


def kept_sizes(
    bound: BoundSpec, spec: HDSpec, top_sizes: Sequence[int] | None
) -> Sequence[int] | None:
    """Return the top extents that a redistribute gives: the old exact ones where the top cut stays and none are asked for."""
    same = spec.top == bound.spec.top and spec.num_subgroups == bound.spec.num_subgroups
    if top_sizes is None and same and spec.top_ratio == bound.spec.top_ratio:
        return bound.top_sizes
    return top_sizes
