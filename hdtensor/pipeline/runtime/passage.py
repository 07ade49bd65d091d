"""One micro-batch's call of the model on one rank, cut at the places where it enters this rank's stages."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hdtensor._torch_compat import number_of_next_node, number_of_node
from hdtensor.errors import PipelineError, PlanError
from hdtensor.ops.registry import implicit
from hdtensor.ops.special.move import move
from hdtensor.pipeline.runtime.crossings import (
    CHANGED,
    Arrival,
    Departure,
    Pending,
    Route,
    expect,
    hand_over,
    receive,
    route,
    send,
    spec_behind,
    stand_in,
    version_of,
)
from hdtensor.pipeline.runtime.learned import Border, Coming, Learned
from hdtensor.pipeline.runtime.turns import Turns
from hdtensor.placements import HDSpec
from hdtensor.tensor import HDTensor


#: Messages of unlike tensors have channels of their own: so many tensors cross in a call, and so many micro-batches are
#: on their way at once.
_MAX_CROSSINGS, _MAX_IN_FLIGHT = 1024, 2048


@dataclass(slots=True)
class Segment:
    """What one stage computes of one micro-batch: the graph between tensors that come and tensors that go.

    Attributes:
        stage: Number of the stage in its lane.
        arrivals: What comes from earlier stages.
        departures: What goes to later ones.
        loss: The sum of the micro-batch's losses, on the last stage.
    """

    stage: int
    arrivals: list[Arrival] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    loss: torch.Tensor | None = None

    def clear(self) -> None:
        """Let go of all tensors."""
        self.arrivals.clear()
        self.departures.clear()
        self.loss = None


class _Leave(BaseException):
    """Raised where all that follows in the model is other ranks' work."""


#: Calls that run now, innermost last.
_running: list[Passage] = []


def running() -> Passage | None:
    """Return the micro-batch's call that runs now; None outside of a runner."""
    return _running[-1] if _running else None


