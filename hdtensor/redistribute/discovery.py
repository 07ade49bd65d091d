"""Reads what launchers and drivers say about nodes and links, into plain tuples for ``Topology``.

Texts come from outside: whatever does not fit gives a ``TopologyError`` that names the variable or line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hdtensor.errors import TopologyError


MAX_RANKS = 1 << 20

#: What the cells of ``nvidia-smi topo -m`` mean, and a usual bandwidth in bytes per second and
#: direction; ``NV#`` is a bonded set of # NVLinks, of 25 GB/s each.
PCIE_BYTES_PER_S = {"PIX": 25e9, "PXB": 25e9, "PHB": 20e9, "NODE": 16e9, "SYS": 10e9}
NVLINK_BYTES_PER_S = 25e9

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_COUNT = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?")
_ALLOWED_CELLS = f"X, NV#, {', '.join(PCIE_BYTES_PER_S)}"


class Links(NamedTuple):
    """The links inside a node.

    Attributes:
        names: Classes of links, fastest first.
        bytes_per_s: Bandwidth of each class, one direction.
        matrix: ``matrix[i][j]`` is the class between GPU i and GPU j; 0 on the diagonal.
    """

    names: tuple[str, ...]
    bytes_per_s: tuple[float, ...]
    matrix: tuple[tuple[int, ...], ...]


def node_sizes_to_nodes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the node of each rank, for nodes of consecutive ranks.

    >>> node_sizes_to_nodes([2, 1])
    (0, 0, 1)
    """
    return tuple(node for node, size in enumerate(sizes) for _ in range(size))


def nodes_from_environment(environ: Mapping[str, str], *, most: int = MAX_RANKS) -> tuple[int, ...]:
    """Return the node of each rank, as torchrun or SLURM describe it.

    Args:
        environ: The environment's variables. torchrun's win over SLURM's, whose tasks are its
            agents where both are set.
        most: Ranks that SLURM may describe.

    Raises:
        TopologyError: If there are neither, they contradict one another, or there are more ranks.
    """
    if "LOCAL_WORLD_SIZE" in environ:
        return _torchrun_nodes(environ)
    for prefix, total in (("SLURM_STEP", "SLURM_STEP_NUM_TASKS"), ("SLURM", "SLURM_NTASKS")):
        if f"{prefix}_TASKS_PER_NODE" in environ:
            return _slurm_nodes(environ, f"{prefix}_TASKS_PER_NODE", total, most)
    raise TopologyError(
        "the environment says nothing about nodes: neither LOCAL_WORLD_SIZE and WORLD_SIZE "
        "(torchrun) nor SLURM_TASKS_PER_NODE (srun) is set. Start the ranks by one of them, or "
        "describe the nodes by Topology.of_nodes or a file (Topology.load)."
    )


def expand_counts(name: str, text: str, most: int = MAX_RANKS) -> tuple[int, ...]:
    """Return SLURM's compressed list of counts as numbers.

    >>> expand_counts("SLURM_TASKS_PER_NODE", "8(x2),4")
    (8, 8, 4)

    Args:
        name: The variable, for errors.
        text: Its value.
        most: Ranks that there may be; more are refused before any list is made.

    Raises:
        TopologyError: On any other syntax, or more ranks.
    """
    counts: list[int] = []
    total = 0
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise TopologyError(
                f"{name}: {part.strip()!r} in {text!r} is no count; allowed: 8 or 8(x2), "
                f"separated by commas."
            )
        count, times = int(match[1]), int(match[2] or 1)
        total += count * times
        if total > most or len(counts) + times > most:
            raise TopologyError(f"{name}: {text[:60]!r} is more than {most} ranks.")
        if not count or not times:
            raise TopologyError(f"{name}: {part.strip()!r} in {text!r} is no rank at all.")
        counts += [count] * times
    return tuple(counts)


def count_hosts(name: str, text: str) -> int:
    """Return how many hosts a SLURM node list names.

    >>> count_hosts("SLURM_JOB_NODELIST", "gpu[01-03,07],login")
    5

    Raises:
        TopologyError: If it is no node list.
    """
    hosts = re.findall(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)", text)
    if not text.strip() or ",".join(hosts) != text:
        raise TopologyError(f"{name}: {text!r} is no node list; allowed: gpu[01-03,07],login.")
    num_hosts = 0
    for host in hosts:
        product = 1
        for ranges in re.findall(r"\[([^\]]*)\]", host):
            product *= sum(_range_size(name, text, part) for part in ranges.split(","))
        num_hosts += product
    return num_hosts


