"""The one-line form of a spec and its parser: ``S0[3:1] / 0-3(2x2):S0,R 4,5:P(max)``."""

from __future__ import annotations

import re

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import StridedShard
from hdtensor.errors import SpecError
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup


_PLACEMENT = re.compile(
    r"(?:S(?P<dim>-?\d+)(?:x(?P<pieces>\d+))?|(?P<r>R)|P(?:\((?P<op>\w+)\))?)\Z", re.ASCII
)
_TOP = re.compile(r"(?P<placement>[^\[\]]+?)(?:\[(?P<ratio>\d+(?::\d+)*)\])?\Z", re.ASCII)
_GROUP = re.compile(
    r"(?P<ranks>[\d,\-]+)(?:\((?P<mesh>\d+(?:x\d+)*)\))?:(?P<placements>.+)\Z", re.ASCII
)
_MAX_DIGITS = 9
_MAX_RANKS = 1 << 20


def parse_placement(text: str) -> Placement:
    """Parse ``S1``, ``R``, ``P``, ``P(max)`` or ``S0x2``.

    Raises:
        SpecError: If the text is no placement.
    """
    match = _PLACEMENT.match(text)
    if match is None:
        raise SpecError(
            f"{text!r} is no placement. Write S<dim>, R, P, P(<op>) or S<dim>x<pieces>."
        )
    if match["dim"] is not None:
        dim = _number(match["dim"])
        return _strided(dim, _number(match["pieces"])) if match["pieces"] else Shard(dim)
    if match["r"]:
        return Replicate()
    op = match["op"] or "sum"
    placement = Partial(op)
    checks.check_placement(placement)
    return placement


def parse_spec(text: str) -> HDSpec:
    """Parse ``str(spec)``.

    >>> parse_spec("S0[3:1] / 0,1:S1 2:R")
    HDSpec('S0[3:1] / 0,1:S1 2:R')

    Raises:
        SpecError: If the text is not ``<top> / <ranks>:<placements> ...``.
    """
    if not isinstance(text, str):
        raise SpecError(f"a spec's text must be a string, got {type(text).__name__}.")
    top_text, slash, groups_text = text.partition("/")
    match = _TOP.match(top_text.strip())
    if not slash or match is None:
        raise SpecError(
            f"{text!r} is no spec. Write <top> / <ranks>:<placements> ..., for example "
            f"'S0[3:1] / 0,1:S1 2:R'."
        )
    ratio = match["ratio"]
    parts = None if ratio is None else [_number(part) for part in ratio.split(":")]
    subgroups = [parse_subgroup(part) for part in groups_text.split()]
    return HDSpec(subgroups, parse_placement(match["placement"].strip()), parts)


def as_spec(spec: HDSpec | str) -> HDSpec:
    """Return a spec given as one or as its short text.

    Raises:
        SpecError: On anything else.
    """
    if isinstance(spec, HDSpec):
        return spec
    if isinstance(spec, str):
        return parse_spec(spec)
    raise SpecError(
        f"a spec is an HDSpec or its short text, got {spec!r} of type {type(spec).__name__}."
    )


def parse_subgroup(text: str) -> Subgroup:
    """Parse ``0-3(2x2):S0,R``.

    Raises:
        SpecError: If the text is no subgroup.
    """
    match = _GROUP.match(text)
    if match is None:
        raise SpecError(
            f"{text!r} is no subgroup. Write <ranks>:<placements>, for example '0-3(2x2):S0,R'."
        )
    ranks: list[int] = []
    for part in match["ranks"].split(","):
        ranks += _parse_run(part, text)
    mesh = match["mesh"]
    shape = None if mesh is None else [_number(size) for size in mesh.split("x")]
    return Subgroup(ranks, [parse_placement(p) for p in match["placements"].split(",")], shape)


def _parse_run(part: str, text: str) -> list[int]:
    first, dash, last = part.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise SpecError(f"{part!r} in {text!r} is no rank and no range of ranks such as 0-3.")
    if not dash:
        return [_number(first)]
    a, b = _number(first), _number(last)
    if b < a or b - a >= _MAX_RANKS:
        raise SpecError(
            f"the range {part!r} in {text!r} must rise and hold fewer than {_MAX_RANKS} ranks."
        )
    return list(range(a, b + 1))


def _number(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise SpecError(f"the number {text[:20]}... has more than {_MAX_DIGITS} digits.")
    return int(text)


def _strided(dim: int, pieces: int) -> Placement:
    if pieces < 1:
        raise SpecError(f"a strided shard needs at least one piece, got {pieces}.")
    return StridedShard(dim, split_factor=pieces)
