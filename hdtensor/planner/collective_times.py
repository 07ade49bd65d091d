"""What collectives over one link take: bandwidth-optimal rings, and latency by steps."""

from __future__ import annotations

from hdtensor.planner.cluster import Link


def gather_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a ring's all-gather, or of its reduce-scatter.

    >>> gather_seconds(4e9, 4, Link(bandwidth=1e9, latency=0.0))
    3.0

    Args:
        num_bytes: Of the whole tensor.
        num_ranks: Members of the ring.
        link: The slowest link between neighbours.
    """
    if num_ranks < 2:
        return 0.0
    return (num_ranks - 1) * (num_bytes / num_ranks / link.bandwidth + link.latency)


def all_reduce_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a ring's all-reduce: a reduce-scatter and an all-gather.

    >>> all_reduce_seconds(4e9, 4, Link(bandwidth=1e9, latency=0.0))
    6.0
    """
    return 2 * gather_seconds(num_bytes, num_ranks, link)


def send_seconds(num_bytes: float, link: Link) -> float:
    """Return the seconds of a message."""
    return num_bytes / link.bandwidth + link.latency
