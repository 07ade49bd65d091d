"""This rank's part of a switch's rounds: pack, send, forward, receive, unpack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from hdtensor.collectives import observe, p2p
from hdtensor.collectives.memory import new_buffer
from hdtensor.collectives.pack import pack, receive_buffers, unpack
from hdtensor.elastic.plan_switch import Item
from hdtensor.elastic.rounds import Round, is_direct, is_kept
from hdtensor.placements import Box
from hdtensor.redistribute.pour import Route, phases_of
from hdtensor.redistribute.steps import (
    find_cell,
)
from hdtensor.redistribute.topology import Topology
from hdtensor.redistribute.transfers import Transfer


@dataclass(slots=True)
class Cargo:
    """One tensor on this rank.

    Attributes:
        item: Which.
        old: Local tensor before; what it holds must not change until the switch is over.
        new: Local tensor after, once it is made; the old one where that stays.
    """

    item: Item
    old: Tensor
    new: Tensor | None = None

    def open(self, rank: int) -> Tensor:
        """Make the new local tensor, or keep the old one where nothing changes."""
        if is_kept(self.item, rank):
            self.new = self.old
            return self.new
        self.new = new_buffer(self.old, self.item.dst.local_shape(rank))
        return self.new


class _Parts:
    """Parts on their way to or from each peer."""

    def __init__(self) -> None:
        self.alone: dict[int, list[Tensor]] = {}
        self.joint: dict[int, list[Tensor]] = {}

    def add(self, peer: int, part: Tensor, is_alone: bool) -> None:
        """Add a part: a message of its own, or of the joint one."""
        parts = self.alone if is_alone else self.joint
        parts.setdefault(peer, []).append(part)


class Carrier:
    """Carries out rounds for one rank.

    Args:
        cargo: All tensors of the switch, in the order of its items.
        rank: Whose part.
        topology: Tells which hops come first.
        timeout: How long to wait for a message; None for the process group's.
    """

    def __init__(
        self, cargo: Sequence[Cargo], rank: int, topology: Topology, timeout: timedelta | None
    ) -> None:
        self.cargo = cargo
        self.rank = rank
        self.topology = topology
        self.timeout = timeout
        self._relayed: dict[tuple[int, Box], Tensor] = {}

    def run(self, round_: Round) -> None:
        """Carry out one round; its tensors' ``new`` are written."""
        for index in round_.opens:
            self.cargo[index].open(self.rank)
        routes_of: dict[int, list[Route]] = {}
        kept: list[tuple[int, Box]] = []
        for index, route in round_.routes:
            if len(route.hops) > 1:
                routes_of.setdefault(index, []).append(route)
            elif route.hops[0] == self.rank:
                kept.append((index, route.box))
        phases = {i: phases_of(routes, self.topology) for i, routes in routes_of.items()}
        for number in range(3):
            finish = self._start_phase({i: found[number] for i, found in phases.items()})
            for index, box in kept:  # what stays on a rank is copied while messages travel
                self._keep(index, box)
            kept = []
            finish()
        self._relayed.clear()

    def stage(self, indices: Iterable[int]) -> None:
        """Move complete new tensors to host memory."""
        for index in indices:
            cargo = self.cargo[index]
            if cargo.new is not None and cargo.new is not cargo.old:
                cargo.new = cargo.new.cpu()

    def _keep(self, index: int, box: Box) -> None:
        cargo = self.cargo[index]
        assert cargo.new is not None, "a tensor is opened before its parts arrive"
        if cargo.new is not cargo.old:
            self._new_part(index, box).copy_(self._old_part(index, box))

    def _start_phase(self, transfers_of: dict[int, Iterable[Transfer]]) -> Callable[[], None]:
        """Start messages: large contiguous parts by themselves, the others of a pair as one."""
        sent, received = self._parts(transfers_of)
        joint = dict(zip(sent.joint, pack(list(sent.joint.values())), strict=True))
        flats = dict(
            zip(received.joint, receive_buffers(list(received.joint.values())), strict=True)
        )
        outgoing = {peer: [p.contiguous() for p in parts] for peer, parts in sent.alone.items()}
        incoming = {peer: list(parts) for peer, parts in received.alone.items()}
        for buffers, joined in ((outgoing, joint), (incoming, flats)):
            for peer, flat in joined.items():
                buffers.setdefault(peer, []).append(flat)
        if observe.listeners:
            for peer, each in outgoing.items():
                observe.notify("send_recv", (peer,), sum(buffer.nbytes for buffer in each))
        exchange = p2p.start(outgoing, incoming, timeout=self.timeout)

        def finish() -> None:
            for peer, flat in flats.items():
                exchange.receive(peer)
                unpack(flat, received.joint[peer])
            exchange()

        return finish

    def _parts(self, transfers_of: dict[int, Iterable[Transfer]]) -> tuple[_Parts, _Parts]:
        """Return what this rank sends and what it receives."""
        sent, received = _Parts(), _Parts()
        for index in sorted(transfers_of, key=lambda i: (-self.cargo[i].item.itemsize, i)):
            item = self.cargo[index].item
            for box, src, dst in transfers_of[index]:
                if src == self.rank:
                    sent.add(dst, self._source(index, box), is_direct(item, box, src, dst))
                elif dst == self.rank:
                    received.add(src, self._target(index, box), is_direct(item, box, src, dst))
        return sent, received

    def _source(self, index: int, box: Box) -> Tensor:
        """Return a part to send: of the old tensor, of what was forwarded here, or of the new tensor."""
        if any(piece.box.contains(box) for piece in self.cargo[index].item.src.boxes(self.rank)):
            return self._old_part(index, box)
        relayed = self._relayed.get((index, box))
        return self._new_part(index, box) if relayed is None else relayed

    def _target(self, index: int, box: Box) -> Tensor:
        """Return where a part goes: into the new tensor, or a buffer to forward it from."""
        if any(piece.box.contains(box) for piece in self.cargo[index].item.dst.boxes(self.rank)):
            return self._new_part(index, box)
        buffer = new_buffer(self.cargo[index].old, box.shape)
        self._relayed[index, box] = buffer
        return buffer

    def _old_part(self, index: int, box: Box) -> Tensor:
        cargo = self.cargo[index]
        return cargo.old[find_cell(cargo.item.src.boxes(self.rank), box)]

    def _new_part(self, index: int, box: Box) -> Tensor:
        cargo = self.cargo[index]
        assert cargo.new is not None, "a tensor is opened before its parts arrive"
        return cargo.new[find_cell(cargo.item.dst.boxes(self.rank), box)]
