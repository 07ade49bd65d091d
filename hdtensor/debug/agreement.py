"""Whether ranks do the same: what ``HDTENSOR_DEBUG`` switches on.

Before a rank communicates it posts what it is about to do in the process group's store, for each rank that it
does it with, and waits for what that rank posts::

    rank 0                          store                         rank 1
    all_gather with rank 1   ->  0>1/7: all_gather of [2, 2]
                                 1>0/7: all_reduce of 4      <-   all_reduce with rank 0
    reads 1>0/7: differs     ->  verdict: ...                <-   reads 0>1/7: differs

Each pair of ranks numbers its own events, so ranks that have nothing to do with one another are never compared.
Only the store is used: no collective that could itself wait for ever. The first difference becomes the verdict, which
every rank that waits, or comes later, raises too. What travels in a ``switch`` is left out: its ranks agree on a plan
beforehand, and tell one another when one of them fails. So are messages between the stages of a pipeline: each rank
starts them when its own schedule says so, before its peer comes to the same. What a rank starts ahead of other work (sums
of gradients) it compares without waiting: the one that comes second sees a difference.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from hdtensor._rank import current_rank, is_played
from hdtensor.collectives import observe
from hdtensor.collectives.observe import Call, Communication
from hdtensor.debug.callers import calling_line
from hdtensor.errors import DisagreementError


#: How many events and operators of a rank an error lists.
_NUM_RECENT = 6
_NUM_RECENT_OPERATORS = 20
#: Between two looks at the store, in seconds: short at first, then doubled up to the second number.
_PAUSES = 0.0005, 0.01
#: A rank that keeps the store stays this long for the others to read why it ends.
_FAREWELL_SECONDS = 5.0


class Statement(NamedTuple):
    """What one rank is about to do together with a peer.

    Attributes:
        says: What it does.
        expects: What the peer must do.
    """

    says: str
    expects: str


class _Pending(NamedTuple):
    """What a peer must post as the counterpart of what this rank posted.

    Attributes:
        peer: The peer.
        number: Which of the events between the two it is.
        mine: What this rank does.
        where: The line that does it.
    """

    peer: int
    number: int
    mine: Statement
    where: str


class AgreementCheck:
    """A listener that compares what this rank is about to communicate with what the others are.

    Args:
        seconds: How long to wait for another rank before it is named.
        session: Tells this check's keys in the store from those of earlier ones; the same on every rank.
        keeps_operators: Whether the record of recent events holds operators too.
    """

    def __init__(self, seconds: float, session: int, *, keeps_operators: bool = False) -> None:
        self.seconds = seconds
        self._prefix = f"hdtensor/debug/{session}"
        self._recent: deque[str] = deque(
            maxlen=_NUM_RECENT_OPERATORS if keeps_operators else _NUM_RECENT
        )
        self._world: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        self._me, self._size = 0, 1
        self._next: Counter[int] = Counter()
        self._left: list[_Pending] = []
        self._has_verdict = False

    def __call__(self, event: Communication | Call) -> None:
        """Compare an event with what the ranks that take part are about to do.

        Raises:
            DisagreementError: On every rank that takes part, naming the first difference; or if a rank ended, or does
                not come in time.
        """
        if not dist.is_initialized() or is_played():
            return
        if event.why == "switch":
            return
        if isinstance(event, Communication) and (event.channel or not event.sent):
            return
        self._join_world()
        me = dist.get_rank()
        is_in = me in event.ranks or event.kind == "send_recv"
        peers = {r: statement(event, me, r) for r in event.ranks if is_in and r != me}
        if not peers:
            return
        where = calling_line()
        with self._naming_a_lost_store():
            self._compare_left()
            posted = self._post(peers, where)
            self.note(f"{summary(event)} at {where}")
            if isinstance(event, Communication) and event.is_ahead:
                self._left += posted
                self._compare_left()
            else:
                for pending in posted:
                    self._wait(pending)
                    self._compare(pending)

    def note(self, text: str) -> None:
        """Remember what this rank did, for the errors of all."""
        self._recent.append(text)

    def leave(self, how: str) -> None:
        """Tell the others that this rank takes part no longer.

        Args:
            how: "ended", or how it failed.
        """
        with contextlib.suppress(Exception):
            if (
                dist.is_initialized()
            ):  # else the program has destroyed the group, as most do at their end
                self._join_world()
            self._set(f"ended/{self._me}", how)
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while self._has_verdict and self._me == 0 and time.monotonic() < deadline:
                ranks = range(1, self._size)
                if all(self._has(f"heard/{r}") or self._has(f"ended/{r}") for r in ranks):
                    break
                time.sleep(_PAUSES[1])

    # -- events -------------------------------------------------------------------------------------

    def _post(self, peers: dict[int, Statement], where: str) -> list[_Pending]:
        me = dist.get_rank()
        self._raise_verdict()
        self._set(f"recent/{me}", json.dumps(list(self._recent)))
        posted = []
        for peer, mine in peers.items():
            number = self._next[peer]
            self._next[peer] += 1
            self._set(f"{me}>{peer}/{number}", json.dumps([mine.says, mine.expects, where]))
            posted.append(_Pending(peer, number, mine, where))
        return posted

    def _compare_left(self) -> None:
        """Compare what was started ahead, as far as peers have come to it; whoever comes later compares it then."""
        left, self._left = self._left, []
        for pending in left:
            if self._has(_key(pending)):
                self._compare(pending)
            else:
                self._left.append(pending)

    def _compare(self, pending: _Pending) -> None:
        peer, number, mine, where = pending
        me, key = dist.get_rank(), _key(pending)
        says, expects, there = json.loads(self._get(key))
        self._delete(key)
        if says != mine.expects or expects != mine.says:
            done = {me: f"{mine.says} at {where}", peer: f"{says} at {there}"}
            first, second = sorted(done)
            self._decide(
                f"ranks {first} and {second} do not do the same. Event {number + 1} between them is on rank {first} "
                f"{done[first]}, but on rank {second} {done[second]}.",
                [first, second],
            )

    def _wait(self, pending: _Pending) -> None:
        """Wait for what a peer posts; give up where it ended, another rank gave up, or it does not come."""
        peer, key = pending.peer, _key(pending)
        if self._has(key):
            return
        me, pause = dist.get_rank(), _PAUSES[0]
        deadline = time.monotonic() + self.seconds
        self._set(f"waits/{me}", json.dumps([peer, f"{pending.mine.says} at {pending.where}"]))
        while not self._has(key):
            self._raise_verdict()
            if self._has(f"ended/{peer}"):
                if self._has(key):  # it posted, then ended
                    break
                self._decide_lost(peer, me, self._get(f"ended/{peer}"))
            elif time.monotonic() > deadline:
                lost, waiting = self._end_of_waits(me)
                self._decide_lost(lost, waiting, f"has not come for {self.seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        self._delete(f"waits/{me}")

    def _end_of_waits(self, rank: int) -> tuple[int, int]:
        """Follow who waits for whom; return the one that waits for nobody, and who waits for it."""
        seen = [rank]
        while self._has(f"waits/{seen[-1]}"):
            peer = json.loads(self._get(f"waits/{seen[-1]}"))[0]
            seen.append(peer)
            if peer in seen[:-1]:  # in a circle
                break
        return seen[-1], seen[-2]

    def _decide_lost(self, lost: int, waiting: int, how: str) -> None:
        _, what = json.loads(self._get(f"waits/{waiting}"))
        text = f"rank {lost} {how}, while rank {waiting} waits for it in {what}."
        if self._has(f"waits/{lost}"):
            peer, other = json.loads(self._get(f"waits/{lost}"))
            text += f" Rank {lost} itself waits for rank {peer} in {other}."
        self._decide(text, sorted({lost, waiting}))

    # -- verdicts -----------------------------------------------------------------------------------

    def _decide(self, text: str, ranks: Iterable[int]) -> None:
        """Make this the verdict unless there is one, and raise the verdict."""
        lines = [
            text,
            "Every rank must call the same functions in the same order, with the same arguments.",
        ]
        for rank in ranks:
            recent = json.loads(self._get(f"recent/{rank}")) if self._has(f"recent/{rank}") else []
            lines.append(f"Before that rank {rank} did: {'; '.join(recent) or 'nothing'}.")
        self._key_value_store().compare_set(f"{self._prefix}/verdict", "", "\n".join(lines))
        self._raise_verdict()

    def _raise_verdict(self) -> None:
        if self._has("verdict"):
            verdict = self._get("verdict")
            if not self._has_verdict:
                self._has_verdict = True
                self._set(f"heard/{dist.get_rank()}", "")
            raise DisagreementError(verdict)

    @contextlib.contextmanager
    def _naming_a_lost_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            recent = "; ".join(self._recent)
            raise DisagreementError(
                f"rank {current_rank()} cannot reach the process group's store any more: the process that keeps it "
                f"(rank 0, unless the launcher does) has ended. Look for that rank's error. The last events here: "
                f"{recent}."
            ) from error

    # -- the store ----------------------------------------------------------------------------------

    def _join_world(self) -> None:
        """Count anew where the default process group is another one than before."""
        world = dist.group.WORLD
        if world is not self._world:
            assert world is not None, "an initialized torch.distributed has a default group"
            self._world, self._store = world, world.get_group_store()
            self._me, self._size = dist.get_rank(), dist.get_world_size()
            self._next.clear()
            self._left.clear()
            self._has_verdict = False

    def _key_value_store(self) -> Any:
        assert self._store is not None, "the store is known once an event came"
        return self._store

    def _set(self, key: str, value: str) -> None:
        self._key_value_store().set(f"{self._prefix}/{key}", value)

    def _get(self, key: str) -> str:
        return self._key_value_store().get(f"{self._prefix}/{key}").decode()

    def _has(self, key: str) -> bool:
        return self._key_value_store().check([f"{self._prefix}/{key}"])

    def _delete(self, key: str) -> None:
        self._key_value_store().delete_key(f"{self._prefix}/{key}")


def _key(pending: _Pending) -> str:
    return f"{pending.peer}>{dist.get_rank()}/{pending.number}"


def statement(event: Communication | Call, me: int, peer: int) -> Statement:
    """Return what an event is between this rank and a peer, seen from both.

    A collective is the same on both sides. Of messages, and of the parts of an all-to-all, what one side sends the
    other receives.
    """
    if isinstance(event, Call):
        return Statement(*[summary(event)] * 2)
    if event.kind == "send_recv":
        sent, received, unit = event.sent[0], event.received[0], "bytes"
        among = ""
    elif event.kind == "all_to_all":
        sent, received = (
            event.sent[event.ranks.index(peer)],
            event.received[event.ranks.index(peer)],
        )
        unit, among = f"{event.dtype} elements", f" over ranks {list(event.ranks)}"
    else:
        return Statement(*[summary(event)] * 2)

    def side(rank: int, other: int, gives: int, takes: int) -> str:
        return (
            f"{event.kind}{among} in which rank {rank} sends rank {other} {gives} {unit} and receives "
            f"{takes}, for {event.why}"
        )

    return Statement(side(me, peer, sent, received), side(peer, me, received, sent))


def summary(event: Communication | Call) -> str:
    """Return an event in words."""
    if isinstance(event, Call):
        return f"{event.function} of {event.arguments}" if event.arguments else event.function
    if event.kind == "send_recv":
        return (
            f"send_recv with rank {event.ranks[0]} of {event.sent[0]} bytes sent and {event.received[0]} "
            f"received, for {event.why}"
        )
    parts = event.received if event.kind == "all_gather" else event.sent
    sizes = str(parts[0]) if len(parts) == 1 else str(list(parts))
    return f"{event.kind} of {sizes} {event.dtype} elements over ranks {list(event.ranks)}, for {event.why}"


_sessions = [0]


def start(seconds: float, *, keeps_operators: bool = False) -> AgreementCheck:
    """Watch from now on; every rank starts at the same place of its program."""
    check = AgreementCheck(seconds, _sessions[0], keeps_operators=keeps_operators)
    _sessions[0] += 1
    observe.listeners.append(check)
    return check


@contextlib.contextmanager
def check_agreement(seconds: float = 120.0) -> Iterator[AgreementCheck]:
    """Compare what the ranks communicate inside; ``HDTENSOR_DEBUG=1`` does it for a whole program.

    Every rank of the world enters it. Before each collective, message, ``redistribute`` and other collective function
    ranks tell one another what they are about to do, through the process group's store.

    Args:
        seconds: How long a rank waits for another one before both are named.

    Raises:
        DisagreementError: On every rank that takes part, at the first event that differs: it has both versions, the
            lines that called them, and what both ranks did before. Also where a rank has ended, or does not come.
    """
    check = start(seconds)
    try:
        yield check
    finally:
        observe.listeners.remove(check)


def tell_ends(check: AgreementCheck) -> None:
    """Have the others told when this process ends, and of what."""
    before = sys.excepthook
    how = ["ended"]

    def note_error(kind: Any, error: Any, trace: Any) -> None:
        how[0] = f"failed with {kind.__name__}: {error}".rstrip(".")
        before(kind, error, trace)

    sys.excepthook = note_error
    atexit.register(lambda: check.leave(how[0]))
