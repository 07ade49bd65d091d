"""Run one function on several ranks: on torchrun's processes, or on processes forked from this one.

A fork starts in milliseconds what a fresh process would import for ten seconds. In either case a run
ends: collectives give up after a minute, each process prints its stack and ends itself at its time
limit, one failure ends all processes, and Ctrl-C too.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist


COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)
# After one rank failed the others fail as well, or wait for it.
GRACE_SECONDS = 3.0


class RanksFailedError(Exception):
    """Some rank raised, died or hung; the message has its traceback."""


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        text: What to print, with the traceback if there is one.
        error: The exception, where the caller of ``run`` wants to see it.
        has_died: Whether the process ended without a word, so that the others' failures are its fault.
    """

    text: str
    error: Exception | None = None
    has_died: bool = False


@dataclass(frozen=True)
class Job:
    """What every rank runs."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    num_ranks: int
    time_limit: float
    expected: tuple[type[Exception], ...]


def is_launched() -> bool:
    """Return whether torchrun, or another launcher that sets its variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_first() -> bool:
    """Return whether this process is the one that talks to the user."""
    return not is_launched() or os.environ["RANK"] == "0"


def complain(text: str) -> None:
    """Print an error that every process has, once.

    A launcher ends all processes as soon as one has ended. So the others leave it to the first to speak
    and end, and speak only if it has not: then the error is theirs alone.
    """
    if not is_first():
        time.sleep(COLLECTIVE_TIMEOUT.total_seconds())
        text = f"rank {os.environ['RANK']}: {text}"
    print(text, file=sys.stderr, flush=True)


def world_size(default: int) -> int:
    """Return how many ranks ``run`` will have."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else default


def run(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    time_limit: float,
    expected: tuple[type[Exception], ...] = (),
) -> Any:
    """Call ``function(*args)`` on every rank, in a gloo process group and with one thread.

    Args:
        function: What to run; ``torch.distributed.get_rank()`` tells it where it is.
        args: Its arguments. Forked processes have them as they are here; nothing is pickled.
        num_ranks: Processes to fork where no launcher has started some.
        time_limit: Seconds after which a process prints its stacks and ends.
        expected: Exceptions that are for the caller to explain.

    Returns:
        What rank 0 returned; it must be picklable. None on torchrun's other processes.

    Raises:
        RanksFailedError: If a forked rank raised, died or hung.
        Exception: One of ``expected``, once, where a rank raised it.
    """
    torch.set_num_threads(1)  # more would only slow one another down on the cores they share
    job = Job(function, args, num_ranks, time_limit, expected)
    if not is_launched():
        return _run_forked(job)
    faulthandler.dump_traceback_later(time_limit, exit=True)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        result = function(*args)
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _run_forked(job: Job) -> Any:
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    replies: list[Connection] = []
    # Rank 0 inherits the listening socket, so nobody can take its port in between.
    with socket.create_server(("127.0.0.1", 0)) as listener, _exit_on_sigterm():
        try:
            for rank in range(job.num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_rank, args=(rank, job, theirs, listener), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                replies.append(ours)
            result = _collect(job, processes, replies)[0]
            for process in processes:
                process.join(GRACE_SECONDS)
            return result
        finally:
            for process in processes:  # whatever happened, none is left behind
                process.kill()
                process.join()


def _collect(job: Job, processes: list[BaseProcess], replies: list[Connection]) -> dict[int, Any]:
    """Return what each rank returned; give the others a moment once one has failed."""
    waiting = dict(zip(replies, range(job.num_ranks), strict=True))
    deadline = time.monotonic() + job.time_limit + GRACE_SECONDS
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                results[rank] = connection.recv()
            except EOFError:
                processes[rank].join(GRACE_SECONDS)
                results[rank] = _died(rank, processes[rank].exitcode)
            if isinstance(results[rank], Failure):
                failures[rank] = results[rank]
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if waiting and not failures:
        ranks = ", ".join(map(str, waiting.values()))
        raise RanksFailedError(f"rank {ranks} gave no answer within {job.time_limit:g} s.")
    if failures:
        _raise_cause(failures)
    return results


def _died(rank: int, status: int | None) -> Failure:
    if status is not None and status < 0:
        how = f"was ended by signal {signal.Signals(-status).name}"
    else:
        how = f"ended with exit status {status}; see above for what it printed"
    return Failure(f"rank {rank} {how}.", has_died=True)


def _raise_cause(failures: dict[int, Failure]) -> NoReturn:
    """Raise for the rank that failed first; a rank that died comes before those that missed it."""
    order = sorted(failures, key=lambda rank: not failures[rank].has_died)  # else as they came
    for rank in order:
        error = failures[rank].error
        if error is not None:
            raise error
    cause, *others = order
    text = failures[cause].text
    if others:
        text += f"\n(ranks {', '.join(map(str, sorted(others)))} failed after it)"
    raise RanksFailedError(text)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into ``SystemExit``, so that a parent that is ended ends its ranks first."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run_rank(rank: int, job: Job, reply: Connection, listener: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.dump_traceback_later(job.time_limit, exit=True)
    try:
        store = dist.TCPStore(
            *listener.getsockname(),
            job.num_ranks,
            is_master=rank == 0,
            timeout=COLLECTIVE_TIMEOUT,
            master_listen_fd=listener.detach() if rank == 0 else None,
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=job.num_ranks, timeout=COLLECTIVE_TIMEOUT
        )
        result = job.function(*job.args)
        dist.destroy_process_group()
    except Exception as error:
        text = f"rank {rank} raised:\n{traceback.format_exc()}"
        reply.send(Failure(text.rstrip(), error if isinstance(error, job.expected) else None))
        sys.stdout.flush()
        os._exit(1)  # without waiting for communication that will never end
    reply.send(result if rank == 0 else None)
