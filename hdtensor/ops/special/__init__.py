"""The operators that need more than a sharding rule; importing this package registers them."""

from hdtensor.ops.special import attention, embedding, joins, means, move, norms, random, scalars


__all__ = ["attention", "embedding", "joins", "means", "move", "norms", "random", "scalars"]
