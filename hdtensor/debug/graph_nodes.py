"""The nodes of an ``ExecutableGraph``: operators of one rank, its local shapes, and what it communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch

from hdtensor.redistribute.explain import bytes_text


Phase: TypeAlias = Literal["pre", "forward", "backward", "post"]
PHASES: tuple[Phase, ...] = ("pre", "forward", "backward", "post")

Kind: TypeAlias = Literal["compute", "layout", "communication"]

#: Larger groups are told by their number.
_MAX_RANKS = 16


class LocalTensor(NamedTuple):
    """A tensor as this rank holds it.

    Attributes:
        name: What nodes call it.
        shape: Of the local tensor; ``(0,)`` where this rank has no part.
        dtype: Element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """Its dtype and shape, such as "float32[4, 8]"."""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What a node of communication moves.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather", "all_to_all" or "send_recv".
        ranks: The group in its order; for a send_recv the peers.
        sent_bytes: Bytes that this rank puts in; of a send_recv to each peer.
        received_bytes: Bytes that it gets; of a send_recv from each peer.
        op: The reduction, "" for none.
        why: What asked for it, "" if the program did by ``redistribute``.
    """

    kind: str
    ranks: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    op: str = ""
    why: str = ""

    def __str__(self) -> str:
        if self.kind == "send_recv":
            parts = [
                f"{bytes_text(size)} {way} {rank}"
                for way, sizes in (("to", self.sent_bytes), ("from", self.received_bytes))
                for rank, size in zip(self.ranks, sizes, strict=True)
                if size
            ]
            text = ", ".join(parts) or "nothing"
        else:
            op = f"{self.op} " if self.op else ""
            sent, received = sum(self.sent_bytes), sum(self.received_bytes)
            text = f"{op}over {_who(self.ranks)}, {bytes_text(sent)} in, {bytes_text(received)} out"
        return f"{text}, {self.why}" if self.why else text


def _who(ranks: tuple[int, ...]) -> str:
    if len(ranks) > _MAX_RANKS:
        return f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"
    return str(list(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One operator of a rank's graph.

    Attributes:
        name: Name of its first result.
        op: The operator, such as "aten.mm" or "hdtensor.split_all_reduce".
        phase: The part of the step it belongs to.
        kind: "compute"; "layout" for what only moves, views or fills memory; "communication".
        inputs: Names of its tensors.
        outputs: Its results.
        transfer: What it moves, for communication.
        module: Path of the module that runs it, or whose backward does; "" for none.
    """

    name: str
    op: str
    phase: Phase
    kind: Kind
    inputs: tuple[str, ...]
    outputs: tuple[LocalTensor, ...]
    transfer: Transfer | None = None
    module: str = ""

    def __str__(self) -> str:
        left = ", ".join(map(str, self.outputs)) or "()"
        moved = "" if self.transfer is None else f"  # {self.transfer}"
        return f"{left} = {self.op}({', '.join(self.inputs)}){moved}"
