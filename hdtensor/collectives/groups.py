"""The only creator of process groups and device meshes.

``new_group`` needs every rank of the world, and a rank that holds no part of a tensor never arrives at
a group made on demand. So groups are enumerated purely, created by all ranks in one sorted order
(``ensure_groups``), and only looked up afterwards.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hdtensor._rank import is_played
from hdtensor._torch_compat import group_timeout
from hdtensor.collectives import observe
from hdtensor.errors import DisagreementError, GroupError


if TYPE_CHECKING:
    from hdtensor.placements import Subgroup

Ranks = tuple[int, ...]


class _Cache:
    """Groups and meshes of one default process group; dropped with it."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = world
        self.all_ranks: Ranks = tuple(range(world.size()))
        self.known: set[Ranks] = {self.all_ranks}
        self.groups: dict[Ranks, dist.ProcessGroup] = {self.all_ranks: world}
        self.meshes: dict[tuple[Ranks, Ranks], DeviceMesh] = {}
        self.reverse: dist.ProcessGroup | None = None
        self.lanes: tuple[dist.ProcessGroup, ...] = ()
        self.accelerators: tuple[str, ...] | None = None


_current: _Cache | None = None


def ensure_groups(rank_sets: Iterable[Sequence[int]], subgroups: Iterable[Subgroup] = ()) -> None:
    """Create the missing groups, and the groups of the subgroups' mesh axes.

    Collective: every rank of the world calls it with the same arguments, also ranks in none of the
    groups. Without anything missing it returns at once. Groups are made in sorted order; a set that
    is the whole world in order is the default group and costs nothing.

    Args:
        rank_sets: Global ranks of each group. A group's own order is the order given.
        subgroups: Their mesh axes' lines are added to ``rank_sets``.

    Raises:
        GroupError: Inside ``as_rank``, without a default process group, or on ranks beyond the world.
        DisagreementError: On every rank, if the ranks do not miss the same groups.
    """
    wanted = with_axes(rank_sets, subgroups)
    if are_known(wanted):
        return
    cache = _cache("create groups")
    _tell_accelerators(cache)
    missing = sorted(wanted - cache.known)
    if not missing:
        return
    size = len(cache.all_ranks)
    beyond = [ranks for ranks in missing if max(ranks) >= size]
    if beyond:
        raise GroupError(
            f"ranks {list(beyond[0])} reach beyond the world, which has ranks 0 to {size - 1}. "
            f"Start more processes, or use a plan for {size} of them."
        )
    if observe.listeners:
        observe.announce("creation of process groups", cache.all_ranks)
    _check_agreement(missing)
    timeout = group_timeout(cache.world, device_type())
    for ranks in missing:
        in_order = list(ranks) == sorted(ranks)
        group = dist.new_group(list(ranks), timeout=timeout, sort_ranks=in_order)
        if dist.get_rank() in ranks:
            cache.groups[ranks] = group
        cache.known.add(ranks)


def with_axes(rank_sets: Iterable[Sequence[int]], subgroups: Iterable[Subgroup]) -> set[Ranks]:
    """Return the rank sets and the lines of the subgroups' mesh axes."""
    wanted = {tuple(ranks) for ranks in rank_sets}
    for subgroup in subgroups:
        for axis in range(len(subgroup.mesh_shape)):
            wanted.update(subgroup.lines(axis))
    return wanted


