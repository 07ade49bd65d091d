"""Run a measurement on forked gloo ranks.

The parent has torch imported and never uses a process group: a child starts within milliseconds, with
empty caches.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


#: A measurement that takes longer hangs.
TIMEOUT_S = 300.0


class MeasurementError(RuntimeError):
    """A rank failed, or did not end."""


def run(measure: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Call ``measure(*args)`` on every rank of a new world; return rank 0's result.

    Args:
        measure: Runs with the default process group set up (gloo, CPU).
        world_size: Number of processes.
        args: Handed on.

    Raises:
        MeasurementError: If a rank fails or does not end in time; the message has the traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="bench_dispatch_") as folder:
        store = str(Path(folder) / "store")
        receive, send = context.Pipe(duplex=False)
        children = [
            context.Process(target=_rank_main, args=(rank, world_size, store, send, measure, args))
            for rank in range(world_size)
        ]
        for child in children:
            child.start()
        send.close()
        try:
            return _collect(receive, children)
        finally:
            for child in children:
                child.kill()
                child.join()


def _collect(receive: Any, children: list[Any]) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    result = None
    for _ in children:
        if not receive.poll(max(0.0, deadline - time.monotonic())):
            raise MeasurementError(f"a rank did not end within {TIMEOUT_S:.0f} s.")
        try:
            rank, is_done, value = receive.recv()
        except EOFError:
            codes = [child.exitcode for child in children]
            raise MeasurementError(f"a rank ended without a result; exit codes {codes}.") from None
        if not is_done:
            raise MeasurementError(f"rank {rank} failed:\n{value}")
        if rank == 0:
            result = value
    return result


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    send: Any,
    measure: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        value = measure(*args)
        dist.barrier()
        send.send((rank, True, value if rank == 0 else None))
    except BaseException:  # the parent raises it again
        send.send((rank, False, traceback.format_exc()))
    finally:
        send.close()
        os._exit(0)  # no destructors: a rank whose peer failed would wait for it
