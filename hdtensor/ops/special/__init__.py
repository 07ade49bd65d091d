"""The operators that need more than a sharding rule; importing this package registers them."""

from hdtensor.ops.special import (
    attention,
    batch_norm,
    draws,
    embedding,
    fills,
    indexing,
    inplace_views,
    joins,
    means,
    move,
    norms,
    optimizers,
    random,
    reductions,
    rows,
    scalars,
    scatters,
    solvers,
)


__all__ = [
    "attention",
    "batch_norm",
    "draws",
    "embedding",
    "fills",
    "indexing",
    "inplace_views",
    "joins",
    "means",
    "move",
    "norms",
    "optimizers",
    "random",
    "reductions",
    "rows",
    "scalars",
    "scatters",
    "solvers",
]
