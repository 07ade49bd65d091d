"""Specs as JSON values: plain dictionaries of strings and integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.distributed.tensor.placement_types import Placement

from hdtensor.errors import SpecError
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.placements.text import parse_placement, parse_spec


_Built = TypeVar("_Built")

_SPEC_KEYS = {"top", "top_ratio", "subgroups"}
_GROUP_KEYS = {"ranks", "mesh_shape", "placements"}


def spec_to_json(spec: HDSpec) -> dict[str, Any]:
    """Return a JSON-ready dictionary.

    >>> spec_to_json(HDSpec.from_text("S0[3:1] / 0,1:S1 2:R"))["top_ratio"]
    [3, 1]

    Raises:
        SpecError: If the spec holds an operator's pending norm.
    """
    for placement in (spec.top, *(p for g in spec.subgroups for p in g.placements)):
        if hasattr(placement, "norm_type"):
            raise SpecError(
                f"{spec} holds a norm that is not reduced yet, which only lives between operators. "
                f"Redistribute the tensor to Replicate() or Shard(d) before its spec is saved."
            )
    out: dict[str, Any] = {"top": checks.placement_text(spec.top)}
    if spec.top_ratio is not None:
        out["top_ratio"] = list(spec.top_ratio)
    out["subgroups"] = [
        {
            "ranks": list(group.ranks),
            "mesh_shape": list(group.mesh_shape),
            "placements": [checks.placement_text(p) for p in group.placements],
        }
        for group in spec.subgroups
    ]
    return out


def spec_from_json(value: Any, where: str = "spec") -> HDSpec:
    """Return the spec of a dictionary (``spec_to_json``'s inverse) or of a short text.

    Args:
        value: Parsed JSON.
        where: Name of the field, for messages.

    Raises:
        SpecError: On unknown or missing keys, wrong types, or a spec that is not one.
    """
    if isinstance(value, str):
        return _named(where, lambda: parse_spec(value))
    _check_keys(value, _SPEC_KEYS, {"top", "subgroups"}, where)
    groups = value["subgroups"]
    if not isinstance(groups, list):
        raise SpecError(f"{where}.subgroups must be a list, got {type(groups).__name__}.")
    subgroups = [_group(group, f"{where}.subgroups[{i}]") for i, group in enumerate(groups)]
    top = _placement(value["top"], f"{where}.top")
    return _named(where, lambda: HDSpec(subgroups, top, value.get("top_ratio")))


def _group(value: Any, where: str) -> Subgroup:
    _check_keys(value, _GROUP_KEYS, {"ranks", "placements"}, where)
    if not isinstance(value["placements"], list):
        raise SpecError(f"{where}.placements must be a list, got {value['placements']!r}.")
    placements = [
        _placement(p, f"{where}.placements[{i}]") for i, p in enumerate(value["placements"])
    ]
    return _named(where, lambda: Subgroup(value["ranks"], placements, value.get("mesh_shape")))


def _placement(value: Any, where: str) -> Placement:
    if not isinstance(value, str):
        raise SpecError(f"{where} must be a text such as 'S0', got {value!r}.")
    return _named(where, lambda: parse_placement(value))


def _check_keys(value: Any, allowed: set[str], needed: set[str], where: str) -> None:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be an object or a text, got {type(value).__name__}.")
    unknown, missing = set(value) - allowed, needed - set(value)
    if unknown:
        raise SpecError(f"{where} has unknown keys {sorted(unknown)}; allowed: {sorted(allowed)}.")
    if missing:
        raise SpecError(f"{where} lacks {sorted(missing)}.")


def _named(where: str, build: Callable[[], _Built]) -> _Built:
    try:
        return build()
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