def are_known(wanted: set[Ranks], *, channels: bool = False) -> bool:
    """Return whether ``ensure_groups`` has made all of these, and with ``channels`` ``ensure_channels`` its own."""
    now = _current
    if now is None or now.world is not dist.group.WORLD or now.accelerators is None:
        return False
    return wanted <= now.known and (not channels or now.reverse is not None)


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of these ranks; this process must be one of them.

    Raises:
        GroupError: If ``ensure_groups`` has not created it, or inside ``as_rank``.
    """
    key = tuple(ranks)
    cache = _current
    if cache is None or cache.world is not dist.group.WORLD or is_played():
        cache = _cache(f"communicate over ranks {list(key)}")
    group = cache.groups.get(key)
    if group is None:
        raise GroupError(_missing_text(key, known=key in cache.known))
    return group


def ensure_channels() -> None:
    """Create what messages of backward passes use; every rank of the world calls it.

    Backends with tags (gloo) need nothing. NCCL runs a communicator's messages in order, and gets a
    second communicator of all ranks.

    Raises:
        GroupError: As ``ensure_groups``.
    """
    cache = _cache("create a channel")
    if cache.reverse is None:
        _tell_accelerators(cache)
        timeout = group_timeout(cache.world, device_type())
        has_tags = device_type() == "cpu"
        cache.reverse = cache.world if has_tags else dist.new_group(timeout=timeout)


def ensure_lane_groups() -> None:
    """Create what pipelines use beside the groups of their tensors; every rank of the world calls it.

    They have groups of their own, so that a rank that fails can end them for all. NCCL runs a communicator's
    messages in order, and gets one for each direction of traffic.

    Raises:
        GroupError: As ``ensure_groups``.
    """
    cache = _cache("create groups of lanes")
    if not cache.lanes:
        _tell_accelerators(cache)
        timeout = group_timeout(cache.world, device_type())
        num = 1 if device_type() == "cpu" else 2
        cache.lanes = tuple(dist.new_group(timeout=timeout) for _ in range(num))


def lane_group() -> dist.ProcessGroup:
    """Return the group of all ranks that pipelines use.

    Raises:
        GroupError: Without ``ensure_lane_groups``, or after ``close_groups``.
    """
    lanes = _cache("run a pipeline").lanes
    if not lanes:
        raise GroupError(
            "there are no groups of lanes: no runner was made, or one failed and ended them. Start the "
            "processes again, and go on from a checkpoint."
        )
    return lanes[0]


def close_groups() -> None:
    """End all groups made here, the default one excepted: whoever waits in one of them for this rank gets an error."""
    cache = _cache("close groups")
    made = [*cache.lanes, *(g for g in cache.groups.values() if g is not cache.world)]
    if cache.reverse is not None and cache.reverse is not cache.world:
        made.append(cache.reverse)
    cache.lanes, cache.reverse = (), None
    cache.groups = {cache.all_ranks: cache.world}
    cache.known = {cache.all_ranks}
    cache.meshes.clear()
    for group in made:
        dist.destroy_process_group(group)
    del made
    gc.collect()  # a gloo group closes its connections when nothing refers to it


def message_channel(*, reverse: bool, channel: int = 0) -> tuple[dist.ProcessGroup, int]:
    """Return the group and the tag of messages between pairs of ranks.

    Args:
        reverse: Whether they belong to a backward pass; ``ensure_channels`` must have been called.
        channel: 0, or from 1 on for the messages of lanes. Messages of unlike channels may pass each other where the
            backend has tags. Elsewhere both ranks must issue the messages of one direction in one order.

    Raises:
        GroupError: Inside ``as_rank``, or without ``ensure_channels``.
    """
    cache = _cache("send messages")
    if channel:
        group = lane_group()
        return cache.lanes[-1] if reverse else group, _NUM_TAGS * channel + reverse
    if not reverse:
        return cache.world, _FORWARD_TAG
    if cache.reverse is None:
        raise GroupError(
            "there is no channel for messages of a backward pass. It is created by all ranks "
            "together: call ensure_channels on every rank beforehand (redistribute does)."
        )
    return cache.reverse, _REVERSE_TAG


#: Tags on backends that have them; others tell the channels apart by communicator.
_FORWARD_TAG, _REVERSE_TAG, _NUM_TAGS = 0, 1, 2


def mesh_of(subgroup: Subgroup) -> DeviceMesh:
    """Return the device mesh of a subgroup, made from the groups of its axes.

    On ranks outside the subgroup the mesh has no groups, and its coordinate is None.

    Raises:
        GroupError: If ``ensure_groups`` has not created the groups, or inside ``as_rank``.
    """
    key = (subgroup.ranks, subgroup.mesh_shape)
    cache = _cache(f"make a mesh of ranks {list(subgroup.ranks)}")
    mesh = cache.meshes.get(key)
    if mesh is None:
        mesh = cache.meshes[key] = _make_mesh(cache, subgroup)
    return mesh


def adopt_mesh(mesh: DeviceMesh) -> None:
    """Have ``mesh_of`` return a user's mesh: ``DTensor`` tells meshes apart by the names of their axes.

    Local; groups stay those of ``ensure_groups``, since ranks outside the mesh may not have it.
    """
    if dist.is_initialized() and not is_played():
        grid = mesh.mesh
        ranks = tuple(grid.flatten().tolist())
        _cache("adopt a mesh").meshes[(ranks, tuple(grid.shape))] = mesh


def num_communicators() -> int:
    """Return how many groups of two or more ranks exist besides the default one."""
    if _current is None or _current.world is not dist.group.WORLD:
        return 0
    return sum(len(ranks) > 1 for ranks in _current.known - {_current.all_ranks})


def _cache(action: str) -> _Cache:
    global _current
    if is_played():
        raise GroupError(
            f"cannot {action} inside as_rank: one process only plays a rank there. "
            f"Use simulate(plan, shards) to run all ranks in one process."
        )
    if not dist.is_initialized():
        raise GroupError(
            f"cannot {action} without a default process group. Start the program with torchrun and "
            f"call torch.distributed.init_process_group first."
        )
    world = dist.group.WORLD
    assert world is not None, "an initialized torch.distributed has a default group"
    if _current is None or _current.world is not world:
        _current = _Cache(world)
    return _current


def _make_mesh(cache: _Cache, subgroup: Subgroup) -> DeviceMesh:
    ranks, mesh_shape = subgroup.ranks, subgroup.mesh_shape
    grid = torch.tensor(ranks, dtype=torch.int).reshape(mesh_shape)
    names = tuple(f"axis{a}" for a in range(len(mesh_shape)))
    rank = dist.get_rank()
    if rank not in ranks:
        return DeviceMesh(device_type(), grid, mesh_dim_names=names, _init_backend=False)
    groups = []
    for axis in range(len(mesh_shape)):
        (line,) = [line for line in subgroup.lines(axis) if rank in line]
        if line not in cache.groups:
            raise GroupError(_missing_text(line, known=False))
        groups.append(cache.groups[line])
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type(), mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type(), mesh=grid, mesh_dim_names=names)


def device_type() -> str:
    """Return the type of device whose tensors the default process group's collectives take."""
    return _device_type_of(dist.group.WORLD)


