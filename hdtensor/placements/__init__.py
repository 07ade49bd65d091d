"""How tensors are cut: boxes, subgroups, specs, and who owns what. Pure; no process groups."""

from hdtensor.placements.box import Box, cells
from hdtensor.placements.codec import spec_from_json, spec_to_json
from hdtensor.placements.layout import (
    OwnedBox,
    block_box,
    block_boxes,
    block_shape,
    check_top_sizes,
    chunk_sizes,
    default_top_sizes,
    local_shape,
    owned_boxes,
    owners,
    ratio_sizes,
)
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.placements.text import parse_placement, parse_spec


__all__ = [
    "Box",
    "HDSpec",
    "OwnedBox",
    "Subgroup",
    "block_box",
    "block_boxes",
    "block_shape",
    "cells",
    "check_top_sizes",
    "chunk_sizes",
    "default_top_sizes",
    "local_shape",
    "owned_boxes",
    "owners",
    "parse_placement",
    "parse_spec",
    "ratio_sizes",
    "spec_from_json",
    "spec_to_json",
]
