"""A function that takes turns with its caller: it waits in a thread of its own while others run."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class Turns:
    """A function in a thread of its own that runs only while its owner waits for it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Let the function run until it pauses or ends; raise what it raises."""
        if self._thread is None:
            context = contextvars.copy_context()
            settings = _thread_settings()
            self._thread = threading.Thread(
                target=context.run, args=(self._run, settings), daemon=True, name="hdtensor-stage"
            )
            self._thread.start()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Called by the function: wait for the next turn."""
        self._done.release()
        self._go.acquire()

    def _run(self, settings: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            with settings():
                self._function()
        except BaseException as error:  # it is raised where the thread is waited for
            self._error = error
        finally:
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
