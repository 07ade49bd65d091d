"""Run a test function on real gloo processes: ``run_world(check, 4, ...)``.

The ranks are kept between calls, one pool of processes for each world size, so that a test costs
milliseconds. A pool ends, and the next call makes another, when a call fails, when a test fails, and
when a job comes from a module that was not imported when the pool was forked (so that a dear import
is paid once and not once a rank).

The process group, hdtensor's groups and whatever else a job leaves behind stay for the next job of
the pool. Only the seeds of ``random`` and ``torch`` are set, to 0, before every job.
"""

import atexit
import contextlib
import functools
import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.ranks import (
    Fork,
    Preload,
    Raised,
    Reap,
    output_file,
    serve_template,
    stack_file,
)


START_SECONDS = 60.0
# After one rank failed the others usually wait for it in a collective: no need to wait for long.
GRACE_SECONDS = 3.0
STACK_SECONDS = 2.0
MAX_POOLS = 3
OUTPUT_LINES = 30


class WorldError(Exception):
    """Some ranks of a world raised, died or hung.

    Attributes:
        failures: Rank -> what happened to it, with its traceback or stack; the first to fail first.
    """

    def __init__(self, title: str, failures: dict[int, str]) -> None:
        """Join ``failures`` below ``title``."""
        super().__init__("\n\n".join([title, *failures.values()]))
        self.failures = failures


