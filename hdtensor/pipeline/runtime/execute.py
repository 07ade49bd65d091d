"""One rank's part of a step: the actions of its schedule, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from hdtensor._torch_compat import backward_for_input, backward_for_weight
from hdtensor.pipeline.runtime.passage import Passage, Segment
from hdtensor.pipeline.runtime.recording import Recording, waited
from hdtensor.pipeline.schedule.actions import GRADIENT_KINDS, Action, Kind


_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward for the input",
    Kind.BACKWARD_WEIGHT: "backward for the weights",
}


def describe(action: Action) -> str:
    """Return an action in words.

    >>> describe(Action(1, Kind.BACKWARD, 3))
    '1B3 (stage 1, backward, micro-batch 3)'
    """
    stage, kind, microbatch = action
    return f"{action} (stage {stage}, {_WORDS[kind]}, micro-batch {microbatch})"


#: For so many actions after the present one messages are received as they come.
_AHEAD = 2


class Split(NamedTuple):
    """What the first part of a backward leaves for the second.

    Attributes:
        groups: torch's groups of weights with the gradients that came to them; None: all is left to do.
        is_done: Whether nothing is left to do.
    """

    groups: Any
    is_done: bool = False


class Executor:
    """Runs a row of actions.

    Attributes:
        is_training: Whether backward follows.
    """

    def __init__(
        self,
        stages: Sequence[int],
        begin: Callable[[int], Passage],
        weights: Callable[[bool], Iterable[Any]],
        *,
        around: Callable[[Action], AbstractContextManager[object]],
        stand: Callable[[bool], object],
        is_split: bool = True,
    ) -> None:
        """Prepare a step.

        Args:
            stages: Numbers of this rank's stages.
            begin: Gives a micro-batch's call of the model, which sets the loss of the last stage.
            weights: This rank's leaves, those of calls on plain tensors if it is passed True.
            around: Gives what holds while an action runs.
            stand: Has leaves stand in for the parameters, plain ones if it is passed True.
            is_split: Whether a backward's part for inputs leaves weights to the other part; else it is all of it.
        """
        self._is_split = is_split
        self.is_training = True
        self._stages = tuple(stages)
        self._begin = begin
        self._weights = weights
        self._around = around
        self._stand = stand
        self._passages: dict[int, Passage] = {}
        self._on_their_way: list[Callable[[], object]] = []
        self._splits: dict[tuple[int, int], Split] = {}

    def run(
        self, actions: Sequence[Action], *, is_training: bool, recording: Recording | None = None
    ) -> None:
        """Run all actions in their order; return when what this rank sends has arrived.

        Args:
            actions: This rank's.
            is_training: Whether backward follows.
            recording: Notes the actions.
        """
        self.is_training = is_training
        expected: set[int] = set()
        for i, action in enumerate(actions):
            with self._around(action):
                for place in range(i, min(i + 1 + _AHEAD, len(actions))):
                    if place not in expected and self._expect(actions[place]):
                        expected.add(place)
                start, before = time.perf_counter(), waited[0]
                self._run(action)
                if recording is not None:
                    end = time.perf_counter()
                    recording.note(action, start, end, waited[0] - before)
        for moving in self._on_their_way:
            moving()
        self._on_their_way.clear()

    def let_go(self) -> None:
        """Drop all that is on its way, after an error."""
        for passage in self._passages.values():
            passage.let_go()
        self._passages.clear()
        self._on_their_way.clear()
        self._splits.clear()

    def _run(self, action: Action) -> None:
        passage = self._passage(action.microbatch)
        if action.kind is Kind.FORWARD and action.stage == self._stages[0]:
            passage.begin()
        self._stand(passage.is_plain)
        match action.kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD:
                self._backward(self._segment(action))
                self._end(action)
            case Kind.BACKWARD_INPUT:
                self._backward_input(action)
            case Kind.BACKWARD_WEIGHT:
                self._backward_weight(action)
                self._end(action)

    def _expect(self, action: Action) -> bool:
        """Start receiving what an action needs, as far as it is known; return whether all of it is."""
        if action.kind is Kind.FORWARD:
            return self._passage(action.microbatch).expect(action.stage)
        if action.kind not in GRADIENT_KINDS:
            return True
        passage = self._passages.get(action.microbatch)
        if passage is None or not passage.has_ended:
            return False
        for departure in self._segment(action).departures:
            if departure.tensor.requires_grad:
                departure.expect_gradient()
        return True

    def _passage(self, number: int) -> Passage:
        passage = self._passages.get(number)
        if passage is None:
            passage = self._passages[number] = self._begin(number)
        return passage

    def _segment(self, action: Action) -> Segment:
        return self._passages[action.microbatch].segments[self._stages.index(action.stage)]

    def _forward(self, action: Action) -> None:
        self._passage(action.microbatch).advance()
        if not self.is_training:
            for departure in self._segment(action).departures:
                departure.wait_sent()
            self._end(action)

    def _end(self, action: Action) -> None:
        """Let go of what a stage held for a micro-batch."""
        self._segment(action).clear()
        if action.stage == (self._stages[0] if self.is_training else self._stages[-1]):
            del self._passages[action.microbatch]

    def _backward(self, segment: Segment) -> None:
        tensors, grads = self._outputs(segment)
        if tensors:
            torch.autograd.backward(tensors, grads)
        self._send_gradients(segment)

    def _outputs(self, segment: Segment) -> tuple[list[Any], list[Any]]:
        """Return the tensors that backward begins with, and their gradients."""
        tensors: list[Any] = []
        grads: list[Any] = []
        if segment.loss is not None and segment.loss.requires_grad:
            tensors.append(segment.loss)
            grads.append(None)
        going = [d for d in segment.departures if d.tensor.requires_grad]
        for departure in going:
            departure.expect_gradient()
        for departure in going:
            tensors.append(departure.tensor)
            grads.append(departure.gradient())
        for departure in segment.departures:
            departure.wait_sent()
        return tensors, grads

    def _send_gradients(self, segment: Segment) -> None:
        self._on_their_way += [a.send_gradient() for a in segment.arrivals if a.leaf.requires_grad]

    def _backward_input(self, action: Action) -> None:
        segment, key = self._segment(action), (action.stage, action.microbatch)
        inputs: list[torch.Tensor] = [a.leaf for a in segment.arrivals if a.leaf.requires_grad]
        if not inputs:  # nobody waits
            self._splits[key] = Split(None)
            return
        if not self._is_split:
            self._backward(segment)
            self._splits[key] = Split(None, is_done=True)
            return
        tensors, grads = self._outputs(segment)
        grads = [
            torch.ones_like(t) if g is None else g for t, g in zip(tensors, grads, strict=True)
        ]
        weights = self._weights(self._passages[action.microbatch].is_plain)
        _, groups = backward_for_input(tensors, grads, inputs, iter(weights))
        self._splits[key] = Split(groups)
        self._send_gradients(segment)

    def _backward_weight(self, action: Action) -> None:
        split = self._splits.pop((action.stage, action.microbatch))
        if split.is_done:
            return
        if split.groups is None:
            self._backward(self._segment(action))
        else:
            weights = self._weights(self._passages[action.microbatch].is_plain)
            backward_for_weight(iter(weights), split.groups)
