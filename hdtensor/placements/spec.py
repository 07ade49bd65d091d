"""``HDSpec``: how a tensor is cut, as a pure value without sizes or processes."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compilers import register_value_type
from hdtensor.errors import SpecError
from hdtensor.placements import checks
from hdtensor.placements.subgroup import Subgroup


#: The paper's HDim codes of the placements that are not a ``Shard`` (Sec. 4.1).
REPLICATE_CODE = -1
PARTIAL_CODE = -2


class HDSpec:
    """How a tensor is cut, in two tiers: across subgroups, and inside each subgroup.

    The paper's annotation (Sec. 4.2, Fig. 6): ``subgroups`` are the DG and DS unions, ``top`` the
    HDim, ``num_subgroups`` the HSize. A static value: it knows neither sizes nor process groups.
    Frozen, equal by value, and interned, so that equality on the hot path is identity.

    ::

        HDSpec(subgroups=(Subgroup((0, 1), (Shard(1),)), Subgroup((2,))), top=Shard(0), top_ratio=(3, 1))

                 cols
               +---+---+
               |   |   |
          rows | 0 | 1 |   3 parts of the rows: subgroup 0 cuts its block by columns
               |   |   |
               +---+---+
               |   2   |   1 part: subgroup 1 holds it whole
               +-------+

    With one subgroup every top placement means the same; it is stored as ``Replicate()``.

    Attributes:
        subgroups: The sharding subgroups; no rank is in two of them.
        top: ``Shard(d)``, ``Replicate()`` or ``Partial(op)`` across subgroups.
        top_ratio: In what proportion a top ``Shard`` cuts, reduced to lowest terms; None stands
            for ``torch.chunk``'s equal cut. Zeros are allowed, all zeros are not.
    """

    __slots__ = ("__weakref__", "_index_of_rank", "_text", "ranks", "subgroups", "top", "top_ratio")

    subgroups: tuple[Subgroup, ...]
    top: Placement
    top_ratio: tuple[int, ...] | None
    ranks: tuple[int, ...]
    _text: str | None
    _index_of_rank: dict[int, int]

    _interned: dict[tuple[Any, ...], HDSpec] = {}  # noqa: RUF012 - the intern table is the point
    _lock = threading.Lock()

    def __new__(
        cls,
        subgroups: Iterable[Subgroup],
        top: Placement | None = None,
        top_ratio: Iterable[int] | None = None,
    ) -> HDSpec:
        """Check, normalize and intern.

        Args:
            subgroups: At least one; ranks must not repeat across them.
            top: Default ``Replicate()``.
            top_ratio: One non-negative integer per subgroup; only with a top ``Shard``.

        Raises:
            SpecError: On overlapping subgroups, an unknown top placement, or a bad ratio.
        """
        if not isinstance(subgroups, Iterable):
            raise SpecError(f"subgroups must be a sequence of subgroups, got {subgroups!r}.")
        groups = tuple(subgroups)
        top = Replicate() if top is None else top
        ratio = None if top_ratio is None else checks.int_tuple("top_ratio", top_ratio)
        checks.check_spec(groups, top, ratio)
        if len(groups) == 1:
            top, ratio = Replicate(), None
        ratio = _lowest_terms(ratio)
        key = (groups, type(top), top, ratio)
        found = cls._interned.get(key)
        if found is None:
            with cls._lock:
                found = cls._interned.get(key)
                if found is None:
                    found = cls._build(groups, top, ratio)
                    cls._interned[key] = found
        return found

    @classmethod
    def _build(
        cls, groups: tuple[Subgroup, ...], top: Placement, ratio: tuple[int, ...] | None
    ) -> HDSpec:
        spec = object.__new__(cls)
        set_ = object.__setattr__
        set_(spec, "subgroups", groups)
        set_(spec, "top", top)
        set_(spec, "top_ratio", ratio)
        set_(spec, "ranks", tuple(r for g in groups for r in g.ranks))
        set_(spec, "_index_of_rank", {r: i for i, g in enumerate(groups) for r in g.ranks})
        set_(spec, "_text", None)
        return spec

    @classmethod
    def from_meshes(
        cls,
        pairs: Sequence[tuple[DeviceMesh | Sequence[int], Sequence[Placement] | Placement]],
        hdim: int = REPLICATE_CODE,
        *,
        top_ratio: Iterable[int] | None = None,
        reduce_op: str = "sum",
    ) -> HDSpec:
        """Build a spec from the paper's DG and DS unions and its HDim code.

        Args:
            pairs: One ``(mesh, placements)`` per subgroup; the mesh is a ``DeviceMesh`` or a plain
                sequence of ranks.
            hdim: ``d >= 0`` for ``Shard(d)``, -1 for ``Replicate()``, -2 for ``Partial(reduce_op)``.
            top_ratio: Proportions of a top ``Shard``.
            reduce_op: Reduction of a top ``Partial``.

        >>> HDSpec.from_meshes([((0, 1), [Shard(1)]), ((2,), [Replicate()])], hdim=0)
        HDSpec('S0 / 0,1:S1 2:R')

        Raises:
            SpecError: On an unknown code, or as the constructor does.
        """
        subgroups = []
        for index, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise SpecError(
                    f"pair {index} must be (mesh, placements), got {pair!r}. "
                    f"Example: ((0, 1), [Shard(1)])."
                )
            mesh, placements = pair
            if isinstance(mesh, DeviceMesh):
                ranks = mesh.mesh.flatten().tolist()
                subgroups.append(Subgroup(ranks, placements, tuple(mesh.mesh.shape)))
            else:
                subgroups.append(Subgroup(mesh, placements))
        return cls(subgroups, top_from_code(hdim, reduce_op), top_ratio)

    @classmethod
    def from_text(cls, text: str) -> HDSpec:
        """Parse the short form, ``str(spec)``'s inverse: ``S0[3:1] / 0,1:S1 2:R``.

        Raises:
            SpecError: If the text is not a spec; the message marks the place.
        """
        from hdtensor.placements.text import parse_spec  # noqa: PLC0415 - text builds on spec

        return parse_spec(text)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"HDSpec is frozen; use spec.replace({name}=...) for a new one.")

    def __copy__(self) -> HDSpec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> HDSpec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return HDSpec, (self.subgroups, self.top, self.top_ratio)

    def __repr__(self) -> str:
        return f"HDSpec({str(self)!r})"

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return f"HDSpec.from_text({self.text!r})", {"HDSpec": HDSpec}

    def _make_text(self) -> str:
        ratio = "" if self.top_ratio is None else f"[{':'.join(map(str, self.top_ratio))}]"
        groups = " ".join(g.text() for g in self.subgroups)
        return f"{checks.placement_text(self.top)}{ratio} / {groups}"

    @property
    def text(self) -> str:
        """The short form, which ``from_text`` reads; operators of ``torch.library`` pass it around."""
        if self._text is None:
            object.__setattr__(self, "_text", self._make_text())
        return self._text  # type: ignore[return-value]

    @property
    def num_subgroups(self) -> int:
        """The paper's HSize."""
        return len(self.subgroups)

    hsize = num_subgroups

    @property
    def hdim(self) -> int:
        """The paper's HDim code: d for ``Shard(d)``, -1 for ``Replicate``, -2 for ``Partial``."""
        dim = checks.shard_dim(self.top)
        if dim is not None:
            return dim
        return PARTIAL_CODE if isinstance(self.top, Partial) else REPLICATE_CODE

    def index_of(self, rank: int) -> int | None:
        """Return which subgroup the rank is in, or None where it holds no part."""
        return self._index_of_rank.get(rank)

    def has_partial(self) -> bool:
        """Return whether a reduction is pending at either tier."""
        return isinstance(self.top, Partial) or any(g.has_partial() for g in self.subgroups)

    def replace(self, **changes: Any) -> HDSpec:
        """Return a spec with some of ``subgroups``, ``top`` and ``top_ratio`` changed.

        A ratio is dropped when the new top placement is not a ``Shard``.
        """
        top = changes.pop("top", self.top)
        subgroups = changes.pop("subgroups", self.subgroups)
        default = self.top_ratio if checks.is_cut(top) else None
        ratio = changes.pop("top_ratio", default)
        if changes:
            raise TypeError(
                f"HDSpec.replace takes subgroups, top and top_ratio, not {sorted(changes)}."
            )
        return HDSpec(subgroups, top, ratio)

    def map_bottom(self, change: Any) -> HDSpec:
        """Return a spec in which ``change(placement)`` replaces each bottom placement."""
        return self.replace(
            subgroups=tuple(g.with_placements(map(change, g.placements)) for g in self.subgroups)
        )


# Compiled programs hold specs as constants.
register_value_type(
    HDSpec,
    "subgroups",
    "top",
    "top_ratio",
    "ranks",
    "text",
    "num_subgroups",
    "hdim",
    "index_of",
    "has_partial",
    "replace",
)


def top_from_code(hdim: int, reduce_op: str = "sum") -> Placement:
    """Return the placement of a paper's HDim code.

    Raises:
        SpecError: If the code is none of d >= 0, -1, -2.
    """
    try:
        code = operator.index(hdim)
    except TypeError:
        raise SpecError(
            f"hdim must be an integer code (d >= 0, -1 replicate, -2 partial), got {hdim!r}."
        ) from None
    if code >= 0:
        return Shard(code)
    if code == REPLICATE_CODE:
        return Replicate()
    if code == PARTIAL_CODE:
        return Partial(reduce_op)
    raise SpecError(
        f"hdim code {code} is unknown. Use d >= 0 for Shard(d), -1 for Replicate(), "
        f"-2 for Partial()."
    )


def _lowest_terms(ratio: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if ratio is None:
        return None
    divisor = math.gcd(*ratio)
    return tuple(part // divisor for part in ratio)
