"""Checks of what users write into specs, and the short text of their parts."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.errors import SpecError
from hdtensor.placements.sizes import is_open


if TYPE_CHECKING:
    from hdtensor.placements.subgroup import Subgroup


#: Reductions of a ``Partial`` whose meaning over two tiers is defined (DESIGN section 3).
REDUCE_OPS = ("sum", "avg", "max", "min", "product")


def is_strided(placement: Placement) -> bool:
    """Return whether this is DTensor's ``_StridedShard``, of which a rank owns several boxes."""
    return hasattr(placement, "split_factor")


def shard_dim(placement: Placement) -> int | None:
    """Return the tensor dim that a ``Shard`` or ``_StridedShard`` cuts, else None."""
    return getattr(placement, "dim", None)


def is_cut(placement: Placement) -> bool:
    """Return whether the placement is a ``Shard`` or a ``_StridedShard``."""
    return shard_dim(placement) is not None


def int_tuple(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return ``values`` as a tuple of plain integers.

    Raises:
        SpecError: If it is no sequence of integers; bools and floats are none.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise SpecError(f"{name} must be a sequence of integers, got {values!r}.")
    out = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise SpecError(f"{name} must hold integers, got {value!r} in {shown(values)}.")
        out.append(value if is_open(value) else operator.index(value))
    return tuple(out)


def check_shape(shape: Any) -> tuple[int, ...]:
    """Return a tensor's shape as plain integers.

    Raises:
        SpecError: If it is none.
    """
    sizes = int_tuple("shape", shape)
    if min(sizes, default=0) < 0:
        raise SpecError(f"shape must hold extents >= 0, got {sizes}.")
    return sizes


def shown(values: Any, most: int = 16) -> str:
    """Return a sequence for a message, cut short where it is long.

    >>> shown(range(100), most=3)
    '[0, 1, 2, ... 100 in all]'
    """
    if isinstance(values, Sized) and len(values) > most:
        head = ", ".join(map(repr, itertools.islice(values, most)))  # type: ignore[call-overload]
        return f"[{head}, ... {len(values)} in all]"
    return repr(values)


def check_ranks(ranks: tuple[int, ...]) -> None:
    """Raise unless the ranks are at least one, non-negative and without repeats.

    Raises:
        SpecError: Otherwise.
    """
    if not ranks:
        raise SpecError("a subgroup needs at least one rank, got none. Leave the subgroup out.")
    if min(ranks) < 0:
        raise SpecError(f"ranks are global and start at 0, got {min(ranks)} in {shown(ranks)}.")
    if len(set(ranks)) != len(ranks):
        twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
        raise SpecError(
            f"ranks must not repeat, got {shown(twice)} more than once in {shown(ranks)}."
        )


def check_mesh(
    ranks: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    """Raise unless the mesh holds the ranks and has one known placement per axis.

    Raises:
        SpecError: Otherwise.
    """
    if not mesh_shape or any(size < 1 for size in mesh_shape):
        raise SpecError(f"mesh_shape must hold sizes >= 1, got {mesh_shape}.")
    if math.prod(mesh_shape) != len(ranks):
        raise SpecError(
            f"mesh_shape {mesh_shape} holds {math.prod(mesh_shape)} ranks, "
            f"but {len(ranks)} were given: {shown(ranks)}."
        )
    for placement in placements:
        check_placement(placement)
    if len(placements) != len(mesh_shape):
        raise SpecError(
            f"one placement per mesh axis: {len(mesh_shape)} axes in {mesh_shape}, "
            f"{len(placements)} placements {placements}."
        )


def check_placement(placement: Any) -> None:
    """Raise unless hdtensor knows the placement's meaning.

    Raises:
        SpecError: On another type, an unknown reduction, or a placement that carries hidden state.
    """
    if isinstance(placement, Partial):
        if placement.reduce_op not in REDUCE_OPS:
            raise SpecError(
                f"Partial({placement.reduce_op!r}) is not supported; use one of {REDUCE_OPS}."
            )
        if type(placement) is not Partial and not hasattr(placement, "norm_type"):
            raise SpecError(
                f"{placement!r} ({type(placement).__name__}) belongs to one DTensor operator and "
                f"has no meaning in a spec. Redistribute it inside DTensor first."
            )
        return
    if isinstance(placement, Shard | Replicate) or is_strided(placement):
        return
    raise SpecError(
        f"a placement is Shard(dim), Replicate() or Partial(op) from torch.distributed.tensor, "
        f"got {placement!r} of type {type(placement).__name__}."
    )


def check_spec(
    subgroups: Sequence[Subgroup], top: Placement, top_ratio: tuple[int, ...] | None
) -> None:
    """Raise unless the parts make one spec.

    Raises:
        SpecError: On no subgroup, a rank in two of them, a bad top placement or ratio.
    """
    if not subgroups:
        raise SpecError("a spec needs at least one subgroup, got none.")
    for index, group in enumerate(subgroups):
        if not hasattr(group, "mesh_shape"):
            raise SpecError(
                f"subgroup {index} must be a Subgroup(ranks, placements), got {group!r}. "
                f"For (mesh, placements) pairs use HDSpec.from_meshes."
            )
    seen: dict[int, int] = {}
    for index, group in enumerate(subgroups):
        for rank in group.ranks:
            if rank in seen:
                raise SpecError(
                    f"rank {rank} is in subgroup {seen[rank]} ({subgroups[seen[rank]].text()}) and "
                    f"in subgroup {index} ({group.text()}); a rank is in at most one."
                )
            seen[rank] = index
    check_placement(top)
    dim = shard_dim(top)
    if dim is not None and dim < 0:
        raise SpecError(
            f"the top Shard needs a dim >= 0, got {top}: a spec does not know the number of dims."
        )
    if top_ratio is not None:
        check_ratio(top_ratio, top, len(subgroups))


def check_ratio(top_ratio: tuple[int, ...], top: Placement, num_subgroups: int) -> None:
    """Raise unless the ratio has one non-negative part per subgroup of a top ``Shard``.

    Raises:
        SpecError: Otherwise.
    """
    if not is_cut(top):
        raise SpecError(f"top_ratio {top_ratio} needs a top Shard, but top is {top}.")
    if len(top_ratio) != num_subgroups:
        raise SpecError(
            f"top_ratio needs one part per subgroup: {num_subgroups} subgroups, got {shown(top_ratio)}."
        )
    if min(top_ratio) < 0 or not any(top_ratio):
        raise SpecError(f"top_ratio parts must be >= 0 and not all 0, got {shown(top_ratio)}.")


def placement_text(placement: Placement) -> str:
    """Return the short form: ``S1``, ``R``, ``P``, ``P(max)``, ``S0x2`` for a strided shard."""
    if is_strided(placement):
        return f"S{placement.dim}x{placement.split_factor}"  # type: ignore[attr-defined]
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        norm = getattr(placement, "norm_type", None)
        if norm is not None:
            return f"P(norm {norm})"
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ranks with runs of three or more joined: ``0-3,7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ",".join(parts)


def subgroup_text(
    ranks: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> str:
    """Return a subgroup's short form, ``0-3(2x2):S0,R``."""
    mesh = "" if len(mesh_shape) == 1 else f"({'x'.join(map(str, mesh_shape))})"
    return f"{ranks_text(ranks)}{mesh}:{','.join(map(placement_text, placements))}"
