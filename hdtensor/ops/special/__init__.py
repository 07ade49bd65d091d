"""The operators that need more than a sharding rule; importing this package registers them."""

from hdtensor.ops.special import (
    attention,
    embedding,
    fills,
    indexing,
    inplace_views,
    joins,
    means,
    move,
    norms,
    random,
    rows,
    scalars,
)


__all__ = [
    "attention",
    "embedding",
    "fills",
    "indexing",
    "inplace_views",
    "joins",
    "means",
    "move",
    "norms",
    "random",
    "rows",
    "scalars",
]
