"""What somebody sees while a command works: a bar after a second, and a way to stop it that keeps what there is."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


#: Seconds of work before a bar is shown.
_PATIENCE = 1.0


class ProgressBar:
    """A bar on stderr, if that is a terminal, shown once the work has taken a second and taken away at its end.

    Args:
        title: What is done.
        clock: Seconds from some start.
        console: Where it is shown; default stderr.
        is_quiet: Whether it is never shown: another process shows one.
    """

    def __init__(
        self,
        title: str,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
        *,
        is_quiet: bool = False,
    ) -> None:
        self._title = title
        self._clock = clock
        self._is_quiet = is_quiet
        self._console = console or Console(file=sys.stderr)
        self._start = clock()
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def is_shown(self) -> bool:
        """Whether the work has taken so long that there is a bar."""
        return self._progress is not None

    def update(self, done: float, total: float, text: str) -> None:
        """Say how far the work is.

        Args:
            done: How much is done.
            total: How much there is to do.
            text: A few words on what is done now.
        """
        if self._progress is None:
            is_early = self._clock() - self._start < _PATIENCE
            if is_early or self._is_quiet or not self._console.is_terminal:
                return
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task(self._title, total=total, text=text)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total, text=text)


class Interrupt:
    """Turns a first Ctrl-C into a wish to stop; a second one ends the program as usual."""

    def __init__(self) -> None:
        self._is_set = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._set)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def is_set(self) -> bool:
        """Return whether somebody wants to stop."""
        return self._is_set

    def _set(self, number: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
