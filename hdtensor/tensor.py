"""``HDTensor``: a tensor that is cut twice, across subgroups of ranks and inside each subgroup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import new_wrapper, no_torch_function
from hdtensor._torch_compilers import extend_marks
from hdtensor.checkpoint import protocol
from hdtensor.collectives import groups
from hdtensor.errors import DeductionError, SpecError
from hdtensor.ops.border import ToLocal, gradient_layout, to_dtensor, wanted_spec
from hdtensor.ops.bound import BoundSpec, Layout, bound_from_parts, is_like, kept_sizes
from hdtensor.ops.dispatch import dispatch
from hdtensor.ops.inner import bound_of, extents_of, flattened, keep_extents, refuse_limits
from hdtensor.ops.registry import changes, set_tensor_type
from hdtensor.ops.shard import rebuild
from hdtensor.ops.skips import due_gradient
from hdtensor.ops.special.move import move
from hdtensor.ops.special.scalars import contains
from hdtensor.ops.tangents import as_tangent, like_tangent, stable_hash
from hdtensor.placements.forms import SpecLike, also_named
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup


_torch_grad: Any = torch.Tensor.grad
_LOCAL = ["_local_tensor"]

#: ``accumulated_grad(tensor)``: its gradient as far as one was made.
accumulated_grad, _set_grad = _torch_grad.__get__, _torch_grad.__set__


class HDTensor(torch.Tensor):
    """A ``torch.Tensor`` of the global shape whose values lie in shards on several ranks.

    Every rank runs the same program on it; operators run on the rank's shard, and a rank that holds no part of the
    operands skips the work. Build one with ``distribute_tensor``, ``HDTensor.from_local`` or
    ``HDTensor.from_dtensor``; move it with ``redistribute``.
    """

    __slots__ = ("_local_tensor", "_made_extents", "_made_grad", "_seen_skips", "_skips", "_spec")

    _local_tensor: torch.Tensor
    _spec: BoundSpec
    _skips: list[int]  # backwards that passed the parameter's module while this rank skipped it
    _seen_skips: int  # as many when the gradient was cleared
    _made_grad: HDTensor  # the empty gradient that is due then
    _made_extents: torch.Tensor  # the top extents as a compiler sees them

    __torch_function__ = no_torch_function  # type: ignore[assignment]
    __torch_dispatch__ = staticmethod(dispatch)  # type: ignore[assignment]

    def __new__(
        cls, local: torch.Tensor, bound: BoundSpec, requires_grad: bool = False
    ) -> HDTensor:
        """Wrap a rank's local tensor; ``bound`` must describe it. Users call ``from_local``."""
        return new_wrapper(cls, local, bound, requires_grad)

    # -- what it is ---------------------------------------------------------------------------------

    @property
    def spec(self) -> HDSpec:
        """How the tensor is cut."""
        return self._spec.spec

    @property
    def top_sizes(self) -> tuple[int, ...] | None:
        """Exact extent of each subgroup's block along the top ``Shard``'s dim; None without one."""
        return self._spec.top_sizes

    @property
    def hdim(self) -> int:
        """The paper's HDim code: d for a top ``Shard(d)``, -1 for ``Replicate``, -2 for ``Partial``."""
        return self._spec.spec.hdim

    @property
    def hsize(self) -> int:
        """The paper's HSize: the number of subgroups."""
        return self._spec.spec.num_subgroups

    @property
    def subgroups(self) -> list[tuple[DeviceMesh, tuple[Placement, ...]]]:
        """One ``(DeviceMesh, placements)`` per subgroup, the paper's DG and DS unions."""
        return [(groups.mesh_of(g), g.placements) for g in self._spec.spec.subgroups]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of a tensor of one subgroup, as a ``DTensor``'s.

        Raises:
            AttributeError: With several subgroups; it names what to use.
        """
        return self._only_subgroup("placements").placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of a tensor of one subgroup, as a ``DTensor``'s.

        Raises:
            AttributeError: With several subgroups; it names what to use.
        """
        return groups.mesh_of(self._only_subgroup("device_mesh"))

    def _only_subgroup(self, what: str) -> Subgroup:
        if self.hsize != 1:
            raise AttributeError(
                f"an HDTensor of {self.hsize} subgroups has no {what} of its own: see .spec (top and subgroups), "
                f".subgroups (a mesh and placements for each), or .to_dtensor() for this rank's subgroup."
            )
        return self.spec.subgroups[0]

    @property
    def is_local(self) -> bool:
        """Whether this rank is in one of the subgroups."""
        return self._spec.index is not None

    @property
    def grad(self) -> HDTensor | None:
        """The gradient, as torch's ``grad``.

        A rank that skips a whole module does nothing for its parameters in backward; their empty gradients are made
        when they are looked at. So a gradient exists on every rank or on none, and code that is collective over
        gradients is safe.
        """
        found = accumulated_grad(self)
        if found is None:
            return due_gradient(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_grad(self, value)
        if value is None:
            skips = getattr(self, "_skips", None)
            if skips is not None:
                self._seen_skips = skips[0]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property  # type: ignore[override]
    def data(self) -> HDTensor:
        """The tensor without its history. What is assigned replaces values and layout, as torch's ``data`` does."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: HDTensor) -> None:
        if not isinstance(other, HDTensor):
            raise SpecError(
                f"the data of an HDTensor is an HDTensor, got a {type(other).__name__}; use "
                f"distribute_tensor(t, {str(self._spec.spec)!r})."
            )
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        if other._spec.dtype is not self._spec.dtype:
            changes[0] += 1
        self._local_tensor, self._spec = other._local_tensor.detach(), other._spec

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        bound = self._spec
        grad = ", requires_grad=True" if self.requires_grad else ""
        sizes = "" if bound.top_sizes is None else f", top_sizes={bound.top_sizes}"
        held = f"local={tuple(self._local_tensor.shape)}" if self.is_local else "not local"
        return f"HDTensor({tuple(self.shape)}, {str(bound.dtype)[6:]}, {str(bound.spec)!r}{sizes}, {held}{grad})"

    # -- in and out ---------------------------------------------------------------------------------

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's local tensor; differentiable.

        Outside every subgroup that is an empty tensor of shape ``(0,)``. A ``Partial`` tensor's local tensor is this
        rank's term.

        Args:
            grad_placements: For a tensor of one subgroup: the placements of the gradient that comes back. Default: the
                tensor's own, ``Replicate`` for ``Partial``. Pass ``[Partial()]`` where ranks go on with a replica to
                different terms of a sum.

        Raises:
            SpecError: With ``grad_placements`` and several subgroups; it names what to use.
        """
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._local_tensor.view_as(self._local_tensor)
        return ToLocal.apply(self, gradient_layout(self._spec, grad_placements))

    def to_dtensor(self, grad_top: Placement | None = None) -> DTensor | None:
        """Return this rank's subgroup as a ``DTensor`` of its block: the top tier's ``to_local``; differentiable.

        Args:
            grad_top: Top placement of the gradient that comes back for a top ``Replicate`` or ``Partial`` tensor.
                Default ``Replicate()``: every subgroup computes the same gradient. Pass ``Partial()`` where subgroups
                contribute different terms.

        Returns:
            None on a rank outside every subgroup: a DTensor has no such rank.
        """
        return to_dtensor(self, grad_top)

    @also_named(device_mesh="spec")
    def redistribute(
        self,
        spec: SpecLike | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        hdim: int = -1,
        top_ratio: Sequence[int] | None = None,
        top_sizes: Sequence[int] | None = None,
    ) -> HDTensor:
        """Bring the tensor to another spec, on whatever ranks; differentiable. Every rank of the world calls it.

        The gradient comes back in this tensor's spec, with ``Partial`` turned into ``Replicate``. The tensor itself is
        returned where it has the spec already, as torch's ``to`` does.

        Args:
            spec: The new spec, its short text, a list of ``(mesh, placements)``, or a ``DeviceMesh`` for one subgroup.
            placements: The placements on that mesh; without a mesh, the new ones of a tensor of one subgroup.
            async_op: DTensor's leave to return before the values are there. The result is the same; here it is complete.
            hdim: The paper's code for the top placement, with a list of pairs.
            top_ratio: Proportions of a top ``Shard``, with a list of pairs.
            top_sizes: Exact extents of a top ``Shard``; default: by the spec's ratio, or unchanged where the top
                placement stays.

        Raises:
            SpecError: If the spec does not fit the tensor.
            RedistributeError: If a pending reduction is not defined on the tensor's dtype.
        """
        bound = self._spec
        if spec is bound.spec and top_sizes is None and placements is None:
            return self
        spec = wanted_spec(self._spec.spec, spec, placements, hdim, top_ratio)
        dst = BoundSpec.bind(
            spec, self.shape, bound.stride, self.dtype, kept_sizes(bound, spec, top_sizes)
        )
        if dst.spec is bound.spec and dst.top_sizes == bound.top_sizes:
            return self
        return move(self, dst.spec, dst.top_sizes)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor on every rank of the world, also those that hold nothing; differentiable.

        Every rank calls it. See ``api.collect.full_tensor``.
        """
        from hdtensor.api.collect import full_tensor  # noqa: PLC0415 - the api builds on this type

        return full_tensor(self, grad_placements=grad_placements)

    @staticmethod
    @also_named(local_tensor="local", device_mesh="spec", run_check="check")
    def from_local(
        local: torch.Tensor,
        spec: SpecLike | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        top_sizes: Sequence[int] | None = None,
        check: bool = True,
    ) -> HDTensor:
        """Build a tensor from every rank's shard; differentiable. See ``api.local.from_local``."""
        from hdtensor.api.local import from_local  # noqa: PLC0415 - the api builds on this type

        whole: Any = {"shape": shape, "stride": stride, "top_sizes": top_sizes}
        return from_local(local, spec, placements, check=check, **whole)

    @staticmethod
    def from_dtensor(
        dtensor: DTensor | None,
        spec: HDSpec | str | None = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        top_sizes: Sequence[int] | None = None,
    ) -> HDTensor:
        """Build a tensor from each subgroup's ``DTensor``; differentiable. See ``api.local.from_dtensor``."""
        from hdtensor.api.local import from_dtensor  # noqa: PLC0415 - the api builds on this type

        return from_dtensor(dtensor, spec, shape=shape, dtype=dtype, top_sizes=top_sizes)

    # -- what reaches for memory of its own, of which a wrapper has none --------------------------------

    def __format__(self, format_spec: str) -> str:
        """Format a scalar's value, as torch does; ``item`` says where there is none."""
        return format(self.item(), format_spec) if format_spec and not self.ndim else str(self)

    def __contains__(self, element: Any) -> bool:
        """Return whether an element has this value, on every rank; all call it, as ``torch.equal``."""
        return contains(self, element)

    def share_memory_(self) -> HDTensor:
        """Move this rank's local tensor to shared memory."""
        self._local_tensor.share_memory_()
        return self

    def apply_(self, function: Any) -> HDTensor:
        """Refuse: torch would crash on a wrapper.

        Raises:
            DeductionError: Always; it names what to call.
        """
        raise DeductionError(f"apply_ on {self!r}: use t.to_local().apply_(function) on each rank.")

    def __dlpack__(self, **options: Any) -> Any:
        """Refuse: torch would give a pointer to nothing.

        Raises:
            DeductionError: Always; it names what to call.
        """
        raise DeductionError(f"dlpack of {self!r}: pass t.to_local() or t.full_tensor() on.")

    # -- torch protocols; those of its checkpoints are at the end -----------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], BoundSpec | Layout]:
        bound = self._spec
        return (_LOCAL, bound) if bound.is_alone else flattened(self)

    @property
    def _extents(self) -> torch.Tensor:
        return extents_of(self)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        known: BoundSpec | Layout,
        outer_size: Any,
        outer_stride: Any,
    ) -> HDTensor:
        bound = bound_of(inner, known, outer_size, outer_stride)
        local = inner["_local_tensor"]
        tensor = new_wrapper(HDTensor, local, bound, local.requires_grad)
        if len(inner) > 1:
            keep_extents(tensor, inner["_extents"])
        return tensor

    @classmethod
    def __metadata_guard__(cls, traced: BoundSpec | Layout, bound: BoundSpec | Layout) -> bool:
        return bound is traced or is_like(traced, bound)

    def _stable_hash_for_caching(self) -> str:
        return stable_hash(self)

    def __coerce_tangent_metadata__(self) -> HDTensor:
        return as_tangent(self)

    def __coerce_same_metadata_as_tangent__(
        self, bound: BoundSpec, expected_type: type | None = None
    ) -> HDTensor | None:
        return None if expected_type is not None else like_tangent(self, bound)

    def __deepcopy__(self, memo: dict[int, Any]) -> HDTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that are leaves of the graph can be copied deeply; detach() the tensor first."
            )
        copied: Any = memo.get(id(self))
        if copied is None:
            copied = new_wrapper(
                HDTensor, self._local_tensor.detach().clone(), self._spec, self.requires_grad
            )
            memo[id(self)] = copied
            if isinstance(self, torch.nn.Parameter):  # as torch's, without the gradient
                copied = torch.nn.Parameter(copied.detach(), self.requires_grad)
                memo[id(self)] = copied
            elif self.grad is not None:
                copied.grad = self.grad.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (
            self._local_tensor.detach(),
            self._spec,
            self._spec.rank,
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
        )

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return protocol.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        return protocol.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return protocol.tensor_shard(self, index)


set_tensor_type(HDTensor)
extend_marks(HDTensor, refuse_limits)


# What torch.load(weights_only=True) may call: values only, no code of a file's choice.
torch.serialization.add_safe_globals([rebuild, bound_from_parts, HDSpec, Subgroup])
