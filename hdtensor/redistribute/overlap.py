"""A redistribute in two halves: its messages start now, and what they bring is asked for later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from hdtensor._rank import current_rank
from hdtensor.collectives import observe, p2p
from hdtensor.collectives.wire import is_host_only
from hdtensor.redistribute import jobs, messages
from hdtensor.redistribute.execute import BUCKET_BYTES, run_round
from hdtensor.redistribute.program import RankStep, compile_plan
from hdtensor.redistribute.steps import RedistributePlan


class Moving:
    """A redistribute of which this rank's first messages are on their way; call it for the new local tensor."""

    def __init__(
        self, plan: RedistributePlan, local: Tensor, *, reverse: bool = False, channel: int = 0
    ) -> None:
        """Do what comes before the first messages, and start those.

        Args:
            plan: What ``resolve`` returned; the same on every rank.
            local: This rank's local tensor under ``plan.src``; it must not be written before the call.
            reverse: Whether this is part of a backward pass.
            channel: As ``collectives.groups.message_channel``.
        """
        self._reverse = reverse
        self._steps = [step for _, step in compile_plan(plan, current_rank()).steps]
        self._local = local.detach()
        while self._steps and not _has_messages(self._steps[0]):
            self._run(self._steps.pop(0))
        self._finish: Callable[[], object] | None = None
        if self._steps:
            self._start(self._steps.pop(0), channel)

    def _start(self, step: RankStep, channel: int) -> None:
        new = jobs.new_local(step, self._local)
        parcel = messages.Parcel(step, jobs.plain(self._local), new)
        self._finish = messages.start([parcel], reverse=self._reverse, channel=channel)
        if step.op is None and not step.is_kept:
            jobs.copy_own(step, self._local, new)
        self._old, self._local = self._local, new

    def __call__(self) -> Tensor:
        """Wait for the messages, do what comes after them, and return the new local tensor."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
            del self._old  # what was sent had to stay as it was
        while self._steps:
            self._run(self._steps.pop(0))
        return self._local

    def _run(self, step: RankStep) -> None:
        state = [self._local]
        run_round([(0, step)], state, BUCKET_BYTES, reverse=self._reverse)
        self._local = state[0]


class _Whole(NamedTuple):
    """One message that is a whole local tensor, all that a rank does in a plan.

    Attributes:
        peer: The other rank.
        is_sent: Whether this rank sends it.
        shape: Shape of the new local tensor.
    """

    peer: int
    is_sent: bool
    shape: tuple[int, ...]


def start(
    plan: RedistributePlan, local: Tensor, *, reverse: bool = False, channel: int = 0
) -> Callable[[], Tensor]:
    """Start a redistribute; what is returned waits and gives the new local tensor.

    Arguments are those of ``Moving``. Where a rank only sends or receives one whole tensor it does without buffers.
    """
    whole = _whole_message(plan, current_rank())
    if whole is None or observe.listeners or not is_host_only() or not local.is_contiguous():
        return Moving(plan, local, reverse=reverse, channel=channel)
    if whole.is_sent:
        sent = jobs.plain(local.detach())
        work = p2p.start_one(sent, whole.peer, is_sent=True, reverse=reverse, channel=channel)
        return _OneMessage(work, sent, local.new_empty(whole.shape))
    new = local.new_empty(whole.shape)
    work = p2p.start_one(new, whole.peer, is_sent=False, reverse=reverse, channel=channel)
    return _OneMessage(work, new, new)


class _OneMessage:
    """One message on its way; call it for the new local tensor.

    No closure: the frame of one that fails would keep the message, and so its connection, after it was cleared.
    """

    __slots__ = ("_buffer", "_new", "_work")

    def __init__(self, work: dist.Work, buffer: Tensor, new: Tensor) -> None:
        self._work: dist.Work | None = work
        self._buffer: Tensor | None = buffer
        self._new = new

    def __call__(self) -> Tensor:
        """Wait for it."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._buffer = None
        return self._new


@functools.lru_cache(maxsize=16384)
def _whole_message(plan: RedistributePlan, rank: int) -> _Whole | None:
    """Return the message, if it is all that a rank does."""
    program = compile_plan(plan, rank)
    if len(program.steps) != 1:
        return None
    step = program.steps[0][1]
    found = [*step.sent, *step.received]
    if len(found) != 1 or step.copies or step.jobs or step.op is not None or step.fill is not None:
        return None
    message, is_sent = found[0], bool(step.sent)
    shape = program.shape if is_sent else step.shape
    if len(message.pieces) != 1 or not _is_all(message.pieces[0], shape):
        return None
    return _Whole(message.peer, is_sent, step.shape)


def _is_all(piece: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    return len(piece) == len(shape) and all(
        (part.start, part.stop) == (0, size) for part, size in zip(piece, shape, strict=True)
    )


def _has_messages(step: RankStep) -> bool:
    return bool(step.sent or step.received)