@functools.lru_cache(maxsize=8)
def _device_type_of(world: dist.ProcessGroup | None) -> str:
    return "cuda" if "nccl" in str(dist.get_backend_config(world)) else "cpu"


def accelerators() -> tuple[str, ...]:
    """Return each rank's kind of accelerator, "cpu" where it has none.

    Raises:
        GroupError: If the ranks have not told one another yet.
    """
    cache = _cache("compare devices")
    if cache.accelerators is None:
        raise GroupError(
            "the ranks' devices are not known yet. They are told by all ranks together: call "
            "ensure_groups or ensure_channels on every rank beforehand (redistribute does)."
        )
    return cache.accelerators


def backends() -> dict[str, str]:
    """Return the default process group's backend for each type of device."""
    return _backends_of(dist.group.WORLD)


@functools.lru_cache(maxsize=8)
def _backends_of(world: dist.ProcessGroup | None) -> dict[str, str]:
    pairs = (part.partition(":") for part in str(dist.get_backend_config(world)).split(","))
    return {device: name for device, _, name in pairs}


def _tell_accelerators(cache: _Cache) -> None:
    """Tell all ranks which kind of accelerator each has, once."""
    if cache.accelerators is None:
        found = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        said: list[str] = [""] * len(cache.all_ranks)
        if observe.listeners:
            observe.announce("exchange of device kinds", cache.all_ranks)
        dist.all_gather_object(said, "cpu" if found is None else found.type)
        cache.accelerators = tuple(said)


def _check_agreement(missing: list[Ranks]) -> None:
    """Raise on every rank unless all ranks are about to create the same groups."""
    digest = hashlib.sha256(repr(missing).encode()).digest()[:8]
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device_type())
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    if any(other.item() != mine.item() for other in everyone):
        first = ", ".join(str(list(ranks)) for ranks in itertools.islice(missing, 4))
        raise DisagreementError(
            f"the ranks do not ask for the same process groups; rank {dist.get_rank()} misses "
            f"{len(missing)}: {first}{', ...' if len(missing) > 4 else ''}. Every rank must "
            f"distribute and redistribute the same tensors, with the same specs, in the same order."
        )


def _missing_text(ranks: Ranks, *, known: bool) -> str:
    if known:
        return f"rank {dist.get_rank()} is not in the group of ranks {list(ranks)}."
    return (
        f"there is no process group for ranks {list(ranks)}. Groups are created by all ranks "
        f"together: call ensure_groups on every rank beforehand (distribute_tensor, redistribute "
        f"and parallelize do)."
    )
