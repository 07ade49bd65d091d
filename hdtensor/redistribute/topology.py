"""``Topology``: which link joins two ranks, and how fast it is. Pure data, the same on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdtensor.errors import TopologyError
from hdtensor.plan.fields import shown
from hdtensor.redistribute import discovery
from hdtensor.redistribute.discovery import MAX_RANKS, node_sizes_to_nodes
from hdtensor.redistribute.topology_fields import (
    RankBandwidth,
    as_bandwidth,
    as_tuple,
    as_tuple_at,
    check_bandwidths,
    check_inside,
    check_links,
    check_nodes,
    check_num_ranks,
    refuse_constant,
)


#: Link classes of a cluster of nodes, fastest first.
FAST, SLOW = "nvlink", "ib"

#: The version of the JSON that this package writes, and the only one that it reads.
VERSION = 1

_MAX_BYTES = 64 << 20
_FIELDS = ("version", "nodes", "links", "bytes_per_s", "inside", "ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes of ranks, and the bandwidth of each class of links.

    The last class joins nodes; all classes before it join ranks of one node::

        nodes = (0, 0, 1, 1)        rank 0 === rank 1           ===  nvlink (class 0)
                                      :   :      :   :
        links = ("nvlink", "ib")    rank 2 === rank 3           :    ib     (class 1)

    >>> topology = Topology.of_nodes(2, 4)
    >>> topology.link(0, 1), topology.link(0, 2)
    (0, 1)

    Attributes:
        nodes: Node of each rank, numbered from 0 without gaps; empty for a topology that says
            nothing: all links are alike, for any rank.
        links: Names of the link classes, fastest first.
        bytes_per_s: Bandwidth of one rank's link of each class, one direction.
        inside: Per node, the class between its i-th and its j-th rank, in the order of ranks; empty
            if all are of the first class.
        ranks: Bandwidths of each rank; empty if all are those of the classes.
    """

    nodes: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    bytes_per_s: tuple[float, ...] = ()
    inside: tuple[tuple[tuple[int, ...], ...], ...] = ()
    ranks: tuple[RankBandwidth, ...] = ()
    _members: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _position: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.links and not self.bytes_per_s:
            names, rates = ((FAST, SLOW), (400e9, 50e9)) if self.nodes else (("any",), (10e9,))
            object.__setattr__(self, "links", names)
            object.__setattr__(self, "bytes_per_s", rates)
        check_nodes(self.nodes)
        check_links(self.links, self.bytes_per_s, bool(self.nodes))
        members: list[list[int]] = [[] for _ in range(max(self.nodes, default=-1) + 1)]
        position = []
        for rank, node in enumerate(self.nodes):
            position.append(len(members[node]))
            members[node].append(rank)
        object.__setattr__(self, "_members", tuple(map(tuple, members)))
        object.__setattr__(self, "_position", tuple(position))
        check_inside(self.inside, self._members, len(self.links) - 1)
        check_bandwidths(self.ranks, len(self.nodes))

    @classmethod
    def of_nodes(
        cls, ranks_per_node: int | Sequence[int], num_ranks: int | None = None, **fields: Any
    ) -> Topology:
        """Return nodes of consecutive ranks.

        Args:
            ranks_per_node: The same for all nodes (the last one may have fewer), or a number for
                each node.
            num_ranks: How many ranks there are; not needed where each node has its number.
            fields: Other fields of ``Topology``.

        Raises:
            TopologyError: If the numbers are none, or contradict one another.
        """
        if isinstance(ranks_per_node, int):
            if ranks_per_node < 1 or num_ranks is None or not 0 < num_ranks <= MAX_RANKS:
                raise TopologyError(
                    f"ranks_per_node, num_ranks: must be positive, with at most {MAX_RANKS} ranks, "
                    f"got {ranks_per_node} and {num_ranks}."
                )
            return cls(nodes=tuple(rank // ranks_per_node for rank in range(num_ranks)), **fields)
        if any(type(size) is not int or size < 1 for size in ranks_per_node):
            raise TopologyError(
                f"ranks_per_node: each node needs a positive number, got {list(ranks_per_node)}."
            )
        check_num_ranks("ranks_per_node", sum(ranks_per_node), num_ranks)
        return cls(nodes=node_sizes_to_nodes(ranks_per_node), **fields)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, num_ranks: int | None = None
    ) -> Topology:
        """Return the nodes that torchrun or SLURM describe, with usual bandwidths.

        >>> slurm = {"SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_NTASKS": "5"}
        >>> Topology.from_environment(slurm).nodes
        (0, 0, 1, 1, 2)

        Args:
            environ: Variables; default ``os.environ``.
            num_ranks: Size of the world, if it is known.

        Raises:
            TopologyError: If the environment says nothing about nodes, contradicts itself, or
                describes another number of ranks.
        """
        nodes = discovery.nodes_from_environment(os.environ if environ is None else environ)
        check_num_ranks("environment", len(nodes), num_ranks)
        return cls(nodes=nodes)

    @classmethod
    def from_nvidia_smi(
        cls, text: str, num_nodes: int = 1, *, network_bytes_per_s: float = 50e9
    ) -> Topology:
        """Return nodes whose ranks are joined as ``nvidia-smi topo -m`` prints it.

        Bandwidths are usual ones of each class (25 GB/s for each bonded NVLink); give measured ones
        by ``dataclasses.replace(topology, bytes_per_s=...)``.

        Args:
            text: What the command prints on one node; rank i of a node has GPU i.
            num_nodes: Number of such nodes.
            network_bytes_per_s: Bandwidth of one rank to other nodes, one direction.

        Raises:
            TopologyError: If the text has no matrix of GPUs, or a faulty one.
        """
        if type(num_nodes) is not int or not 1 <= num_nodes <= MAX_RANKS:
            raise TopologyError(f"num_nodes: must be 1 to {MAX_RANKS}, got {num_nodes!r}.")
        names, rates, matrix = discovery.parse_nvidia_smi(text)
        return cls(
            nodes=node_sizes_to_nodes([len(matrix)] * num_nodes),
            links=(*(names or ("none",)), "network"),
            bytes_per_s=(*(rates or (network_bytes_per_s,)), network_bytes_per_s),
            inside=(matrix,) * num_nodes if len(names) > 1 else (),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Topology:
        """Read a topology file.

        Raises:
            TopologyError: If it cannot be read, is no JSON or no topology.
        """
        try:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise TopologyError(
                f"cannot read the topology {str(path)!r}: {error.strerror}."
            ) from error
        if len(data) > _MAX_BYTES:
            raise TopologyError(f"the topology {str(path)!r} has more than {_MAX_BYTES} bytes.")
        try:
            value = json.loads(data, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise TopologyError(f"the topology {str(path)!r} is not JSON: {error}.") from None
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Topology:
        """Build a topology from parsed JSON, ``to_dict``'s result.

        Raises:
            TopologyError: If it is no topology; the message begins with the field.
        """
        if not isinstance(value, Mapping):
            raise TopologyError(f"topology: must be an object, got {shown(value)}.")
        unknown = [key for key in value if key not in _FIELDS]
        if unknown:
            raise TopologyError(
                f"{shown(unknown[0])}: no such field; allowed: {', '.join(_FIELDS)}."
            )
        version = value.get("version")
        if type(version) is not int or version != VERSION:
            raise TopologyError(
                f"version: {shown(version)} is unknown; this package reads version {VERSION}."
            )
        return cls(
            nodes=as_tuple_at("nodes", value),
            links=as_tuple_at("links", value),
            bytes_per_s=as_tuple_at("bytes_per_s", value),
            inside=tuple(
                tuple(as_tuple("inside", row) for row in as_tuple("inside", matrix))
                for matrix in as_tuple_at("inside", value)
            ),
            ranks=tuple(
                as_bandwidth(i, entry) for i, entry in enumerate(as_tuple_at("ranks", value))
            ),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the topology as a JSON file, ``load``'s inverse.

        Raises:
            OSError: If the file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return the topology as JSON values, ``from_dict``'s inverse."""
        out: dict[str, Any] = {
            "version": VERSION,
            "nodes": list(self.nodes),
            "links": list(self.links),
            "bytes_per_s": list(self.bytes_per_s),
        }
        if self.inside:
            out["inside"] = [[list(row) for row in matrix] for matrix in self.inside]
        if self.ranks:
            out["ranks"] = [entry._asdict() for entry in self.ranks]
        return out

    @property
    def network(self) -> int:
        """Class of the links between nodes."""
        return len(self.links) - 1

    def link(self, src: int, dst: int) -> int:
        """Return the class of the link between two ranks, an index into ``links``.

        Raises:
            TopologyError: If a rank is beyond ``nodes``.
        """
        nodes = self.nodes
        if not nodes:
            return 0
        try:
            if src < 0 or dst < 0:
                raise IndexError
            if nodes[src] != nodes[dst]:
                return len(self.links) - 1
        except IndexError:
            self.node(src), self.node(dst)
            raise
        if not self.inside:
            return 0
        return self.inside[nodes[src]][self._position[src]][self._position[dst]]

    def node(self, rank: int) -> int:
        """Return the node of a rank; where nothing is said of nodes, each rank is its own.

        Raises:
            TopologyError: If the rank is beyond ``nodes``.
        """
        if 0 <= rank < len(self.nodes):
            return self.nodes[rank]
        if not self.nodes and rank >= 0:
            return rank
        raise TopologyError(
            f"the topology describes ranks 0 to {len(self.nodes) - 1}, not {rank}. Describe every "
            f"rank that sends or receives."
        )

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's node, itself among them.

        Raises:
            TopologyError: If the rank is beyond ``nodes``.
        """
        node = self.node(rank)
        return self._members[node] if self.nodes else (rank,)

    def bandwidth(self, rank: int) -> RankBandwidth:
        """Return how fast a rank sends and receives.

        Raises:
            TopologyError: If the rank is beyond ``nodes``.
        """
        self.node(rank)
        if self.ranks:
            return self.ranks[rank]
        fast, slow = self.bytes_per_s[0], self.bytes_per_s[-1]
        return RankBandwidth(slow, slow, fast, fast)

    def seconds_per_byte(self, src: int, dst: int) -> tuple[float, float]:
        """Return how long one byte keeps the sender's and the receiver's side of a link busy."""
        link = self.link(src, dst)
        return self._seconds(src, link)[0], self._seconds(dst, link)[1]

    def makespan(
        self, sent: Mapping[tuple[int, int], int], received: Mapping[tuple[int, int], int]
    ) -> float:
        """Return the seconds of the busiest direction of a NIC, or of a rank's links inside its node.

        Everything is taken to overlap perfectly; links inside a node share the rank's bandwidth.

        Args:
            sent: (rank, class of links) -> bytes.
            received: (rank, class of links) -> bytes.
        """
        busy: dict[tuple[int, bool, int], float] = {}
        for direction, counts in enumerate((sent, received)):
            for (rank, link), num_bytes in counts.items():
                key = (rank, link == self.network, direction)
                seconds = num_bytes * self._seconds(rank, link)[direction]
                busy[key] = busy.get(key, 0.0) + seconds
        return max(busy.values(), default=0.0)

    def _seconds(self, rank: int, link: int) -> tuple[float, float]:
        """Return how long a byte takes out of a rank and into it, over a class of links."""
        rates = self.bandwidth(rank)
        if link == self.network:
            return 1 / rates.nic_out, 1 / rates.nic_in
        slower = self.bytes_per_s[0] / self.bytes_per_s[link]
        return slower / rates.fast_out, slower / rates.fast_in


UNIFORM = Topology()


#: What eager redistributes choose senders by, and whether one has asked for it.
_in_use: list[Topology] = [UNIFORM]
_is_asked = [False]


def use_topology(topology: Topology) -> None:
    """Have ``HDTensor.redistribute`` choose senders by these links, from now on in this process.

    Every rank calls it with the same topology, before the first redistribute: plans are kept, and ranks
    that chose by unlike links would wait for one another.

    Raises:
        TopologyError: If it is no topology, or a redistribute was planned already.
    """
    if not isinstance(topology, Topology):
        raise TopologyError(f"topology: must be a Topology, got {shown(topology)}.")
    if _is_asked[0] and topology != _in_use[0]:
        raise TopologyError(
            "use_topology: redistributes were planned with another topology. Call it once, right after "
            "init_process_group, on every rank."
        )
    _in_use[0] = topology


def topology_in_use() -> Topology:
    """Return what ``use_topology`` set, and keep it."""
    _is_asked[0] = True
    return _in_use[0]
