"""Clusters that a machine itself tells: ``nvidia-smi topo -m``, SLURM's variables, the devices at hand."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping

import torch

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.cluster_text import (
    INSIDE_LATENCY,
    MAX_RANKS,
    make_cluster,
    usual_inside,
    usual_uplink,
)
from hdtensor.planner.library import DEVICES, find_device, recognize_device
from hdtensor.planner.quantities import planner_errors, whole_number
from hdtensor.redistribute.discovery import (
    count_hosts,
    expand_counts,
    nodes_from_environment,
    parse_nvidia_smi,
)


def cluster_of_topo(text: str, device: str | None, num_nodes: int = 1) -> Cluster:
    """Return nodes whose devices are joined as ``nvidia-smi topo -m`` prints it.

    Where links are unlike, the link inside a node is the slowest, which a ring over all devices has to use.

    Args:
        text: What the command prints on one node.
        device: The kind of the devices, which the command does not print.
        num_nodes: How many such nodes there are.

    Raises:
        PlannerError: If the text has no matrix, or the device is missing or unknown.
    """
    with planner_errors("cluster"):
        links = parse_nvidia_smi(text)
    if device is None:
        raise PlannerError(
            "device: `nvidia-smi topo -m` prints links but no kind of device; give one, such as H800."
        )
    kind = find_device(device)
    whole_number("nodes", num_nodes, 1, MAX_RANKS // len(links.matrix))
    inside = usual_inside(kind)
    if links.bytes_per_s:
        inside = Link(min(links.bytes_per_s), INSIDE_LATENCY)
    node = Node(
        device=kind, num_devices=len(links.matrix), inside=inside, uplink=usual_uplink(kind)
    )
    return make_cluster((node,) * num_nodes)


def cluster_of_slurm(
    environ: Mapping[str, str] | None = None, device: str | None = None
) -> Cluster:
    """Return the nodes of a SLURM job.

    Where SLURM says the devices of a node (``SLURM_GPUS_PER_NODE``, ``SLURM_GPUS_ON_NODE``), each is a rank;
    else each task is one.

    >>> slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "h100:8"}
    >>> cluster_of_slurm(slurm).num_ranks
    16

    Args:
        environ: The variables; default ``os.environ``.
        device: The kind of the devices; default what SLURM calls them.

    Raises:
        PlannerError: If there is no job, its variables contradict one another, or nothing says the kind.
    """
    environ = os.environ if environ is None else environ
    kind, num_devices = _slurm_devices(environ)
    if num_devices is not None:
        sizes = [num_devices] * min(_slurm_nodes(environ), 1 + MAX_RANKS // num_devices)
    else:
        with planner_errors():
            nodes = nodes_from_environment(
                {key: value for key, value in environ.items() if key.startswith("SLURM")},
                most=MAX_RANKS,
            )
        if list(nodes) != sorted(nodes):
            raise PlannerError(
                "SLURM_DISTRIBUTION: cyclic deals ranks to nodes in turn; a plan needs the ranks of a node one "
                "after another. Start the job with --distribution=block."
            )
        sizes = list(Counter(nodes).values())
    if device is None and kind is None:
        raise PlannerError(
            "device: SLURM does not say the kind of the devices; give one, such as H800, or ask SLURM for "
            "--gpus-per-node=h800:8."
        )
    found = find_device(device) if device is not None else recognize_device(kind or "")
    if sum(sizes) > MAX_RANKS:
        raise PlannerError(
            f"SLURM_JOB_NUM_NODES: more than {MAX_RANKS} devices; allowed: {MAX_RANKS}."
        )
    inside, uplink = usual_inside(found), usual_uplink(found)
    return make_cluster(
        [Node(device=found, num_devices=size, inside=inside, uplink=uplink) for size in sizes]
    )


def this_machine() -> Cluster:
    """Return the devices of this machine: its CUDA devices, or else one rank for each of its cores.

    Links between CUDA devices are those of the datasheet; give ``nvidia-smi topo -m`` for the real ones.

    Raises:
        PlannerError: If it has a CUDA device that the library does not know.
    """
    name = platform.node()[:100]
    if torch.cuda.is_available():
        nodes = _cuda_nodes(name)
        slowest = min(node.inside.bandwidth for node in nodes)
        return make_cluster(nodes, Link(slowest, INSIDE_LATENCY))
    num_cores = max(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, 1)
    core = DEVICES["CPU"]
    memory = _physical_memory() // num_cores
    core = dataclasses.replace(core, memory_bytes=memory or core.memory_bytes)
    node = Node(device=core, num_devices=num_cores, inside=usual_inside(core), name=name)
    return make_cluster([node])


def _cuda_nodes(name: str) -> list[Node]:
    nodes: list[Node] = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        known = recognize_device(facts.name, f"cuda:{index}")
        device = dataclasses.replace(known, memory_bytes=facts.total_memory)
        if nodes and nodes[-1].device == device:
            node = nodes.pop()
            nodes.append(dataclasses.replace(node, num_devices=node.num_devices + 1))
        else:
            # Unlike cards of one machine are nodes of their own, joined by what the slower one has.
            nodes.append(Node(device=device, num_devices=1, inside=usual_inside(device), name=name))
    return nodes


def _physical_memory() -> int:
    try:
        return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return 0


def _slurm_devices(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return the kind and the number of a node's devices, as far as SLURM says them."""
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if name not in environ:
            continue
        match = re.fullmatch(
            r"(?:gpu:)?(?:([A-Za-z][\w.-]{0,60}):)?(\d{1,5})", environ[name].strip()
        )
        if match is None or not 1 <= int(match[2]) <= MAX_RANKS:
            raise PlannerError(
                f"{name}: must be a number such as 8, or h100:8, got {environ[name][:40]!r}."
            )
        return match[1], int(match[2])
    return None, None


def _slurm_nodes(environ: Mapping[str, str]) -> int:
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if name in environ:
            text = environ[name].strip()
            if not re.fullmatch(r"\d{1,6}", text) or not 1 <= int(text) <= MAX_RANKS:
                raise PlannerError(f"{name}: must be from 1 to {MAX_RANKS}, got {text[:40]!r}.")
            return int(text)
    with planner_errors():
        if "SLURM_JOB_NODELIST" in environ:
            return count_hosts("SLURM_JOB_NODELIST", environ["SLURM_JOB_NODELIST"])
        if "SLURM_TASKS_PER_NODE" in environ:
            tasks = expand_counts(
                "SLURM_TASKS_PER_NODE", environ["SLURM_TASKS_PER_NODE"], MAX_RANKS
            )
            return len(tasks)
    raise PlannerError(
        "SLURM_JOB_NUM_NODES: missing, so the number of nodes is unknown; run inside of a job, or describe the "
        "cluster by a text or a file."
    )
