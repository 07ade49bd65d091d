"""The processes of a launcher (``torchrun``) that profile together: their group, and what they agree on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from hdtensor.errors import PlannerError
from hdtensor.planner.profiles import Profile


_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: The others wait no longer for one that reads a file or starts.
_TIMEOUT = timedelta(seconds=120)


@contextmanager
def launched_world(environ: Mapping[str, str] | None = None) -> Iterator[int]:
    """Join the processes that a launcher started, for as long as the context lasts; yield this one's rank.

    Without a launcher, and where there is a process group already, nothing is done. Each process takes the CUDA
    device of its ``LOCAL_RANK`` if there are some.

    Args:
        environ: The variables; default ``os.environ``.

    Raises:
        PlannerError: If the launcher's variables are not all there, or the processes do not find one another.
    """
    environ = os.environ if environ is None else environ
    size = environ.get("WORLD_SIZE", "1").strip()
    if dist.is_initialized() or size == "1":
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    missing = [name for name in _NAMES if name not in environ]
    if missing or not size.isdecimal():
        raise PlannerError(
            f"WORLD_SIZE: is {size[:20]!r}, but {', '.join(missing) or 'that is no number'}"
            f"{' is missing' if missing else ''}; start the processes by torchrun, or unset WORLD_SIZE to profile "
            f"with this process alone."
        )
    is_cuda = torch.cuda.is_available()
    try:
        if is_cuda:
            torch.cuda.set_device(int(environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if is_cuda else "gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        last = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise PlannerError(
            f"RANK, WORLD_SIZE: the {size} processes did not find one another: {last[0][:200]}. Start them by "
            f"torchrun, each with its own device."
        ) from error
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def agree(begin: Callable[[], Profile]) -> Profile:
    """Return the first rank's profile on every rank; alone, just this one's.

    Only the first rank reads the file: others may not see it, and must not measure something else.

    Args:
        begin: Returns what there is so far; is called on the first rank.

    Raises:
        PlannerError: The first rank's, on every rank.
    """
    if not dist.is_initialized():
        return begin()
    said: list[Profile | PlannerError | None] = [None]
    if dist.get_rank() == 0:
        try:
            said = [begin()]
        except PlannerError as error:
            said = [error]
    dist.broadcast_object_list(said, src=0)
    match said[0]:
        case Profile() as found:
            return found
        case PlannerError() as refused:
            raise refused
        case other:
            raise PlannerError(f"RANK: the first rank sent {other!r}, which is no profile.")
