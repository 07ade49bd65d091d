"""The processes behind ``run_world``: a template, and the ranks that are forked from it.

::

    pytest --fork, once--> template --fork, per world--> rank 0, rank 1, ...
       |                      ^                             ^
       |  preload, fork, reap |                             |
       +----------------------+      jobs and replies       |
       +----------------------------------------------------+

The template is forked while the parent is young: torch is imported, and nothing has run that a fork
would tear (autograd, compile workers, a process group). It runs no job itself. What it imports, all
ranks forked later have; what it forks ends with it.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist


_PR_SET_PDEATHSIG = 1

# run_world's own timeout is the one that ends a hung collective; gloo's only has to be longer.
_GLOO_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Preload:
    """Asks the template to import ``module`` for all ranks forked from now on."""

    module: str


@dataclass(frozen=True, slots=True)
class Fork:
    """Asks the template for ``world_size`` ranks; their connections follow in rank order."""

    world_size: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Reap:
    """Asks the template how its child ``pid``, which has ended or will at once, ended."""

    pid: int


@dataclass(frozen=True, slots=True)
class Value:
    """A rank's answer: the pickled return value of the job."""

    pickled: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """A rank's answer: the traceback of what the job raised."""

    text: str


def stack_file(folder: Path, rank: int) -> Path:
    """Return the file to which ``rank`` writes its stacks on SIGUSR1."""
    return folder / f"rank{rank}.stack"


def output_file(folder: Path, rank: int) -> Path:
    """Return the file that is ``rank``'s standard output and error."""
    return folder / f"rank{rank}.out"


def serve_template(requests: Connection, log: Path) -> NoReturn:
    """Answer the parent's requests until it closes the connection or dies; never return."""
    with _ending_the_process(log):
        _die_with_parent()
        os.setsid()  # Ctrl-C in the terminal is for pytest alone
        _redirect_output(log)
        gc.freeze()  # the parent's objects stay as they are: no finalizer of theirs runs here
        while True:
            match requests.recv():
                case Preload(module):
                    # If this fails, so does unpickling the job on the ranks: they show the error.
                    with contextlib.suppress(BaseException):
                        importlib.import_module(module)
                    requests.send(None)
                case Fork(world_size, folder):
                    requests.send(_fork_ranks(requests, world_size, folder))
                case Reap(pid):
                    requests.send(_describe_end(os.waitpid(pid, 0)[1]))


def _fork_ranks(requests: Connection, world_size: int, folder: Path) -> list[int]:
    connections = [Connection(recv_handle(requests)) for _ in range(world_size)]
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            requests.close()
            for other in range(world_size):
                if other != rank:
                    connections[other].close()
            _serve_rank(connections[rank], rank, world_size, folder)
        pids.append(pid)
    for connection in connections:
        connection.close()
    return pids


def _serve_rank(jobs: Connection, rank: int, world_size: int, folder: Path) -> NoReturn:
    """Join the process group, then run jobs until the parent closes the connection."""
    with _ending_the_process(output_file(folder, rank)):
        _die_with_parent()
        _redirect_output(output_file(folder, rank))
        stacks = stack_file(folder, rank).open("w")
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        torch.set_num_threads(1)
        _init_process_group(jobs, rank, world_size)
        while True:
            jobs.send(_run_job(jobs.recv_bytes()))


def _init_process_group(jobs: Connection, rank: int, world_size: int) -> None:
    """Join the gloo world on the loopback; rank 0 keeps the store and tells its port."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        jobs.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", jobs.recv(), is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=_GLOO_TIMEOUT
    )
    dist.barrier()
    jobs.send("ready")


def _run_job(pickled: bytes) -> Value | Raised:
    random.seed(0)
    torch.manual_seed(0)
    try:
        function, args = pickle.loads(pickled)
        return Value(pickle.dumps(function(dist.get_rank(), *args)))
    except BaseException as error:  # pytest.fail and SystemExit are failures of the job too
        # The first frame is this function: the reader wants what lies below it.
        below = error.__traceback__.tb_next or error.__traceback__
        return Raised("".join(traceback.format_exception(type(error), error, below)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def _ending_the_process(log: Path) -> Iterator[None]:
    """End this process at the end of the block, whatever happens: it must not return into pytest."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is done with us
    except BaseException:
        with contextlib.suppress(BaseException), log.open("a") as file:
            traceback.print_exc(file=file)
        os._exit(1)


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, also inside a hung collective."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect_output(path: Path) -> None:
    """Write what this process prints, C++ included, to ``path``; read nothing."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(null)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _describe_end(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
