"""Linear solvers: batch dims may be cut, aligned as they broadcast.

DTensor cuts dim d of every operand, also where the matrix has a batch and the right-hand side has none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.ops.propagate import operands, row_rule


aten = torch.ops.aten

Row = tuple[Placement, ...]


class _Solver(NamedTuple):
    """Who is who.

    Attributes:
        outs: For each result whether it has the solution's batch (``x``) or the matrix's (``a``).
        ins: Likewise for each operand: the right-hand side (``b``) or a part of the matrix (``a``).
    """

    outs: str
    ins: str


_SOLVERS = {
    aten._linalg_solve_ex.default: _Solver("xaaa", "ab"),
    aten.cholesky_solve.default: _Solver("x", "ba"),
    aten.linalg_ldl_solve.default: _Solver("x", "aab"),
    aten.linalg_lu_solve.default: _Solver("x", "aab"),
    aten.linalg_solve_triangular.default: _Solver("x", "ab"),
    aten.triangular_solve.default: _Solver("xx", "ba"),
}


def _solve(solver: _Solver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    specs = [s for _, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]
    matrix = specs[solver.ins.index("a")].shape
    right = specs[solver.ins.index("b")].shape
    batches = {
        "a": tuple(matrix[:-2]),
        "b": tuple(right[: -1 if _is_vector(matrix, right) else -2]),
    }
    batches["x"] = tuple(torch.broadcast_shapes(*batches.values()))
    rows: list[Row] = [(Replicate(),) * (len(solver.outs) + len(solver.ins))]
    if solver.outs.count("x") == 1:  # the solution alone is linear in the right-hand side
        kinds = solver.outs + solver.ins
        rows.append(tuple(Partial() if k in "xb" else Replicate() for k in kinds))
    for from_end in range(-len(batches["x"]), 0):
        length = batches["x"][from_end]
        rows.append(tuple(_aligned(batches[k], from_end, length) for k in solver.outs + solver.ins))
    return rows


def _is_vector(matrix: Sequence[int], right: Sequence[int]) -> bool:
    """As ``torch.linalg.solve`` tells a batch of vectors from a matrix."""
    return len(right) == 1 or (len(right) == len(matrix) - 1 and tuple(right) == tuple(matrix[:-1]))


def _aligned(batch: Sequence[int], from_end: int, length: int) -> Placement:
    has = len(batch) >= -from_end and batch[from_end] == length
    return Shard(len(batch) + from_end) if has else Replicate()


for _op, _solver in _SOLVERS.items():
    row_rule(_op)(functools.partial(_solve, _solver))
