"""One micro-batch's call of the model on one rank, cut at the places where it enters this rank's stages."""

from __future__ import annotations

import bisect
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hdtensor._rank import current_rank
from hdtensor._torch_compat import number_of_next_node, number_of_node
from hdtensor.errors import PipelineError, PlanError
from hdtensor.ops.registry import implicit
from hdtensor.ops.special.move import move
from hdtensor.pipeline.runtime.crossings import (
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
)
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


@dataclass(slots=True)
class Learned:
    """What a call with micro-batches of some shapes showed.

    Attributes:
        coming: Stage -> what arrives there.
        last: Number of the last crossing in which this rank takes part; None before a call has ended.
    """

    coming: dict[int, list[Coming]] = field(default_factory=dict)
    last: int | None = None


class _Leave(BaseException):
    """Raised where all that follows in the model is other ranks' work."""


class Coming(NamedTuple):
    """A tensor that arrives in each call with such a micro-batch.

    Attributes:
        number: Number of its crossing in the call.
        path: Its way.
        device: Where it is needed.
    """

    number: int
    path: Route
    device: torch.device


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
    """

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
        self._call = call
        self._learned = learned
        self._may_leave = may_leave
        self._last = -1
        self._ahead: dict[int, tuple[Route, Pending]] = {}
        self._now = 0 if stages[0] == 0 else -1
        self._num_crossings = 0
        self._begins = [0] if stages[0] == 0 else []
        self._at: frozenset[int] | None = None
        self._met: dict[int, tuple[HDTensor, HDTensor]] = {}
        self._thread = _Turns(self._run) if len(stages) > 1 else None

    @property
    def stage(self) -> int | None:
        """Number of this rank's stage that runs now; None before the first one."""
        return self.segments[self._now].stage if self._now >= 0 else None

    def advance(self) -> None:
        """Run up to the end of the next of this rank's stages."""
        if self._thread is None:
            self._run()
        else:
            self._thread.resume()

    def let_go(self) -> None:
        """Drop all that is on its way, after an error."""
        self._ahead.clear()
        self._met.clear()
        for segment in self.segments:
            segment.clear()

    def cross(
        self, tensors: Sequence[HDTensor], spec: HDSpec, *, is_turn: bool, begins: bool
    ) -> list[HDTensor]:
        """Bring tensors to a layer's stage.

        =====================================  ======================================================
        a tensor                               what is done
        =====================================  ======================================================
        of this stage                          nothing
        that the stage has met before          what it got then
        of other ranks, or any at a turn       it crosses
        of an earlier stage of the same ranks  it is handed over, so that each stage's graph ends there
        =====================================  ======================================================

        Args:
            tensors: What the layer takes.
            spec: The spec of hidden states on the stage.
            is_turn: Whether a stage begins though the ranks stay.
            begins: Whether a stage begins.
        """
        if begins:
            self._begin(spec)
        elif self._at not in (None, frozenset(spec.ranks)):
            raise PlanError(
                f"a layer on ranks {list(spec.ranks)} is called after one of the next stage, on ranks "
                f"{sorted(self._at or ())}. A pipeline passes its stages once, in order: put layers that call one "
                f"another on one stage, as those of an encoder and a decoder."
            )
        return [self._follow(x, spec, is_turn) for x in tensors]

    def _begin(self, spec: HDSpec) -> None:
        self._met.clear()
        self._at = frozenset(spec.ranks)
        if current_rank() not in spec.ranks:
            return
        if self._now + 1 == len(self.segments):
            raise PlanError(
                f"the model calls a layer that begins a stage on ranks {list(spec.ranks)} more often than the plan has "
                f"stages there. Layers that are called several times must be inside one stage."
            )
        if self._now >= 0:
            self._pause()
        self._now += 1
        self._begins.append(number_of_next_node())

    def _follow(self, x: HDTensor, spec: HDSpec, is_turn: bool) -> HDTensor:
        """Return a tensor on the stage that now runs."""
        if id(x) in self._met:
            return self._met[id(x)][1]
        stays = set(x.spec.ranks) == set(spec.ranks)
        if is_turn or not stays:
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
        self._met[id(x)] = (x, found)
        return found

    def _origin(self, x: HDTensor) -> Segment:
        """Return which of this rank's stages made a tensor; the one that runs if no gradient comes back to it."""
        present = self.segments[self._now]
        if not x.is_local or not x.requires_grad or len(self.segments) == 1:
            return present
        if x.grad_fn is None:
            homes = (s for s in self.segments if any(a.leaf is x for a in s.arrivals))
            return next(homes, present)
        place = bisect.bisect_right(self._begins, number_of_node(x.grad_fn)) - 1
        return self.segments[max(place, 0)]

    def _cross(self, x: HDTensor, spec: HDSpec, hands_over: bool) -> HDTensor:
        number = self._num_crossings
        self._num_crossings += 1
        path = route(x._spec, spec)
        if hands_over:
            self._last = number
            departure, arrival = hand_over(x, path)
            self._origin(x).departures.append(departure)
            self.segments[self._now].arrivals.append(arrival)
            return arrival.leaf
        if not set(x.spec.ranks).isdisjoint(spec.ranks):
            moved: HDTensor = move(x, spec, None)  # inside one stage
            return moved
        channel = self._channel(number)
        if x.is_local:
            self._last = number
            self._origin(x).departures.append(send(x, path, channel))
            if self._may_leave and number == self._learned.last:
                raise _Leave
            return stand_in(x, path)
        if path.after.index is None:
            return stand_in(x, path)
        self._last = number
        segment = self.segments[self._now]
        device = x._local_tensor.device
        known = self._learned.coming.setdefault(segment.stage, [])
        if all(coming.number != number for coming in known):
            known.append(Coming(number, path, device))
        arrival = receive(
            x, path, channel, self._started(number, path) or expect(path, device, channel)
        )
        segment.arrivals.append(arrival)
        return arrival.leaf

    def expect(self, stage: int) -> None:
        """Start receiving what will come to a stage, as far as it is known."""
        for number, path, device in self._learned.coming.get(stage, ()):
            if number not in self._ahead and number >= self._num_crossings:
                moving = expect(path, device, self._channel(number))
                self._ahead[number] = (path, moving)

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
            self._call()
        except _Leave:
            pass
        else:
            self._learned.last = self._last
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


class _Turns:
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
