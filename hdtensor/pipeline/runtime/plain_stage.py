"""A rank that has its stage alone runs it as on one device: on plain tensors, without anything of ours in between.

Of the first micro-batch of each shapes the stage runs on ``HDTensor``s: it shows which tensors go to other stages. The
first of all is computed once more on plain tensors without autograd, where nothing is sent: what goes to other stages, what the
model returns and what is drawn must be the same. The messages of both ways are the same, so that each rank decides alone.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hdtensor._torch_compat import pytree
from hdtensor.api.module_state import KeptState
from hdtensor.api.points import is_own_hook
from hdtensor.api.region_compile import not_compiled
from hdtensor.api.region_hooks import hooks_on
from hdtensor.api.region_watch import is_close
from hdtensor.collectives import observe
from hdtensor.errors import PipelineError
from hdtensor.pipeline.runtime.batches import map_tensors
from hdtensor.pipeline.runtime.crossings import Route
from hdtensor.pipeline.runtime.feed import MicroBatch
from hdtensor.pipeline.runtime.gradients import StepGradients
from hdtensor.pipeline.runtime.learned import Learned
from hdtensor.pipeline.runtime.parameters import LaneParameters
from hdtensor.pipeline.runtime.passage import Passage
from hdtensor.pipeline.runtime.stage_points import StagePoint
from hdtensor.tensor import HDTensor


#: So many calls may fill caches before a stage is taken to keep state.
_MAX_KEPT = 4

_log = logging.getLogger(__name__)


class PlainStage:
    """Decides which calls of the model run on plain tensors, and puts the leaves in place for them."""

    def __init__(
        self,
        model: nn.Module,
        parameters: LaneParameters,
        gradients: StepGradients,
        *,
        is_possible: bool,
    ) -> None:
        """Look at the model.

        Args:
            model: The model.
            parameters: The leaves.
            gradients: Has plain leaves beside.
            is_possible: Whether this rank has one stage, alone.
        """
        self._model, self._parameters, self._gradients = model, parameters, gradients
        self.is_possible = is_possible and not any(
            isinstance(buffer, HDTensor) for buffer in model.buffers()
        )
        self._leaves: dict[int, torch.Tensor] | None = None
        self._hook_number = -1
        self._is_hooked = False

    def prepare(self) -> None:
        """Get ready for a step."""
        self._leaves = None
        if not self.is_possible or observe.listeners or self._has_hooks():
            return
        found = {id(leaf): self._gradients.whole_leaf(leaf) for leaf in self._parameters.held()}
        whole = {number: leaf for number, leaf in found.items() if leaf is not None}
        if len(whole) == len(found):
            self._leaves = whole

    def takes(self, learned: Learned) -> bool:
        """Return whether a call runs on plain tensors."""
        return (
            self._leaves is not None
            and learned.last is not None
            and learned.manner.can_be_plain is True
        )

    def tries(self, learned: Learned) -> bool:
        """Return whether a call has to show first that it can."""
        return self._leaves is not None and learned.manner.can_be_plain is None

    def stand(self, is_plain: bool) -> None:
        """Have plain leaves stand in for the parameters, or those of the lane again."""
        if self._gradients.is_plain != is_plain:
            self._gradients.is_plain = is_plain
            self._parameters.stand(self._leaves if is_plain else None)

    def weights(self, is_plain: bool) -> Iterator[torch.Tensor]:
        """Yield the leaves that gradients come to."""
        for leaf in self._parameters.held():
            if leaf.requires_grad:
                yield self._leaves[id(leaf)] if is_plain and self._leaves else leaf

    def rehearse(self, call: StageCall) -> bool:
        """Return whether a call that has just ended gives the same on plain tensors.

        Args:
            call: The call.
        """
        trial = Rehearsal(call)
        self.stand(True)
        try:
            with _generators_kept(), torch.no_grad(), not_compiled(), call.as_it_began():
                trial.advance()
                return trial.gives_the_same()
        except Exception as error:  # any failure on plain tensors only means: not on plain tensors
            _log.debug("the stage does not run on plain tensors: %s", error)
            return False
        finally:
            self.stand(False)

    def look_at(self) -> KeptState:
        """Return what the model keeps from call to call, as it is now."""
        return KeptState(self._model)

    def _has_hooks(self) -> bool:
        """Whether a user's hooks inside the model want to see ``HDTensor``s.

        torch numbers all hooks in one sequence: without a new number nothing has changed.
        """
        if RemovableHandle.next_id != self._hook_number:
            self._hook_number = RemovableHandle.next_id
            self._is_hooked = any(
                not (is_own_hook(hook) or isinstance(hook, StagePoint))
                for module in self._model.modules()
                for hook in hooks_on(module)
            )
        return self._is_hooked


class StageCall(Passage):
    """A call of which this rank's only stage may run on plain tensors.

    Attributes:
        came: What came to the stage, as it was then: layers may work in place.
        output: What the model returned, of a call that is to be repeated.
    """

    def decide_by(self, stage: PlainStage, part: MicroBatch) -> StageCall:
        """Have a stage decide when the call begins; return the call.

        Args:
            stage: The stage.
            part: What the model is called with.
        """
        self._stage, self._part = stage, part
        self._tries = False
        self.came: list[torch.Tensor] = []
        self.output: Any = None
        return self

    def begin(self) -> None:
        """Decide: what earlier calls showed is known now."""
        self.is_plain = self._stage.takes(self.learned)
        self._tries = self._stage.tries(self.learned)

    def advance(self) -> None:
        """Run the call; then once more on plain tensors, if that was not tried."""
        self._start = _generators()
        if not self._tries:
            super().advance()
            return
        kept, self._data = self._stage.look_at(), _copied(self._part.data)
        super().advance()
        manner = self.learned.manner
        if self._has_drawn() or manner.num_kept > _MAX_KEPT:
            manner.can_be_plain = False
        elif kept.has_changed():  # once more would count twice; the next call may keep nothing
            manner.num_kept += 1
        else:
            manner.can_be_plain = self._stage.rehearse(self)
        self.came.clear()
        self.output = self._data = None

    @contextlib.contextmanager
    def as_it_began(self) -> Iterator[None]:
        """Have the model be called with what it was called with, whatever it did to that in place."""
        now, self._part.data = self._part.data, self._data
        try:
            yield
        finally:
            self._part.data = now

    def end_model(self, output: Any) -> None:
        """Keep the output of a call that is to be repeated; check one on plain tensors."""
        if self._tries:
            self.output = output
        self._check_draws()

    def send(self, x: torch.Tensor, path: Route, number: int) -> None:
        """Send a tensor, unless wrong random numbers may be in it."""
        self._check_draws()
        super().send(x, path, number)

    def receive(self, x: HDTensor, path: Route, number: int) -> torch.Tensor:
        """Return a tensor that comes to this stage."""
        found = super().receive(x, path, number)
        if self._tries:
            self.came.append(_local(found).detach().clone())
        return found

    def _has_drawn(self) -> bool:
        return not all(map(torch.equal, self._start, _generators()))

    def _check_draws(self) -> None:
        """Raise if a call on plain tensors has drawn: what it drew would depend on the plan.

        Raises:
            PipelineError: If it has.
        """
        if self.is_plain and self._has_drawn():
            raise PipelineError(
                "a layer draws random numbers now, and drew none when its stage was tried on plain tensors; neither a "
                "module's training flag nor the rate of a module that drops has changed since. Say it by one of "
                "these (module.train(), dropout.p), or pass use_regions=False to Runner."
            )


class Rehearsal(Passage):
    """A call on plain tensors that sends nothing, and receives what another one received."""

    is_rehearsal = True

    def __init__(self, first: StageCall) -> None:
        """Take what the other call received and sent.

        Args:
            first: That call.
        """
        (segment,) = first.segments
        super().__init__(0, [segment.stage], first.call, first.learned, may_leave=first.may_leave)
        self.is_plain = True
        self._first = first
        self._coming = iter(first.came)
        self._gone: list[torch.Tensor] = []
        self._output: Any = None

    def end_model(self, output: Any) -> None:
        """Keep the output to compare it."""
        self._output = output

    def send(self, x: torch.Tensor, path: Route, number: int) -> None:
        """Keep a tensor to compare it."""
        self._gone.append(x)

    def receive(self, x: HDTensor, path: Route, number: int) -> torch.Tensor:
        """Return what the other call received."""
        return next(self._coming)

    def gives_the_same(self) -> bool:
        """Return whether both calls gave the same to other stages, and returned the same where somebody needs it."""
        (segment,) = self._first.segments
        sent = [departure.tensor for departure in segment.departures]
        if len(sent) != len(self._gone) or not all(map(is_close, self._gone, sent)):
            return False
        mine, theirs = pytree.tree_leaves(self._output), pytree.tree_leaves(self._first.output)
        return self.may_leave or (len(mine) == len(theirs) and all(map(_is_same, mine, theirs)))


def _local(x: torch.Tensor) -> torch.Tensor:
    return x._local_tensor if isinstance(x, HDTensor) else x.detach()


def _is_same(mine: Any, theirs: Any) -> bool:
    """Whether both are of other ranks, or the same values."""
    if isinstance(theirs, HDTensor) and theirs.is_local:
        return is_close(mine, theirs)
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        is_other = isinstance(mine, HDTensor) and isinstance(theirs, HDTensor)
        return is_other or (mine.shape == theirs.shape and torch.equal(mine, theirs))
    return type(mine) is type(theirs)


def _generators() -> list[torch.Tensor]:
    """Return where torch's generators stand."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Have all generators stand afterwards where they stood before, Python's too."""
    states, of_python = _generators(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1])
        random.setstate(of_python)


def _copied(data: Any) -> Any:
    return map_tensors(data, lambda _, t: t.clone())
