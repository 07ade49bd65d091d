"""Does every place come to its end? An emulation of FIFO channels that no timing can mislead.

Each place carries out its row strictly in order: it posts the receives of an action, waits for them,
computes, posts its sends. A channel carries, from either end, one message after another: a message passes
when its send and its receive are both first in line. A receiver that needs a message posts those that
the sender sends before it, too, since it knows the sender's row.

Nothing here chooses: who waits for what does not depend on who is faster (a Kahn network). So one run
that comes to its end proves that every run does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hdtensor.pipeline.lanes import Lane
from hdtensor.pipeline.schedule.actions import GRADIENT_KINDS, Action, Kind
from hdtensor.pipeline.schedule.messages import Flow, Message, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How messages travel.

    Attributes:
        channels: "traffic" for a channel for each pair of places, direction of sending, and kind of
            traffic (forward or backward); "pair" for one channel for all that two places send each other.
        rendezvous: Whether a place waits after an action until its messages are taken; else it goes on,
            and they wait in line.
        posted_ahead: For how many actions after the next one receives are posted; None for all.
    """

    channels: Literal["traffic", "pair"] = "traffic"
    rendezvous: bool = False
    posted_ahead: int | None = 0


class Waiting(NamedTuple):
    """Where a place waits for ever.

    Attributes:
        place: The place.
        step: Index of the action in its row.
        reason: What it waits for.
    """

    place: int
    step: int
    reason: str


def find_deadlock(
    rows: Sequence[Sequence[Action]], lane: Lane, transport: Transport
) -> tuple[Waiting, ...]:
    """Return the places that never come to their end; empty if all do.

    Args:
        rows: Complete rows, one for each place of the lane.
        lane: Stages and edges.
        transport: How messages travel.
    """
    emulation = _Emulation(rows, lane, transport)
    emulation.run()
    return emulation.waiting()


class _Emulation:
    def __init__(self, rows: Sequence[Sequence[Action]], lane: Lane, transport: Transport) -> None:
        self._rows = rows
        self._traffic = Traffic(lane)
        self._transport = transport
        flows = self._traffic.flows(rows)
        self._number = {m: i for messages in flows.values() for i, m in enumerate(messages)}
        self._step = [0] * len(rows)
        self._computed: set[tuple[int, int, Hashable]] = (
            set()
        )  # (place, stage, what and micro-batch)
        self._is_done = [False] * len(
            rows
        )  # the current action has computed, and waits for its sends
        self._num_looked_at = [0] * len(rows)  # actions whose receives are posted
        self._posted: defaultdict[Flow, int] = defaultdict(int)
        self._sent: defaultdict[Flow, int] = defaultdict(int)
        self._passed: defaultdict[Flow, int] = defaultdict(int)
        #: channel -> place -> (whether it sends, flow), first in line first.
        self._lines: defaultdict[Hashable, defaultdict[int, deque[tuple[bool, Flow]]]]
        self._lines = defaultdict(lambda: defaultdict(deque))
        self._todo = deque(range(len(rows)))
        self._channel: Callable[[Flow], Hashable] = (
            (lambda flow: flow)
            if transport.channels == "traffic"
            else (lambda flow: (min(flow[:2]), max(flow[:2])))
        )

    def run(self) -> None:
        """Advance whoever may have something to do, until nobody has."""
        while self._todo:
            place = self._todo.popleft()
            while self._advance(place):
                pass

    def waiting(self) -> tuple[Waiting, ...]:
        return tuple(
            Waiting(place, self._step[place], self._reason(place))
            for place, row in enumerate(self._rows)
            if self._step[place] < len(row)
        )

    def _advance(self, place: int) -> bool:
        """Bring a place one action on; return whether it could."""
        action = self._current(place)
        if action is None:
            return False
        self._post(place)
        if not self._is_done[place]:
            together = self._traffic.places_of[action.stage]
            if not all(self._is_ready(other, action) for other in together):
                return False
            for other in together:
                self._compute(other, action)
        if self._transport.rendezvous and self._unsent(place, action):
            return False
        self._is_done[place] = False
        self._step[place] += 1
        return True

    def _current(self, place: int) -> Action | None:
        row, step = self._rows[place], self._step[place]
        return row[step] if step < len(row) else None

    def _post(self, place: int) -> None:
        """Post the receives of the next actions."""
        row, ahead = self._rows[place], self._transport.posted_ahead
        end = len(row) if ahead is None else min(len(row), self._step[place] + ahead + 1)
        for index in range(self._num_looked_at[place], end):
            for message in self._traffic.received(place, row[index]):
                flow = message.flow
                while self._posted[flow] <= self._number[message]:
                    self._posted[flow] += 1
                    self._stand(flow, place, is_send=False)
        self._num_looked_at[place] = max(self._num_looked_at[place], end)

    def _is_ready(self, place: int, action: Action) -> bool:
        return (
            self._current(place) == action
            and not self._is_done[place]
            and not self._missing(place, action)
        )

    def _missing(self, place: int, action: Action) -> list[Message | Action]:
        """Return what an action lacks of other places, and of its own."""
        received = self._traffic.received(place, action)
        out: list[Message | Action] = [
            m for m in received if self._passed[m.flow] <= self._number[m]
        ]
        for need in self._traffic.needs(action):
            here = place in self._traffic.places_of[need.stage]
            if here and (place, need.stage, _result(need)) not in self._computed:
                out.append(need)
        return out

    def _unsent(self, place: int, action: Action) -> list[Message]:
        sent = self._traffic.sent(place, action)
        return [m for m in sent if self._passed[m.flow] <= self._number[m]]

    def _compute(self, place: int, action: Action) -> None:
        self._is_done[place] = True
        self._computed.add((place, action.stage, _result(action)))
        self._todo.append(place)
        for message in self._traffic.sent(place, action):
            self._sent[message.flow] += 1
            self._stand(message.flow, place, is_send=True)

    def _stand(self, flow: Flow, place: int, *, is_send: bool) -> None:
        """Stand in line at one end of a channel, and let pass what meets."""
        lines = self._lines[self._channel(flow)]
        lines[place].append((is_send, flow))
        one, other = lines[flow.src], lines[flow.dst]
        while one and other and one[0][1] == other[0][1] and one[0][0] != other[0][0]:
            passed = one.popleft()[1]
            other.popleft()
            self._passed[passed] += 1
            self._todo += passed[:2]

    def _reason(self, place: int) -> str:
        action = self._current(place)
        assert action is not None, f"place {place} is at its end"
        if self._is_done[place]:
            return f"its {self._unsent(place, action)[0]} to be taken"
        missing = self._missing(place, action)
        if missing and isinstance(missing[0], Action):
            need = missing[0]
            what = "forward" if need.kind is Kind.FORWARD else "input gradient"
            return f"its own {what} of micro-batch {need.microbatch} in stage {need.stage}, further down"
        if missing:
            return str(missing[0])
        return f"the other ranks of stage {action.stage} to come to {action}"


def _result(action: Action) -> Hashable:
    """Return what an action makes for others: activations, gradients or nothing, of a micro-batch."""
    if action.kind in GRADIENT_KINDS:
        return (Kind.BACKWARD_INPUT, action.microbatch)
    return (action.kind, action.microbatch)
