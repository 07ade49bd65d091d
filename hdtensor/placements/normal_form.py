"""``normalized``: a spec whose bottom dims are counted from the front."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import Shard

from hdtensor.errors import SpecError
from hdtensor.placements import checks
from hdtensor.placements.layout import normalize_dim
from hdtensor.placements.spec import HDSpec


@functools.lru_cache(maxsize=4096)
def normalized(spec: HDSpec, num_dims: int) -> HDSpec:
    """Return the spec with non-negative bottom dims.

    Raises:
        SpecError: If it names a dim that a tensor of ``num_dims`` dims does not have.
    """
    top_dim = checks.shard_dim(spec.top)
    if top_dim is not None and top_dim >= num_dims:
        raise SpecError(
            f"the top {checks.placement_text(spec.top)} of {spec} needs dim {top_dim}, but the "
            f"tensor has {num_dims} dims."
        )
    changed = False
    groups = []
    for group in spec.subgroups:
        placements = []
        for placement in group.placements:
            dim = normalize_dim(placement, num_dims)
            if dim is not None and dim != placement.dim:  # type: ignore[attr-defined]
                placement = _at_dim(placement, dim)
                changed = True
            placements.append(placement)
        groups.append(group.with_placements(placements))
    return spec.replace(subgroups=tuple(groups)) if changed else spec


def _at_dim(placement: Any, dim: int) -> Any:
    if checks.is_strided(placement):
        return type(placement)(dim, split_factor=placement.split_factor)
    return Shard(dim)
