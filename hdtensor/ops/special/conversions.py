"""Conversions inside subgroups that special rules make, as visible to torch's ``ExplicitRedistributionContext`` as all."""

from __future__ import annotations

from typing import Any

from hdtensor._torch_compat import observe_conversion
from hdtensor.ops.special.move import move
from hdtensor.placements.spec import HDSpec


def convert_inside(func: Any, x: Any, spec: HDSpec) -> Any:
    """Return ``x`` with other bottom placements, for an operator that implies them.

    Raises:
        RuntimeError: On every rank, if a context forbids implicit conversions.
    """
    bound = x._spec
    for index, (old, new) in enumerate(zip(bound.spec.subgroups, spec.subgroups, strict=True)):
        if old.placements != new.placements:
            src = bound.sub(index)
            dst = type(src)(src.mesh, new.placements, src.tensor_meta)
            observe_conversion(
                src, dst, lambda: f"{func}: implicit redistribution: {bound} -> {spec}"
            )
    return move(x, spec, bound.top_sizes)
