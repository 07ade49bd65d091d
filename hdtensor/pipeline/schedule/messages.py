"""Which messages a lane's actions need and send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hdtensor.pipeline.lanes import Lane
from hdtensor.pipeline.schedule.actions import GRADIENT_KINDS, Action, Kind


class Flow(NamedTuple):
    """All messages of one direction of traffic from one place to another; they keep their order.

    Attributes:
        src: The place that sends.
        dst: The place that receives.
        is_forward: Whether they are activations; else gradients.
    """

    src: int
    dst: int
    is_forward: bool


class Message(NamedTuple):
    """What one action sends another.

    Attributes:
        flow: From where to where.
        edge: Numbers of the two stages, the sender's first.
        microbatch: Number of the micro-batch.
    """

    flow: Flow
    edge: tuple[int, int]
    microbatch: int

    def __str__(self) -> str:
        what = "activations" if self.flow.is_forward else "gradients"
        return (
            f"{what} of micro-batch {self.microbatch} from stage {self.edge[0]} to {self.edge[1]}"
        )


class Traffic:
    """The messages of a lane's actions."""

    def __init__(self, lane: Lane) -> None:
        """Read the lane's edges."""
        self.places_of: defaultdict[int, list[int]] = defaultdict(list)
        for number, place in enumerate(lane.places):
            for stage in place.stages:
                self.places_of[stage].append(number)
        self._before: defaultdict[int, list[int]] = defaultdict(list)
        self._after: defaultdict[int, list[int]] = defaultdict(list)
        for edge in lane.edges:
            self._before[edge.dst].append(edge.src)
            self._after[edge.src].append(edge.dst)

    def needs(self, action: Action) -> list[Action]:
        """Return the actions of other stages whose results an action needs.

        Of a backward it names the part for the input, whether the row has it whole or in parts.
        """
        stage, kind, microbatch = action
        if kind is Kind.FORWARD:
            return [Action(s, Kind.FORWARD, microbatch) for s in self._before[stage]]
        if kind in GRADIENT_KINDS:
            return [Action(s, Kind.BACKWARD_INPUT, microbatch) for s in self._after[stage]]
        return []

    def received(self, place: int, action: Action) -> list[Message]:
        """Return the messages that an action at a place needs."""
        return [
            Message(
                Flow(peer, place, action.kind is Kind.FORWARD),
                (need.stage, action.stage),
                need.microbatch,
            )
            for need in self.needs(action)
            for peer in self.places_of[need.stage]
            if peer != place
        ]

    def sent(self, place: int, action: Action) -> list[Message]:
        """Return the messages that an action at a place sends, those for the nearest stages first."""
        stage, kind, microbatch = action
        is_forward = kind is Kind.FORWARD
        if not is_forward and kind not in GRADIENT_KINDS:
            return []
        peers = self._after[stage] if is_forward else reversed(self._before[stage])
        return [
            Message(Flow(place, peer, is_forward), (stage, to), microbatch)
            for to in peers
            for peer in self.places_of[to]
            if peer != place
        ]

    def flows(self, rows: Sequence[Sequence[Action]]) -> dict[Flow, list[Message]]:
        """Return all messages by flow, in the order in which they are sent."""
        found: defaultdict[Flow, list[Message]] = defaultdict(list)
        for place, row in enumerate(rows):
            for action in row:
                for message in self.sent(place, action):
                    found[message.flow].append(message)
        return found
