"""Measures collectives and messages by size, over processes of this machine or those of a launcher."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hdtensor._interrupts import withheld
from hdtensor.errors import PlannerError
from hdtensor.planner.profile_units import Stopwatch
from hdtensor.planner.profiles import TransferKind, TransferTime


KINDS: tuple[TransferKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")
_TIMEOUT = timedelta(seconds=120)
#: It has no annotations.
_SPAWN: Any = torch.multiprocessing.spawn


class TransferPoint(NamedTuple):
    """One thing to measure: the arguments of ``TransferTime`` without its seconds and link."""

    kind: TransferKind
    num_ranks: int
    num_bytes: int


def transfer_points(num_ranks: Sequence[int], sizes: Sequence[int]) -> list[TransferPoint]:
    """Return what to measure: every kind, number of ranks and size, small ones first; a message is between two."""
    return [
        TransferPoint(kind, num, size)
        for num in num_ranks
        if num > 1
        for size in sorted(sizes)
        for kind in KINDS
        if kind != "send" or num == 2
    ]


def measure_transfers(
    points: Sequence[TransferPoint], *, is_cuda: bool, max_seconds: float = math.inf
) -> list[TransferTime]:
    """Return the seconds of some points with one number of ranks, by processes started on this machine.

    Args:
        points: At least one, all with the same number of ranks.
        is_cuda: Whether each rank has its CUDA device and talks by NCCL; else gloo on CPU.
        max_seconds: When to stop measuring; the points after that are left out.

    Raises:
        PlannerError: If a process fails.
    """
    num = points[0].num_ranks
    assert all(point.num_ranks == num for point in points), points
    with tempfile.TemporaryDirectory() as folder:
        arguments = (
            num,
            str(Path(folder) / "store"),
            str(Path(folder) / "out"),
            list(points),
            is_cuda,
            max_seconds,
        )
        try:
            _run_processes(arguments, num)
        except Exception as error:
            last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise PlannerError(
                f"transfers: a process of {num} failed: {last[0][:300]}. Profile without transfers, or fewer ranks."
            ) from error
        found: list[float] = torch.load(Path(folder) / "out", weights_only=True)
    return [
        TransferTime(*point, seconds=seconds) for point, seconds in zip(points, found, strict=False)
    ]


def _run_processes(arguments: tuple[Any, ...], num: int) -> None:
    started: Any = None
    try:
        with withheld():
            started = _SPAWN(_run_rank, arguments, nprocs=num, join=False)
        while not started.join():
            pass
    finally:
        for process in started.processes if started is not None else ():
            if process.is_alive():  # after Ctrl-C it would go on
                process.kill()
                process.join()


def measure_in_world(
    points: Sequence[TransferPoint], device: torch.device, max_seconds: float = math.inf
) -> list[TransferTime]:
    """Return the seconds of some points over the ranks of the process group that exists; all ranks call it.

    Args:
        points: Collectives with as many ranks as the group has; a message goes from the first rank to the last one.
        device: This rank's.
        max_seconds: When to stop measuring; the points after that are left out, the same on every rank.
    """
    end = time.monotonic() + max_seconds
    link = link_here()
    times: list[TransferTime] = []
    for point in points:
        if not _all_have_time(end, device):
            break
        times.append(TransferTime(*point, _seconds(point, device), link))
    return times


def points_here(points: Sequence[TransferPoint]) -> list[TransferPoint]:
    """Return what is measured for these points: in a process group collectives are over all of its ranks."""
    if not dist.is_initialized():
        return list(points)
    world = dist.get_world_size()
    there = (p if p.kind == "send" else p._replace(num_ranks=world) for p in points)
    return list(dict.fromkeys(there))


def link_here() -> str:
    """Return which link the ranks of the process group use, or those of this machine if there is none."""
    if not dist.is_initialized():
        return "inside"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return "inside" if local >= dist.get_world_size() else "between"


def _all_have_time(end: float, device: torch.device) -> bool:
    has_time = torch.tensor([time.monotonic() < end], dtype=torch.uint8, device=device)
    dist.all_reduce(has_time, op=dist.ReduceOp.MIN)
    return bool(has_time.item())


def _run_rank(
    rank: int,
    num: int,
    store: str,
    out: str,
    points: list[TransferPoint],
    is_cuda: bool,
    max_seconds: float,
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=dist.FileStore(store, num),
        rank=rank,
        world_size=num,
        timeout=_TIMEOUT,
    )
    try:
        times = measure_in_world(points, device, max_seconds)
        if rank == 0:
            torch.save([time.seconds for time in times], out)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _seconds(point: TransferPoint, device: torch.device) -> float:
    """Return the median seconds of a transfer, the slowest rank's, after one to warm up."""
    run = _transfer(point, device)
    watch = Stopwatch(device)
    times = []
    for turn in range(6):
        dist.barrier()
        start = watch.now()
        run()
        seconds = watch.now() - start
        if turn:
            times.append(seconds)
    slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


def _transfer(point: TransferPoint, device: torch.device) -> Callable[[], Any]:
    """Return what does the transfer once. Buffers are of float32, whatever the tensor was."""
    num, world = max(point.num_bytes // 4, 1), dist.get_world_size()
    part = max(num // world, 1)
    whole = torch.zeros(part * world, device=device)
    one = torch.zeros(part, device=device)
    match point.kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole)
        case "all_gather":
            return lambda: dist.all_gather_single(whole, one)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_single(one, whole)
        case "send":
            return lambda: _send(whole, world - 1)


def _send(tensor: torch.Tensor, last: int) -> None:
    if dist.get_rank() == 0:
        dist.send(tensor, last)
    elif dist.get_rank() == last:
        dist.recv(tensor, 0)
