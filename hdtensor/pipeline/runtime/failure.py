"""How a failure on one rank ends a step on all ranks: soon, and with the name of the rank that failed first.

A rank that fails writes so into the process group's store, then closes the groups that others may wait in. Their waits end
with an error of the transport; they read in the store who was first, close theirs in turn, and raise. Who is caught
in a wait that does not end so (a collective of a group that somebody still refers to) is ended by a watcher.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from hdtensor.collectives import groups
from hdtensor.errors import PipelineError
from hdtensor.pipeline.runtime.execute import describe
from hdtensor.pipeline.schedule.actions import Action


#: Between two looks of the watcher at the store, seconds.
WATCH_SECONDS = 1.0
#: After another rank failed, this one's own waits should have ended by then, seconds.
GRACE_SECONDS = 10.0
#: How long a rank whose connection broke waits for others to say why, seconds.
BLAME_SECONDS = 3.0
#: How long rank 0 stays after a failure, for ranks that have not heard of it, seconds.
STAY_SECONDS = 3.0

#: How long the program's end waits for watchers that look at the store, seconds.
END_SECONDS = 5.0

_counter = itertools.count()
_is_ending = threading.Event()
_guards: weakref.WeakSet[FailureGuard] = weakref.WeakSet()


class FailureGuard:
    """Watches the steps of one runner on this rank."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Get ready; every rank of the world makes its guards in one order.

        Args:
            ranks: All ranks that take part in steps.
        """
        self._ranks = tuple(ranks)
        self._prefix = f"hdtensor/pipeline/{next(_counter)}"
        self._doing: object = ""
        self._store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
        self._running = threading.Event()
        self._caught_since: float | None = None
        self._silent: set[int] = set()
        self._first: str | None = None
        self._main: int | None = None
        self._watcher = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._running),
            daemon=True,
            name="hdtensor-watch",
        )
        self._watcher.start()
        weakref.finalize(self, self._running.set)  # the watcher sees that there is nothing to watch
        _guards.add(self)

    def doing(self, what: object) -> None:
        """Note what this rank does now, for messages.

        Args:
            what: Its text is made where a message needs it.
        """
        self._doing = what

    @contextlib.contextmanager
    def step(self, let_go: Callable[[], object]) -> Iterator[None]:
        """Run a step; an error in it is told to all ranks.

        Args:
            let_go: Drops all that is on its way; called after an error.

        Raises:
            PipelineError: If another rank failed before.
        """
        self._main = threading.get_ident()
        self._running.set()
        try:
            yield
        except Exception as error:
            self._running.clear()
            let_go()
            raise self._told(error) from error
        except (
            BaseException
        ) as error:  # an interrupt, or the program's end: the others have to hear of it too
            self._running.clear()
            let_go()
            self._told(error)
            raise
        finally:
            self._running.clear()

    def _told(self, error: BaseException) -> BaseException:
        """Tell the others of an error; return what to raise."""
        rank = dist.get_rank()
        is_of_transport = _is_of_transport(error)
        _clear_frames(error, only_own=not is_of_transport)
        if is_of_transport:
            first = self._blame(rank, error)
        else:
            said = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = f"rank {rank} failed{self._where()}: {said}"
            first = self._tell(text)
        with contextlib.suppress(Exception):
            groups.close_groups()
        self._stay_for_others(rank)
        if first.startswith(f"rank {rank} failed"):
            error.add_note(f"hdtensor: this is rank {rank}, the first that failed{self._where()}.")
            return error
        return PipelineError(
            f"the step ended because {first.rstrip('.')}. This is rank {rank}{self._where()}. Its groups are closed: "
            f"mend the cause, start the processes again, and go on from a checkpoint."
        )

    def _stay_for_others(self, rank: int) -> None:
        """Have the process that usually keeps the store wait until all can have read in it who was first."""
        with contextlib.suppress(Exception):
            self._store.set(f"{self._prefix}/heard/{rank}", "1")
            until = time.monotonic() + STAY_SECONDS
            heard = [f"{self._prefix}/heard/{r}" for r in self._ranks if r not in self._silent]
            while rank == 0 and time.monotonic() < until and not self._store.check(heard):
                time.sleep(0.05)

    def _where(self) -> str:
        what = describe(self._doing) if isinstance(self._doing, Action) else self._doing
        return f" in {what}" if what else ""

    def _tell(self, text: str) -> str:
        """Write that a rank failed, unless another was first; return who was first."""
        try:
            self._store.set(f"{self._prefix}/saw/{dist.get_rank()}", "1")
            return self._store.compare_set(f"{self._prefix}/first", "", text).decode() or text
        except Exception:  # the store went with its process
            return self._first or (
                "the process that keeps the process group's store is gone (usually that of rank 0)"
            )

    def _blame(self, rank: int, error: BaseException) -> str:
        """Find out why a connection broke: another rank says so, or does not answer any more."""
        until = time.monotonic() + BLAME_SECONDS
        with contextlib.suppress(Exception):
            self._store.set(f"{self._prefix}/saw/{rank}", "1")
            self._store.set(f"{self._prefix}/asked", "1")
            with contextlib.suppress(Exception):
                groups.close_groups()  # now, so that all notice
            while time.monotonic() < until:
                if self._store.check([f"{self._prefix}/first"]):
                    return self._store.get(f"{self._prefix}/first").decode()
                time.sleep(0.1)
            # Who runs a step and has not noticed anything answers by its watcher.
            silent = [r for r in self._ranks if not self._store.check([f"{self._prefix}/saw/{r}"])]
            self._silent.update(silent)
            if silent:
                who = ", ".join(map(str, silent))
                return self._tell(
                    f"rank {who} does not answer any more; its process has ended, or hangs"
                )
        return self._tell(f"a connection of rank {rank} broke: {str(error)[:200]}")

    def check(self) -> bool:
        """End this process if it still waits long after another rank failed; return whether to go on watching."""
        try:
            failed = self._look()
        except Exception:  # main's own waits will tell
            return False
        if not failed or not self._running.is_set():
            self._caught_since = None
            return True
        now = time.monotonic()
        self._caught_since = self._caught_since or now
        if now - self._caught_since > GRACE_SECONDS:
            self._end()
        return True

    def close(self) -> None:
        """End the watcher, after what it is at; only when the program ends."""
        self._running.set()
        self._watcher.join(END_SECONDS)

    def _look(self) -> bool:
        """Answer who asks which ranks are there; return whether one has failed, and keep which."""
        rank = dist.get_rank()
        if self._first is None and self._store.check([f"{self._prefix}/asked"]):
            self._store.set(f"{self._prefix}/saw/{rank}", "1")
        if not self._store.check([f"{self._prefix}/first"]):
            return False
        self._first = self._store.get(f"{self._prefix}/first").decode()
        self._store.set(f"{self._prefix}/heard/{rank}", "1")
        return True

    def _end(self) -> None:
        frame = sys._current_frames().get(self._main or -1)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        first = (self._first or "").rstrip(".")
        sys.stderr.write(
            f"{stack}hdtensor.errors.PipelineError: the step ended because {first}. This is rank "
            f"{dist.get_rank()}{self._where()}, which was still waiting and is ended now.\n"
        )
        sys.stderr.flush()
        os._exit(1)


def _watch(guard: weakref.ref[FailureGuard], running: threading.Event) -> None:
    """Look at the store while steps run, as long as there is a guard."""
    while True:
        running.wait()
        if _is_ending.wait(WATCH_SECONDS):
            return
        now = guard()
        if now is None or not now.check():
            return
        del now


@atexit.register
def _end_watchers() -> None:
    """Let no watcher be in the store when the interpreter ends: that would abort the process."""
    _is_ending.set()
    for guard in list(_guards):
        guard.close()


def _clear_frames(error: BaseException, *, only_own: bool) -> None:
    """Clear frames that an error keeps: those that waited refer to connections, in which others would wait on.

    Args:
        error: The error.
        only_own: Leave the frames of others, whose values whoever debugs the error wants to see.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if not only_own or frame.f_globals.get("__name__", "").startswith("hdtensor."):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
        error = error.__context__  # type: ignore[assignment]


def _is_of_transport(error: BaseException) -> bool:
    """Whether an error may be another rank's fault: a broken connection or a timeout."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error)
    return type(error) is RuntimeError and (
        "gloo" in text or "NCCL" in text or "Connection" in text
    )
