"""A function that takes turns with its caller: it waits in a thread of its own while others run."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class _Worker:
    """A thread that runs one function after another: to start a thread costs ten times a turn.

    Attributes:
        thread: The thread; not alive in a process that was forked from the one that made it.
    """

    def __init__(self) -> None:
        self._job: Callable[[], object] = lambda: None
        self._wake = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._work, daemon=True, name="hdtensor-stage")
        self.thread.start()

    def run(self, job: Callable[[], object]) -> None:
        """Start a function."""
        self._job = job
        self._wake.release()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            job, self._job = self._job, lambda: None
            job()
            del job  # whatever it refers to


#: Workers whose function has ended.
_idle: list[_Worker] = []


def _idle_worker() -> _Worker:
    while _idle:
        worker = _idle.pop()
        if worker.thread.is_alive():
            return worker
    return _Worker()


class Turns:
    """A function in a thread of its own that runs only while its owner waits for it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._worker: _Worker | None = None

    def resume(self) -> None:
        """Let the function run until it pauses or ends; raise what it raises."""
        if self._worker is None:
            self._worker = _idle_worker()
            context = contextvars.copy_context()
            self._worker.run(
                functools.partial(context.run, self._run, _thread_settings(), self._worker)
            )
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Called by the function: wait for the next turn."""
        self._done.release()
        self._go.acquire()

    def _run(self, settings: Callable[[], Any], worker: _Worker) -> None:
        self._go.acquire()
        try:
            with settings():
                self._function()
        except BaseException as error:  # it is raised where the thread is waited for
            self._error = error
        finally:
            _idle.append(worker)
            self._done.release()


def _thread_settings() -> Callable[[], Any]:
    """Return what gives another thread this thread's settings of torch."""
    grad, device = torch.is_grad_enabled(), None
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()

    @contextmanager
    def settings() -> Iterator[None]:
        with ExitStack() as stack:
            if device is not None:
                stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype))
            yield

    return settings
