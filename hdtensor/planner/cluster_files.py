"""``read_cluster``: a cluster from whatever somebody has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hdtensor.errors import PlannerError
from hdtensor.plan.reader import parse_json, read_file
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.cluster_fields import cluster_of_fields
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.machine import cluster_of_slurm, cluster_of_topo, this_machine
from hdtensor.planner.quantities import planner_errors
from hdtensor.planner.yaml_text import parse_yaml


_FILES = (".yaml", ".yml", ".json", ".txt")


def read_cluster(
    source: str,
    *,
    device: str | None = None,
    num_nodes: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Cluster:
    """Return a cluster.

    =======================  ==============================================================
    source                   what is read
    =======================  ==============================================================
    ``this``                 this machine's CUDA devices, else its cores
    ``slurm``                the SLURM job that this process is in
    ``*.yaml``, ``*.json``   a description, see ``cluster_of_fields``
    ``*.txt``                what ``nvidia-smi topo -m`` printed on a node, or a short text
    anything else            a short text, see ``parse_groups``
    =======================  ==============================================================

    Args:
        source: One of these.
        device: The kind of the devices, where the source does not say it (SLURM, ``nvidia-smi``).
        num_nodes: Nodes like the one that ``nvidia-smi`` printed; default 1.
        environ: Variables of a SLURM job; default ``os.environ``.

    Raises:
        PlannerError: If it describes no cluster; the message begins with the field.
    """
    is_file = source.lower().endswith(_FILES)
    text = _text_of(source) if is_file else source
    is_topo = is_file and any(line.split()[:1] == ["GPU0"] for line in text.splitlines())
    if is_topo:
        return cluster_of_topo(text, device, 1 if num_nodes is None else num_nodes)
    if num_nodes is not None:
        raise PlannerError(
            f"nodes: {num_nodes} is for what `nvidia-smi topo -m` printed, which shows one node; {source[:60]!r} "
            f"says its nodes itself."
        )
    if source == "slurm":
        return cluster_of_slurm(environ, device)
    if device is not None:
        raise PlannerError(
            f"device: {device[:60]!r} is for SLURM and `nvidia-smi topo -m`; {source[:60]!r} says its devices "
            f"itself."
        )
    if source == "this":
        return this_machine()
    if not is_file:
        return cluster_of_text(source)
    return parse_cluster(text)


def parse_cluster(text: str) -> Cluster:
    """Return the cluster of a file's text: JSON, YAML or a short text.

    >>> parse_cluster("nodes: [4x H20]").num_ranks
    4

    Raises:
        PlannerError: If it describes none.
    """
    what = "the description of the cluster"
    with planner_errors("cluster"):
        if text.lstrip()[:1] in ("{", "["):
            value = parse_json(text, what)
        else:
            value = parse_yaml(text, what)
    return cluster_of_fields(value)


def _text_of(path: str) -> str:
    if not os.path.exists(path):
        raise PlannerError(
            f"cluster: there is no file {path[:200]!r}. Give its path, or a text such as 8x H800."
        )
    with planner_errors("cluster"):
        data = read_file(Path(path), "the description of the cluster")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlannerError(
            f"cluster: {path[:200]!r} is no UTF-8 text: {error.reason} at byte {error.start}."
        ) from None
