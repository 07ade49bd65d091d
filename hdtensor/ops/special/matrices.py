"""Linear algebra on batches of matrices: the dims before the last two are independent problems.

DTensor gathers the batch for all of these. The solvers, whose operands' batches broadcast, are in ``solvers``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.collectives import observe
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.propagate import operands, row_rule
from hdtensor.ops.registry import call, special, wrap
from hdtensor.ops.special.means import reduced
from hdtensor.placements import checks
from hdtensor.placements.layout import owned_boxes


aten = torch.ops.aten

Row = tuple[Placement, ...]

#: Operator: number of results. All operands and results have the batch dims of the first operand.
_BATCHED = {
    aten._linalg_det.default: 3,
    aten._linalg_eigh.default: 2,
    aten._linalg_eigvals.default: 1,
    aten._linalg_slogdet.default: 4,
    aten._linalg_svd.default: 3,
    aten.cholesky_inverse.default: 1,
    aten.geqrf.default: 2,
    aten.linalg_cholesky_ex.default: 2,
    aten.linalg_eig.default: 2,
    aten.linalg_householder_product.default: 1,
    aten.linalg_inv_ex.default: 2,
    aten.linalg_ldl_factor_ex.default: 3,
    aten.linalg_lu.default: 3,
    aten.linalg_lu_factor_ex.default: 3,
    aten.linalg_matrix_exp.default: 1,
    aten.linalg_qr.default: 2,
    aten.lu_unpack.default: 3,
    aten.ormqr.default: 1,
}
#: The same of operators that not every torch has: the first is gone in 2.14, the others are new there.
_BATCHED_SOMEWHERE = {"cholesky": 1, "linalg_matrix_sqrth": 1, "linalg_polar": 2}
_BATCHED.update(
    (getattr(aten, name).default, num)
    for name, num in _BATCHED_SOMEWHERE.items()
    if hasattr(aten, name)
)


def _batched(num_outs: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    specs = [s for _, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]
    batch = range(max(len(specs[0].shape) - 2, 0))
    everywhere = [Replicate(), *map(Shard, batch)]
    return [(placement,) * (num_outs + len(specs)) for placement in everywhere]


for _op, _num_outs in _BATCHED.items():
    row_rule(_op)(functools.partial(_batched, _num_outs))


@row_rule(aten.diag_embed.default)
def _diag_embed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    """Every dim but the last, which becomes the diagonal, stays where the two new dims leave it."""
    num_dims = len(args[0].shape) + 1
    new = [
        args[i] if len(args) > i else kwargs.get(name, default)
        for i, name, default in ((2, "dim1", -2), (3, "dim2", -1))
    ]
    kept = [d for d in range(num_dims) if d not in [dim % num_dims for dim in new]]
    return [
        (Replicate(), Replicate()),
        (Partial(), Partial()),
        *((Shard(out), Shard(own)) for own, out in enumerate(kept)),
    ]


@special(aten.tril.default, aten.triu.default)
def _triangle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every rank keeps its part of the triangle, also of cut rows and columns: the diagonal is counted from its own corner."""
    bound = args[0]._spec
    tiers = (bound.spec.top, *(p for g in bound.spec.subgroups for p in g.placements))
    if any(map(checks.is_strided, tiers)):
        return None
    like = BoundSpec.of(bound.spec, bound.shape, _contiguous(bound), bound.dtype, bound.top_sizes)
    ends = [len(bound.shape) - 2, len(bound.shape) - 1]
    shift = _corner(bound) if any(checks.shard_dim(p) in ends for p in tiers) else 0

    def run(x: Any, *rest: Any) -> Any:
        *given, kw = rest
        diagonal = given[0] if given else (kw or {}).get("diagonal", 0)
        if bound.index is None:
            return wrap(x._local_tensor, like)
        return wrap(func(x._local_tensor, diagonal + shift), like)

    return run


def _corner(bound: BoundSpec) -> int:
    """Return how far below the diagonal this rank's corner is; the operator takes a number, so that sizes are fixed by it."""
    sizes = None if bound.top_sizes is None else tuple(map(int, bound.top_sizes))
    owned = owned_boxes(bound.spec, tuple(map(int, bound.shape)), sizes, bound.rank)
    return owned[0].box.start[-2] - owned[0].box.start[-1] if owned else 0


def _contiguous(bound: BoundSpec) -> tuple[int, ...]:
    return torch.empty(bound.shape, device="meta").stride()


@special(aten._linalg_check_errors.default)
def _check_errors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise on all ranks that take part if one of them holds a matrix that cannot be worked on.

    Without this agreement the others would wait for it in their next collective.
    """
    bound = args[0]._spec
    tiers = (bound.spec.top, *(p for g in bound.spec.subgroups for p in g.placements))
    if not any(map(checks.is_cut, tiers)):
        return None

    def run(info: Any, *rest: Any) -> None:
        *given, kw = rest
        bad = call(aten.sum.default, call(aten.ne.Scalar, info, 0), dtype=torch.int64)
        with observe.because(f"{func} (errors in the batch)"):
            bad = reduced(bad)
        if bound.index is None:
            return
        func(info._local_tensor, *given, **(kw or {}))
        if bad._local_tensor.item():
            raise torch.linalg.LinAlgError(
                f"{given[0]}: {bad._local_tensor.item()} matrices of the batch on other ranks cannot be worked on."
            )

    return run
