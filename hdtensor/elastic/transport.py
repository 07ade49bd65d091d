"""This rank's part of a switch's rounds: pack, send, forward, receive, unpack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from hdtensor.collectives import observe, p2p
from hdtensor.collectives.pack import is_alone, pack, receive_buffers, unpack
from hdtensor.elastic.plan_switch import Item
from hdtensor.elastic.rounds import Round, is_kept, phases_of
from hdtensor.placements import Box
from hdtensor.redistribute.pour import Route
from hdtensor.redistribute.steps import find_cell
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
        self.new = self.old.new_empty(self.item.dst.local_shape(rank))
        return self.new


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
        for index, route in round_.routes:
            if len(route.hops) > 1:
                routes_of.setdefault(index, []).append(route)
            elif route.hops[0] == self.rank:
                self._keep(index, route.box)
        phases = {i: phases_of(routes, self.topology) for i, routes in routes_of.items()}
        for number in range(3):
            self._run_phase({i: found[number] for i, found in phases.items()})
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

    def _run_phase(self, transfers_of: dict[int, Iterable[Transfer]]) -> None:
        sent: dict[int, list[Tensor]] = {}
        received: dict[int, list[Tensor]] = {}
        for index in sorted(transfers_of, key=lambda i: (-self.cargo[i].item.itemsize, i)):
            for box, src, dst in transfers_of[index]:
                if src == self.rank:
                    sent.setdefault(dst, []).append(self._source(index, box))
                elif dst == self.rank:
                    received.setdefault(src, []).append(self._target(index, box))
        outgoing = dict(zip(sent, pack(list(sent.values())), strict=True))
        direct = {peer: pieces[0] for peer, pieces in received.items() if is_alone(pieces)}
        rest = {peer: pieces for peer, pieces in received.items() if peer not in direct}
        flats = dict(zip(rest, receive_buffers(list(rest.values())), strict=True))
        if observe.listeners:
            for peer, buffer in outgoing.items():
                observe.notify("send_recv", (peer,), buffer.nbytes)
        p2p.start(outgoing, direct | flats, timeout=self.timeout)()
        for peer, flat in flats.items():
            unpack(flat, rest[peer])

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
        buffer = self.cargo[index].old.new_empty(box.shape)
        self._relayed[index, box] = buffer
        return buffer

    def _old_part(self, index: int, box: Box) -> Tensor:
        cargo = self.cargo[index]
        return cargo.old[find_cell(cargo.item.src.boxes(self.rank), box)]

    def _new_part(self, index: int, box: Box) -> Tensor:
        cargo = self.cargo[index]
        assert cargo.new is not None, "a tensor is opened before its parts arrive"
        return cargo.new[find_cell(cargo.item.dst.boxes(self.rank), box)]