def run_world(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``world_size`` gloo ranks; return the values in rank order.

    Args:
        function: Defined at the top of a module: it travels by name, so it can be no closure.
        world_size: Number of processes, all on this machine.
        args: The same for every rank; pickled, as the returned values are.
        timeout: Seconds after which ranks that have not answered count as hung.

    Raises:
        WorldError: If a rank raised, ended or hung. The message has the traceback of every rank
            that raised, and the stack of every rank that was still running.
        TypeError: If ``function`` or ``args`` cannot be pickled.
    """
    assert not dist.is_initialized(), "run_world starts worlds of its own; call it outside of one"
    job = _pickle_job(function, args)
    _Template.get().preload(function.__module__)
    pool = _pools.pop(world_size, None) or _Pool.start(world_size)
    try:
        while len(_pools) >= MAX_POOLS:
            _pools.pop(next(iter(_pools))).stop()
        values = pool.run(job, f"{function.__module__}.{function.__qualname__}", timeout)
    except BaseException:
        pool.stop()
        raise
    _pools[world_size] = pool  # last in the dict: the one used most recently
    return values


def start_template() -> None:
    """Fork the template now, while this process is young; ``run_world`` does it at the latest."""
    _Template.get()


def stop_pools() -> None:
    """End all ranks; the next ``run_world`` starts fresh ones."""
    while _pools:
        _pools.popitem()[1].stop()


def _pickle_job(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except Exception as error:
        raise TypeError(
            f"cannot send {function!r} with {len(args)} arguments to other processes: {error}. "
            f"Use a function defined at the top of a module, and arguments that can be pickled."
        ) from error


@dataclass
class _Template:
    """The parent's handle of the template process."""

    pid: int
    requests: Connection
    preloaded: set[str] = field(default_factory=set)
    has_ended: bool = False

    @classmethod
    def get(cls) -> "_Template":
        """Return this process's template; fork it if there is none or it has ended."""
        global _template
        if _template is None or not _template.is_alive():
            stop_pools()
            _template = cls._fork()
        return _template

    @classmethod
    def _fork(cls) -> "_Template":
        log = _folder() / "template.out"
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # From 3.12 on a fork beside other threads warns; pytest-xdist has one, for its messages.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            ours.close()
            serve_template(theirs, log)
        theirs.close()
        return cls(pid, ours)

    def is_alive(self) -> bool:
        self.has_ended = self.has_ended or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return not self.has_ended

    def stop(self) -> None:
        self.requests.close()
        if not self.has_ended:
            os.waitpid(self.pid, 0)
            self.has_ended = True

    def ask(self, request: object) -> Any:
        self.requests.send(request)
        return self.requests.recv()

    def preload(self, module: str) -> None:
        """Have ``module`` imported for all ranks; pools that were forked before it end."""
        if module not in self.preloaded:
            stop_pools()
            self.ask(Preload(module))
            self.preloaded.add(module)

    def fork(self, world_size: int, folder: Path) -> tuple[list[int], list[Connection]]:
        pipes = [Pipe() for _ in range(world_size)]
        self.requests.send(Fork(world_size, folder))
        for _, theirs in pipes:
            send_handle(self.requests, theirs.fileno(), self.pid)
            theirs.close()
        return self.requests.recv(), [ours for ours, _ in pipes]


@dataclass
class _Pool:
    """The ranks of one world."""

    template: _Template
    folder: Path
    pids: list[int]
    connections: list[Connection]
    ends: dict[int, str] = field(default_factory=dict)  # rank -> how its process ended

    @classmethod
    def start(cls, world_size: int) -> "_Pool":
        template = _Template.get()
        folder = Path(tempfile.mkdtemp(dir=_folder(), prefix=f"world{world_size}-"))
        pool = cls(template, folder, *template.fork(world_size, folder))
        try:
            pool._join_process_group()
        except BaseException:
            pool.stop()
            raise
        return pool

    def _join_process_group(self) -> None:
        failures: dict[int, str] = {}
        first, *others = self.connections
        port = self._collect([first], START_SECONDS, failures).get(0)
        if not failures:
            for connection in others:
                connection.send(port)
            self._collect(self.connections, START_SECONDS, failures)
        if failures:
            raise self._error("the process group did not start", failures, [0] * len(self.pids))

    def run(self, job: bytes, name: str, timeout: float) -> list[Any]:
        """Run the pickled job on every rank; return the values in rank order."""
        printed = [output_file(self.folder, r).stat().st_size for r in range(len(self.pids))]
        failures: dict[int, str] = {}
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):  # it died since: collecting reports that
                connection.send_bytes(job)
        replies = self._collect(self.connections, timeout, failures)
        if failures:
            raise self._error(f"{name} failed", failures, printed)
        return [pickle.loads(replies[rank].pickled) for rank in range(len(self.pids))]

    def _collect(
        self, connections: list[Connection], timeout: float, failures: dict[int, str]
    ) -> dict[int, Any]:
        """Receive a message on each connection; note in ``failures`` which ranks failed, and how."""
        waiting = {connection: self.connections.index(connection) for connection in connections}
        deadline = time.monotonic() + timeout
        replies: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    replies[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    failures[rank] = f"--- rank {rank} ended: {self._reap(rank)} ---"
                    continue
                if isinstance(replies[rank], Raised):
                    failures[rank] = f"--- rank {rank} raised ---\n{replies[rank].text}"
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        reason = "after another rank failed" if failures else f"after {timeout:g} s"
        for rank, stack in self._dump_stacks(list(waiting.values())).items():
            failures[rank] = f"--- rank {rank} was still running {reason} ---\n{stack}"
        return replies

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Ask hung ranks for the stacks of their threads."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        stacks = dict.fromkeys(ranks, "")
        # A stack is whole when it has not grown between two looks.
        while ranks and time.monotonic() < deadline:
            time.sleep(0.1)
            now = {rank: stack_file(self.folder, rank).read_text() for rank in ranks}
            if now == stacks and all(now.values()):
                break
            stacks = now
        return {rank: _above_the_job(text) or "(no stack)" for rank, text in stacks.items()}

    def _error(self, title: str, failures: dict[int, str], printed: list[int]) -> WorldError:
        """Add to each failure what the rank printed from byte ``printed[rank]`` of its output on."""
        for rank in failures:
            with output_file(self.folder, rank).open("rb") as file:
                file.seek(printed[rank])
                lines = file.read().decode(errors="replace").splitlines()[-OUTPUT_LINES:]
            if lines:
                failures[rank] = "\n".join([failures[rank], f"--- rank {rank} printed ---", *lines])
        ranks = ", ".join(map(str, sorted(failures)))
        return WorldError(f"{title} on rank {ranks} of {len(self.pids)}", failures)

    def _reap(self, rank: int) -> str:
        if rank not in self.ends:
            self.ends[rank] = self.template.ask(Reap(self.pids[rank]))
        return self.ends[rank]

    def stop(self) -> None:
        """Kill the ranks that are left, and wait until they are gone."""
        for connection in self.connections:
            connection.close()
        # Without its template the kernel has ended them, and their ids may be others' by now.
        if self.template.is_alive():
            for rank in set(range(len(self.pids))) - set(self.ends):
                os.kill(self.pids[rank], signal.SIGKILL)
                self._reap(rank)
        shutil.rmtree(self.folder, ignore_errors=True)


def _above_the_job(stacks: str) -> str:
    """Drop the harness's own frames, from the one that called the job down, of each thread."""
    threads = [thread.splitlines() for thread in stacks.strip().split("\n\n")]
    kept = [itertools.takewhile(lambda line: " in _run_job" not in line, t) for t in threads]
    return "\n\n".join("\n".join(lines) for lines in kept)


_OWNER = os.getpid()
_template: _Template | None = None
_pools: dict[int, _Pool] = {}


@functools.cache
def _folder() -> Path:
    """Return the folder for the outputs of all ranks."""
    return Path(tempfile.mkdtemp(prefix="hdtensor-ranks-"))


@atexit.register
def _stop_all() -> None:
    # A process forked from this one inherits this function, but none of the ranks.
    if _template is not None and os.getpid() == _OWNER:
        stop_pools()
        _template.stop()
        shutil.rmtree(_folder(), ignore_errors=True)
