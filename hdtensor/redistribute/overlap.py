"""A redistribute in two halves: its messages start now, and what they bring is asked for later."""

from __future__ import annotations

from torch import Tensor

from hdtensor._rank import current_rank
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
        self._finish = None
        if self._steps:
            step = self._steps.pop(0)
            new = jobs.new_local(step, self._local)
            parcel = messages.Parcel(step, jobs.plain(self._local), new)
            self._finish = messages.start([parcel], reverse=reverse, channel=channel)
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


def _has_messages(step: RankStep) -> bool:
    return bool(step.sent or step.received)
