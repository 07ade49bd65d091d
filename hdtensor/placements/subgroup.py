"""``Subgroup``: an ordered group of ranks and its placements, a pure value without sizes or processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compilers import register_value_type
from hdtensor.errors import SpecError
from hdtensor.placements import checks


class Subgroup:
    """One sharding subgroup: an ordered device group and its bottom-tier placements.

    Paper: one (DG, DS) pair of the two unions (Sec. 4.2, Fig. 6). A frozen value.

    >>> from torch.distributed.tensor import Shard
    >>> Subgroup((0, 3), (Shard(1),))
    Subgroup('0,3:S1')

    Attributes:
        ranks: Global ranks, row-major over ``mesh_shape``, without repeats.
        mesh_shape: Sizes of the subgroup's mesh axes; their product is ``len(ranks)``.
        placements: One placement per mesh axis.
    """

    __slots__ = ("_hash", "_key", "_place", "mesh_shape", "placements", "ranks")

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    _key: tuple[Any, ...]
    _hash: int
    _place: dict[int, int]

    def __init__(
        self,
        ranks: Iterable[int],
        placements: Iterable[Placement] | Placement | None = None,
        mesh_shape: Iterable[int] | None = None,
    ) -> None:
        """Check and freeze.

        Args:
            ranks: Global ranks, row-major over ``mesh_shape``.
            placements: One per mesh axis; default ``Replicate()`` on every axis.
            mesh_shape: Default: one axis over all ranks.

        Raises:
            SpecError: On repeated or negative ranks, a mesh that does not hold the ranks, or
                placements that hdtensor does not know.
        """
        frozen_ranks = checks.int_tuple("ranks", ranks)
        checks.check_ranks(frozen_ranks)
        shape = (
            (len(frozen_ranks),)
            if mesh_shape is None
            else checks.int_tuple("mesh_shape", mesh_shape)
        )
        if placements is None:
            placements = (Replicate(),) * len(shape)
        elif isinstance(placements, Placement):
            placements = (placements,)
        elif not isinstance(placements, Iterable):
            raise SpecError(
                f"placements must be a placement or a sequence of them, got {placements!r}."
            )
        frozen = tuple(placements)
        checks.check_mesh(frozen_ranks, shape, frozen)
        set_ = object.__setattr__
        set_(self, "ranks", frozen_ranks)
        set_(self, "mesh_shape", shape)
        set_(self, "placements", frozen)
        key = (frozen_ranks, shape, tuple((type(p), p) for p in frozen))
        set_(self, "_key", key)
        set_(self, "_hash", hash(key))
        set_(self, "_place", {rank: place for place, rank in enumerate(frozen_ranks)})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Subgroup is frozen; build a new one instead of setting {name!r}.")

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Subgroup) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Subgroup, (self.ranks, self.placements, self.mesh_shape)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        parts = [p.__fx_repr__() for p in self.placements]  # type: ignore[attr-defined]
        names = {name: value for _, found in parts for name, value in found.items()}
        placements = "".join(f"{text}, " for text, _ in parts)
        text = f"Subgroup({self.ranks!r}, ({placements}), {self.mesh_shape!r})"
        return text, {**names, "Subgroup": Subgroup}

    def __repr__(self) -> str:
        return f"Subgroup({self.text()!r})"

    def __len__(self) -> int:
        return len(self.ranks)

    def text(self) -> str:
        """Return the short form, for example ``0-3(2x2):S0,R``."""
        return checks.subgroup_text(self.ranks, self.mesh_shape, self.placements)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the rank's coordinate on each mesh axis.

        >>> Subgroup((4, 5, 6, 7), mesh_shape=(2, 2)).coordinate(6)
        (1, 0)

        Raises:
            ValueError: If the rank is not in this subgroup.
        """
        index = self._place.get(rank, -1)
        if index < 0:
            raise ValueError(f"rank {rank} is not in {self!r}.")
        coordinate = []
        for size in reversed(self.mesh_shape):
            index, position = divmod(index, size)
            coordinate.append(position)
        return tuple(reversed(coordinate))

    def lines(self, axis: int) -> list[tuple[int, ...]]:
        """Return the ranks along one mesh axis, for each coordinate on the other axes.

        They are what a collective along the axis runs over.

        >>> Subgroup((4, 5, 6, 7), mesh_shape=(2, 2)).lines(0)
        [(4, 6), (5, 7)]
        """
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            at = self.coordinate(rank)
            lines.setdefault(at[:axis] + at[axis + 1 :], []).append(rank)
        return [tuple(line) for line in lines.values()]

    def with_placements(self, placements: Iterable[Placement]) -> Subgroup:
        """Return the same ranks and mesh with other placements."""
        return Subgroup(self.ranks, placements, self.mesh_shape)

    def has_partial(self) -> bool:
        """Return whether some axis is ``Partial``."""
        return any(isinstance(p, Partial) for p in self.placements)


# Compiled programs hold subgroups as constants.
register_value_type(
    Subgroup,
    "ranks",
    "mesh_shape",
    "placements",
    "text",
    "with_placements",
    "has_partial",
    "__len__",
)
