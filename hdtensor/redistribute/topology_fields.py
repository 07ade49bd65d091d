"""The fields of a ``Topology``: a rank's bandwidths, and the checks of what comes from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from hdtensor.errors import TopologyError
from hdtensor.plan.fields import shown
from hdtensor.redistribute.discovery import MAX_RANKS


#: Largest bandwidth, in bytes per second; it only keeps arithmetic finite.
_MAX_RATE = 1e100


class RankBandwidth(NamedTuple):
    """How fast one rank is, in bytes per second.

    Attributes:
        nic_out: To other nodes.
        nic_in: From other nodes.
        fast_out: To ranks of its node, over links of the first class; over a slower class inside the
            node it is less in proportion.
        fast_in: From ranks of its node, likewise.
    """

    nic_out: float
    nic_in: float
    fast_out: float
    fast_in: float


def check_nodes(nodes: object) -> None:
    """Raise unless each rank has a node, numbered without gaps.

    Raises:
        TopologyError: The message begins with the field.
    """
    if not isinstance(nodes, tuple) or len(nodes) > MAX_RANKS:
        raise TopologyError(f"nodes: must be a tuple of at most {MAX_RANKS}, got {shown(nodes)}.")
    for rank, node in enumerate(nodes):
        if type(node) is not int or not 0 <= node < len(nodes):
            raise TopologyError(
                f"nodes[{rank}]: must be an integer from 0 to {len(nodes) - 1}, got {shown(node)}."
            )
    missing = sorted(set(range(max(nodes, default=-1))) - set(nodes))
    if missing:
        raise TopologyError(
            f"nodes: no rank is on node {missing[0]}; number the nodes from 0 without gaps."
        )


def check_links(links: object, rates: object, has_nodes: bool) -> None:
    """Raise unless each class of links has a name and a bandwidth.

    Raises:
        TopologyError: The message begins with the field.
    """
    if not isinstance(links, tuple) or not all(isinstance(name, str) and name for name in links):
        raise TopologyError(f"links: must be a tuple of names, got {shown(links)}.")
    if len(set(links)) != len(links):
        raise TopologyError(f"links: each name once, got {shown(links)}.")
    if has_nodes and len(links) < 2:
        raise TopologyError(
            f"links: nodes need a class inside them and one between them, got {shown(links)}."
        )
    if not has_nodes and len(links) != 1:
        raise TopologyError(
            f"links: without nodes all links are alike, of one class; got {shown(links)}. Say the "
            f"node of each rank in nodes."
        )
    if not isinstance(rates, tuple) or len(rates) != len(links):
        raise TopologyError(f"bytes_per_s: must be {len(links)} numbers, got {shown(rates)}.")
    for i, rate in enumerate(rates):
        _check_rate(f"bytes_per_s[{i}]", rate)


def check_inside(inside: object, members: Sequence[Sequence[int]], num_inside: int) -> None:
    """Raise unless each node has a matrix of its size.

    Raises:
        TopologyError: The message begins with the field.
    """
    if inside == ():
        return
    if not isinstance(inside, tuple) or len(inside) != len(members):
        raise TopologyError(
            f"inside: must be one matrix for each of {len(members)} nodes, got {shown(inside)}."
        )
    for node, (matrix, ranks) in enumerate(zip(inside, members, strict=True)):
        if not isinstance(matrix, tuple) or [
            len(row) if isinstance(row, tuple) else None for row in matrix
        ] != [len(ranks)] * len(ranks):
            raise TopologyError(
                f"inside[{node}]: must be {len(ranks)} x {len(ranks)}, as the node's ranks."
            )
        for i, row in enumerate(matrix):
            for j, link in enumerate(row):
                if type(link) is not int or not 0 <= link < num_inside:
                    raise TopologyError(
                        f"inside[{node}][{i}][{j}]: must be a class from 0 to {num_inside - 1} (the "
                        f"last of links joins nodes), got {shown(link)}."
                    )


def check_bandwidths(ranks: object, num_ranks: int) -> None:
    """Raise unless each rank has four positive bandwidths.

    Raises:
        TopologyError: The message begins with the field.
    """
    if ranks == ():
        return
    if not isinstance(ranks, tuple) or len(ranks) != num_ranks:
        raise TopologyError(
            f"ranks: must be one entry for each of {num_ranks}, got {shown(ranks)}."
        )
    for rank, entry in enumerate(ranks):
        if not isinstance(entry, RankBandwidth):
            raise TopologyError(f"ranks[{rank}]: must be a RankBandwidth, got {shown(entry)}.")
        for name, rate in entry._asdict().items():
            _check_rate(f"ranks[{rank}].{name}", rate)


def _check_rate(path: str, rate: object) -> None:
    if type(rate) not in (int, float) or not (0 < rate <= _MAX_RATE):  # type: ignore[operator]
        raise TopologyError(f"{path}: must be a positive number of bytes/s, got {shown(rate)}.")


def check_num_ranks(path: str, found: int, wanted: int | None) -> None:
    """Raise if the number of ranks is not the wanted one.

    Raises:
        TopologyError: The message begins with the field.
    """
    if wanted is not None and found != wanted:
        raise TopologyError(f"{path}: describes {found} ranks, but the world has {wanted}.")


def as_bandwidth(index: int, entry: object) -> RankBandwidth:
    """Return an entry of the JSON's ``ranks``.

    Raises:
        TopologyError: The message begins with the field.
    """
    if not isinstance(entry, Mapping) or set(entry) != set(RankBandwidth._fields):
        raise TopologyError(
            f"ranks[{index}]: must be an object of {', '.join(RankBandwidth._fields)}, got "
            f"{shown(entry)}."
        )
    return RankBandwidth(**entry)


def as_tuple_at(path: str, value: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the list in a field of the JSON; empty if it is absent.

    Raises:
        TopologyError: The message begins with the field.
    """
    return as_tuple(path, value.get(path, []))


def as_tuple(path: str, value: object) -> tuple[Any, ...]:
    """Return a list of the JSON as a tuple.

    Raises:
        TopologyError: The message begins with the field.
    """
    if not isinstance(value, list | tuple):
        raise TopologyError(f"{path}: must be a list, got {shown(value)}.")
    return tuple(value)


def refuse_constant(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which are no JSON.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{text} is no number of JSON")