class Passage:
    """One micro-batch's way through the model on this rank.

    The model is called once. Where data enters a further stage of this rank the call waits, in a thread of its own, until
    the schedule's turn of that stage has come.

    Attributes:
        segments: This rank's stages in order.
        call: Calls the model.
        learned: What earlier calls with like micro-batches showed; this one adds to it.
        may_leave: Whether nobody on this rank needs what the call returns.
        is_plain: Whether this rank's stage runs on plain tensors, where it has a stage alone.
        is_rehearsal: Whether nothing is sent, and nothing noted: a trial.
    """

    is_rehearsal = False
    is_plain = False

    def __init__(
        self,
        microbatch: int,
        stages: Sequence[int],
        call: Callable[[], Any],
        learned: Learned,
        *,
        may_leave: bool,
    ) -> None:
        """Prepare the call.

        Args:
            microbatch: Number of the micro-batch in its lane.
            stages: Numbers of this rank's stages.
            call: Calls the model.
            learned: What earlier calls with like micro-batches showed; this one adds to it.
            may_leave: Whether nobody on this rank needs what the call returns.
        """
        self.segments = [Segment(stage) for stage in stages]
        self._microbatch = microbatch
        self.call = call
        self.learned = learned
        self.may_leave = may_leave
        self._last = -1
        self._ahead: dict[int, tuple[Route, Pending]] = {}
        self._now = 0 if stages[0] == 0 else -1
        self._num_crossings = self._num_calls = self._num_advanced = 0
        self._begins = [0] if stages[0] == 0 else []
        self._at: frozenset[int] | None = None
        self._met: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._thread = Turns(self._run) if len(stages) > 1 else None

    @property
    def stage(self) -> int | None:
        """Number of this rank's stage that runs now; None before the first one."""
        return self.segments[self._now].stage if self._now >= 0 else None

    def begin(self) -> None:
        """Called before the first ``advance``, when all earlier micro-batches' calls have begun."""

    def end_model(self, output: Any) -> None:
        """Called with what the model returns, before the loss function."""

    def advance(self) -> None:
        """Run up to the end of the next of this rank's stages."""
        if self._thread is None:
            self._run()
        else:
            self._thread.resume()
        self._num_advanced += 1

    def let_go(self) -> None:
        """Drop all that is on its way, after an error."""
        self._ahead.clear()
        self._met.clear()
        for segment in self.segments:
            segment.clear()

    def goes_on(self, border: Border) -> bool:
        """Return whether a layer inside of a stage takes plain tensors of its stage as they are; count the call then."""
        if not self.is_plain or border.begins or self._at not in (None, border.ranks):
            return False
        if (self.learned.foreign if border.is_home else self.learned.held).get(self._num_calls + 1):
            return False
        self._num_calls += 1
        return True

    def cross(self, tensors: Mapping[Any, torch.Tensor], border: Border) -> list[torch.Tensor]:
        """Bring the tensors that a layer is called with to its stage.

        Tensors that are plain on all ranks (masks, positions) stay. On a rank whose stage runs on plain tensors those that
        the stage made are known by their places among the arguments, as an earlier call showed them.

        =====================================  ======================================================
        a tensor                               what is done
        =====================================  ======================================================
        of this stage                          nothing
        that the stage has met before          what it got then
        of other ranks, or any at a turn       it crosses
        of an earlier stage of the same ranks  it is handed over, so that each stage's graph ends there
        =====================================  ======================================================

        Args:
            tensors: What the layer takes, by its place among the arguments.
            border: Where the layer is.
        """
        spec = border.spec
        if border.begins:
            self._begin(border)
        elif self._at not in (None, border.ranks):
            raise PlanError(
                f"a layer on ranks {list(spec.ranks)} is called after one of the next stage, on ranks "
                f"{sorted(self._at or ())}. A pipeline passes its stages once, in order: put layers that call one "
                f"another on one stage, as those of an encoder and a decoder."
            )
        self._num_calls += 1
        if border.is_home:
            self.learned.check_foreign(self._num_calls, tensors, border)
        held = {} if border.is_home else self._held(tensors, spec)
        found: list[torch.Tensor] = []
        for place, x in tensors.items():
            if isinstance(x, HDTensor):
                found.append(self._follow(x, border))
            else:
                found.append(self._depart_once(x, held[place]) if place in held else x)
        return found

    def _held(self, tensors: Mapping[Any, torch.Tensor], spec: HDSpec) -> Mapping[Any, Route]:
        """Return the ways of plain tensors that this rank's stage made; note them where they are no plain ones yet."""
        if not self.is_plain:
            local = {i: x for i, x in tensors.items() if isinstance(x, HDTensor) and x.is_local}
            if local:
                self.learned.held[self._num_calls] = {
                    i: route(x._spec, spec_behind(spec, x.ndim)) for i, x in local.items()
                }
            return {}
        return self.learned.checked_held(self._num_calls, tensors, spec)

    def _begin(self, border: Border) -> None:
        self._met.clear()
        self._at = border.ranks
        if not border.is_home:
            return
        if self._now + 1 == len(self.segments):
            raise PlanError(
                f"the model calls a layer that begins a stage on ranks {sorted(border.ranks)} more often than the plan has "
                f"stages there. Layers that are called several times must be inside one stage."
            )
        if self._now >= 0:
            self._pause()
        self._now += 1
        self._begins.append(number_of_next_node())

    def _follow(self, x: HDTensor, border: Border) -> torch.Tensor:
        """Return a tensor on the stage that now runs."""
        if id(x) in self._met:
            return self._found_before(x)
        spec = border.spec
        stays = x._spec.spec is spec or border.ranks == set(x.spec.ranks)
        found: torch.Tensor
        if border.is_turn or not stays:
            found = self._cross(x, spec_behind(spec, x.ndim), stays and x.is_local)
        else:
            origin = self._origin(x)
            if origin is self.segments[self._now]:
                return x
            departure, arrival = hand_over(x, route(x._spec, x.spec))
            origin.departures.append(departure)
            self.segments[self._now].arrivals.append(arrival)
            found = arrival.leaf
        # The tensor is kept with what it became: its number would be another's otherwise.
        self._met[id(x)] = (x, found, version_of(x))
        return found

    def _found_before(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a tensor became; raise ``PipelineError`` if it has been changed since."""
        _, found, version = self._met[id(x)]
        if version_of(x) != version:
            raise PipelineError(CHANGED)
        return found

    def _origin(self, x: torch.Tensor) -> Segment:
        """Return which of this rank's stages made a tensor; the one that runs if no gradient comes back to it."""
        present = self.segments[self._now]
        if len(self.segments) == 1 or not _is_local(x) or not x.requires_grad:
            return present
        if x.grad_fn is None:
            homes = (s for s in self.segments if any(a.leaf is x for a in s.arrivals))
            return next(homes, present)
        place = bisect.bisect_right(self._begins, number_of_node(x.grad_fn)) - 1
        return self.segments[max(place, 0)]

    def _cross(self, x: HDTensor, spec: HDSpec, hands_over: bool) -> torch.Tensor:
        path = route(x._spec, spec)
        if hands_over:
            self._last = self._next_number()
            departure, arrival = hand_over(x, path)
            self._origin(x).departures.append(departure)
            self.segments[self._now].arrivals.append(arrival)
            return arrival.leaf
        number = self._next_number()
        if not set(x.spec.ranks).isdisjoint(spec.ranks):
            moved: HDTensor = move(x, spec, None)  # inside one stage
            return moved
        if x.is_local:
            return self._depart(x, path, number)
        if path.after.index is None:
            return stand_in(x, path)
        self._last = number
        return self.receive(x, path, number)

    def _depart_once(self, x: torch.Tensor, path: Route) -> torch.Tensor:
        """Take a plain tensor that this rank's stage made to another stage, once."""
        if id(x) not in self._met:
            self._met[id(x)] = (x, self._depart(x, path, self._next_number()), version_of(x))
        return self._found_before(x)

    def _depart(self, x: torch.Tensor, path: Route, number: int) -> HDTensor:
        self._last = number
        self.send(x, path, number)
        if self.may_leave and number == self.learned.last:
            raise _Leave
        return stand_in(x, path)

    def _next_number(self) -> int:
        self._num_crossings += 1
        return self._num_crossings - 1

    def send(self, x: torch.Tensor, path: Route, number: int) -> None:
        """Send a tensor of this rank's to its next stage.

        Args:
            x: The tensor.
            path: Its way.
            number: Of its crossing.
        """
        self._origin(x).departures.append(send(x, path, self._channel(number)))

    def receive(self, x: HDTensor, path: Route, number: int) -> torch.Tensor:
        """Return a tensor that comes to this rank's stage.

        Args:
            x: Its stand-in from before.
            path: Its way.
            number: Of its crossing.
        """
        segment, channel = self.segments[self._now], self._channel(number)
        device = x._local_tensor.device
        known = self.learned.coming.setdefault(segment.stage, [])
        if all(coming.number != number for coming in known):
            known.append(Coming(number, path, device))
        coming = self._started(number, path) or expect(path, device, channel)
        arrival = receive(x, path, channel, coming, is_plain=self.is_plain)
        segment.arrivals.append(arrival)
        return arrival.leaf

    @property
    def has_ended(self) -> bool:
        """Whether all stages of this rank have run, so that all that goes to later ones is known."""
        return self._num_advanced == len(self.segments)

    def expect(self, stage: int) -> bool:
        """Start receiving what will come to a stage, as far as it is known; return whether an earlier call showed it."""
        for number, path, device in self.learned.coming.get(stage, ()):
            if number not in self._ahead and number >= self._num_crossings:
                moving = expect(path, device, self._channel(number))
                self._ahead[number] = (path, moving)
        return self.learned.last is not None

    def _started(self, number: int, path: Route) -> Pending | None:
        """Return what receives a tensor already.

        Raises:
            PipelineError: If something else was expected.
        """
        if number not in self._ahead:
            return None
        expected, moving = self._ahead.pop(number)
        if expected is not path:
            raise PipelineError(
                f"the model sends {path.after} where it sent {expected.after} for an earlier micro-batch of the same "
                f"shapes. What goes from stage to stage may depend on shapes, but not on values."
            )
        return moving

    def _channel(self, number: int) -> int:
        """Return the channel of a crossing's messages."""
        place = self._microbatch % _MAX_IN_FLIGHT * _MAX_CROSSINGS + number % _MAX_CROSSINGS
        return 1 + place

    def _run(self) -> None:
        _running.append(self)
        try:
            self.call()
        except _Leave:
            pass
        else:
            self.learned.last = self._last
        finally:
            self._met.clear()
            _running.remove(self)

    def _pause(self) -> None:
        assert self._thread is not None, "one stage needs no turns"
        _running.remove(self)
        before, implicit[0] = implicit[0], False
        try:
            self._thread.pause()
        finally:
            implicit[0] = before
            _running.append(self)


def _is_local(x: torch.Tensor) -> bool:
    """Whether this rank has a part of a tensor; of a plain one it has all."""
    return not isinstance(x, HDTensor) or x.is_local