def parse_nvidia_smi(text: str) -> Links:
    """Read the matrix that ``nvidia-smi topo -m`` prints.

    Args:
        text: Its output, with or without colours; columns of NICs and affinities are skipped.

    Raises:
        TopologyError: If there is no matrix of GPUs, or one that is cut off or contradicts itself.
    """
    lines = [_ANSI.sub("", line).split() for line in text.splitlines()]
    header = next(
        (i for i, line in enumerate(lines) if line[:1] == ["GPU0"] and "X" not in line), None
    )
    if header is None:
        raise TopologyError(
            "there is no line of column names that begins with GPU0; pass what "
            "`nvidia-smi topo -m` prints, whole."
        )
    num_gpus = sum(re.fullmatch(r"GPU\d+", word) is not None for word in lines[header])
    rows = lines[header + 1 : header + 1 + num_gpus]
    for i in range(num_gpus):
        found = rows[i][:1] if i < len(rows) else []
        if found != [f"GPU{i}"] or len(rows[i]) <= num_gpus:
            raise TopologyError(
                f"the row of GPU{i} is missing or has fewer than {num_gpus} cells; pass what "
                f"`nvidia-smi topo -m` prints, whole."
            )
    cells = [row[1 : num_gpus + 1] for row in rows]
    _check_cells(cells)
    names = sorted({c for row in cells for c in row if c != "X"}, key=_slowness)
    matrix = tuple(tuple(0 if c == "X" else names.index(c) for c in row) for row in cells)
    return Links(tuple(names), tuple(cell_bytes_per_s(name) for name in names), matrix)


def cell_bytes_per_s(cell: str) -> float:
    """Return the usual bandwidth of a class of links, one direction.

    >>> cell_bytes_per_s("NV18") / 1e9
    450.0
    """
    if cell.startswith("NV"):
        return int(cell[2:]) * NVLINK_BYTES_PER_S
    return PCIE_BYTES_PER_S[cell]


def _slowness(cell: str) -> tuple[float, int]:
    order = 0 if cell.startswith("NV") else 1 + list(PCIE_BYTES_PER_S).index(cell)
    return (0 if order else -int(cell[2:]), order)


def _check_cells(cells: Sequence[Sequence[str]]) -> None:
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            known = cell == "X" or cell in PCIE_BYTES_PER_S or re.fullmatch(r"NV[1-9]\d?", cell)
            if not known or (cell == "X") != (i == j):
                raise TopologyError(
                    f"the link between GPU{i} and GPU{j} is {cell[:20]!r}; allowed: "
                    f"{_ALLOWED_CELLS}, with X on the diagonal and only there."
                )
            if cell != cells[j][i]:
                raise TopologyError(
                    f"the link from GPU{i} to GPU{j} is {cell}, but that from GPU{j} to GPU{i} is "
                    f"{cells[j][i][:20]!r}; both directions must agree."
                )


def _torchrun_nodes(environ: Mapping[str, str]) -> tuple[int, ...]:
    local = _integer(environ, "LOCAL_WORLD_SIZE", least=1)
    world = _integer(environ, "WORLD_SIZE", least=1)
    num_nodes = world // local
    if "GROUP_WORLD_SIZE" in environ:
        num_nodes = _integer(environ, "GROUP_WORLD_SIZE", least=1)
    unequal = num_nodes * local != world
    if {"RANK", "LOCAL_RANK", "GROUP_RANK"} <= environ.keys():
        rank, local_rank, node = (
            _integer(environ, name) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")
        )
        unequal |= rank != node * local + local_rank
    if unequal:
        raise TopologyError(
            f"WORLD_SIZE: {world} ranks on {num_nodes} nodes, {local} of them here "
            f"(LOCAL_WORLD_SIZE): the nodes are unequal or their ranks not consecutive, which one "
            f"process cannot know. Describe them by a file (Topology.load) or "
            f"Topology.of_nodes([...])."
        )
    return node_sizes_to_nodes([local] * num_nodes)


def _slurm_nodes(environ: Mapping[str, str], name: str, total: str, most: int) -> tuple[int, ...]:
    sizes = expand_counts(name, environ[name], most)
    if total in environ and sum(sizes) != _integer(environ, total):
        raise TopologyError(
            f"{name}: {environ[name]!r} is {sum(sizes)} ranks, but {total} is {environ[total]}."
        )
    hosts = name.replace("TASKS_PER_NODE", "NODELIST").replace("SLURM_NODE", "SLURM_JOB_NODE")
    if hosts in environ and count_hosts(hosts, environ[hosts]) != len(sizes):
        raise TopologyError(
            f"{name}: {environ[name]!r} is {len(sizes)} nodes, but {hosts} is {environ[hosts]!r}."
        )
    order = re.split(r"[:,]", environ.get("SLURM_DISTRIBUTION", "block"))[0].lower()
    if order == "block":
        return node_sizes_to_nodes(sizes)
    if order == "cyclic":
        turns = ((turn, node) for node, size in enumerate(sizes) for turn in range(size))
        return tuple(node for _, node in sorted(turns))
    raise TopologyError(
        f"SLURM_DISTRIBUTION: {order!r} does not say which ranks share a node; allowed: block, "
        f"cyclic. Describe the nodes by a file (Topology.load)."
    )


def _integer(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"\d{1,7}", text) or not least <= int(text) <= MAX_RANKS:
        raise TopologyError(
            f"{name}: must be an integer from {least} to {MAX_RANKS}, got {text[:40]!r}."
        )
    return int(text)


def _range_size(name: str, text: str, part: str) -> int:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise TopologyError(f"{name}: the range {part!r} in {text!r} is none; allowed: 01-03 or 7.")
    return int(match[2] or match[1]) - int(match[1]) + 1
