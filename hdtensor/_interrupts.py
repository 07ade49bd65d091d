"""Ctrl-C in the package's own command: one line and exit code 130, also while modules are still being imported."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


#: Exit code after Ctrl-C, as shells have it.
INTERRUPTED = 130


def is_command() -> bool:
    """Return whether this process is ``python -m hdtensor`` or ``hdtensor``, not a program that imports the package."""
    words = sys.orig_argv
    is_module = any(pair == ("-m", "hdtensor") for pair in itertools.pairwise(words))
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return is_module or name.partition(".")[0] == "hdtensor"


def guard() -> None:
    """Let Ctrl-C end the process at once, with a line. There must be nothing that needs to be ended in order."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def in_order() -> Iterator[None]:
    """Let Ctrl-C raise ``KeyboardInterrupt`` inside of the block, if the process was guarded, so that all is ended in order."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        guard()


@contextmanager
def withheld() -> Iterator[None]:
    """Withhold Ctrl-C inside of the block; processes that are started there never get it, their parent ends them."""
    # multiprocessing's tracker starts with the first process, and starting it lets Ctrl-C through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"hdtensor: interrupted\n")
    os._exit(INTERRUPTED)


if is_command():
    guard()
