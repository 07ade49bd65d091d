"""This rank's collectives of one round: which share a buffer, how they start, what they deliver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from hdtensor._rank import current_rank
from hdtensor.collectives import observe, operators, pairs, split
from hdtensor.collectives.groups import group_of
from hdtensor.collectives.memory import new_buffer
from hdtensor.collectives.pack import flatten, unflatten
from hdtensor.collectives.wire import is_on_host, wire_device
from hdtensor.placements import Box
from hdtensor.placements.box import cut_box
from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Ranks,
    ReduceScatter,
)
from hdtensor.redistribute.program import Job, Pieces, RankStep
from hdtensor.redistribute.steps import (
    neutral_element,
)


_KINDS: dict[type[Collective], str] = {
    AllReduce: "all_reduce",
    ReduceScatter: "reduce_scatter",
    AllGather: "all_gather",
    AllToAll: "all_to_all",
}


class Item(NamedTuple):
    """A job of one of the tensors in flight."""

    position: int
    step: RankStep
    job: Job
    local: Tensor

    @property
    def key(self) -> tuple[str, Ranks, str, str]:
        """What collectives must agree in to share a buffer; also the order in which they start."""
        collective = self.job.collective
        op = repr(collective.op) if isinstance(collective, AllReduce | ReduceScatter) else ""
        return type(collective).__name__, collective.ranks, op, str(self.local.dtype)


def buckets_of(items: Sequence[Item], bucket_bytes: int) -> list[list[Item]]:
    """Return which jobs share a buffer, in the order in which all ranks start them.

    A rank may be in several groups that overlap: the order is by content, never by arrival.
    """
    if len(items) == 1:
        return [list(items)]
    found: defaultdict[tuple[str, Ranks, str, str], list[list[Item]]] = defaultdict(lambda: [[]])
    for item in items:
        buckets = found[item.key]
        if sum(i.job.num_total * i.local.element_size() for i in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(item)
    return [bucket for key in sorted(found) for bucket in found[key]]


def launch(bucket: Sequence[Item], donate: bool) -> split.Pending:
    """Pack one buffer and start its collective."""
    first = bucket[0].job
    if len(bucket) == 1 and first.is_whole:
        flat = bucket[0].local.reshape(-1)
        return start(first, flat, first.num_sent, first.num_received, is_own=donate)
    parts = [
        piece
        for receiver in range(len(first.sent))
        for item in bucket
        for piece in _pack(item, item.job.sent[receiver])
    ]
    flat = flatten(parts, bucket[0].local)
    sent = tuple(map(sum, zip(*(item.job.num_sent for item in bucket), strict=True)))
    received = tuple(map(sum, zip(*(item.job.num_received for item in bucket), strict=True)))
    return start(first, flat, sent, received, is_own=True)


def start(
    job: Job,
    flat: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    *,
    is_own: bool = False,
) -> split.Pending:
    """Start a job's collective on a packed buffer, which may hold other jobs' parts too."""
    # A lazy conjugate or negation must not be sent as the bytes below it.
    flat = flat.resolve_conj().resolve_neg().contiguous()
    collective = job.collective
    if type(flat) is not Tensor:
        return _start_traced(collective, flat, sent, received)
    kind = _KINDS[type(collective)]
    if observe.listeners:
        group_of(collective.ranks)  # a missing group raises before others are waited for
        sizes = sent, received
        observe.notify(
            kind, collective.ranks, flat.nbytes, tier=job.tier, dtype=flat.dtype, sizes=sizes
        )
    with observe.profiled(kind):
        return _start_real(collective, flat, sent, received, is_own)


def _start_real(
    collective: Collective,
    flat: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    is_own: bool,
) -> split.Pending:
    """Start a collective, by way of host memory where the backend does not take the device."""
    group = group_of(collective.ranks)
    wire = flat.device
    if not is_on_host(wire):
        wire = wire_device(wire, collective.ranks)
    if wire == flat.device:
        return _start_on_wire(collective, flat, sent, received, group, is_own)
    host, device = flat.to(wire), flat.device
    pending = _start_on_wire(collective, host, sent, received, group, True)
    return lambda: pending().to(device)


def _start_on_wire(
    collective: Collective,
    flat: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
    is_own: bool,
) -> split.Pending:
    """Start a collective on a buffer that the backend takes."""
    match collective:
        case AllReduce():
            op, num_terms = collective.op, len(collective.terms)
            return split.all_reduce(flat, op, num_terms, group, is_own=is_own)
        case ReduceScatter():
            return split.reduce_scatter(flat, sent, collective.op, len(collective.ranks), group)
        case AllGather():
            return split.all_gather(flat, received, group)
        case AllToAll():
            return split.all_to_all(flat, sent, received, group)
        case _:
            assert_never(collective)


def _start_traced(
    collective: Collective, flat: Tensor, sent: Sequence[int], received: Sequence[int]
) -> split.Pending:
    """Put the collective's operator into the graph that is being traced."""
    ranks = list(collective.ranks)
    place = ranks.index(current_rank())
    args: tuple[Any, ...]
    match collective:
        case AllReduce(op=op):
            args = "split_all_reduce", flat, op.reduce_op, len(collective.terms), ranks
        case ReduceScatter(op=op):
            args = "split_reduce_scatter", flat, sent, place, op.reduce_op, len(ranks), ranks
        case AllGather():
            args = "split_all_gather", flat, received, place, ranks
        case AllToAll():
            args = "split_all_to_all", flat, sent, received, ranks
        case _:
            assert_never(collective)
    result = operators.start(*args)
    return lambda: result


def _pack(item: Item, pieces: Pieces) -> list[Tensor]:
    """Return the pieces flat; for a rank without a term, what changes nothing."""
    views = [item.local[piece] for piece in pieces]
    collective = item.job.collective
    if not item.job.is_term and isinstance(collective, AllReduce):
        op = collective.op
        if op.reduce_op not in ("max", "min"):  # these may count a copy twice
            return [torch.full_like(view, neutral_element(op)) for view in views]
    return views


def deliver(bucket: Sequence[Item], flat: Tensor, state: list[Tensor]) -> None:
    """Write a collective's flat result into the new local tensors."""
    if len(bucket) == 1 and bucket[0].step.is_direct:
        state[bucket[0].position] = flat.view(bucket[0].step.shape)
        return
    for item in bucket:
        if item.step.is_direct:
            state[item.position] = _start_local(item.step, item.local)
    targets = [
        state[item.position][piece]
        for sender in range(len(bucket[0].job.received))
        for item in bucket
        for piece in item.job.received[sender]
    ]
    unflatten(flat, targets)


def is_in_pair(item: Item, *, is_shared: bool) -> bool:
    """Return whether a job is an all-reduce of two ranks that goes chunk by chunk; ``is_shared``: it may share a buffer."""
    collective = item.job.collective
    if not isinstance(collective, AllReduce) or len(collective.ranks) != 2:
        return False
    num_bytes = item.job.num_total * item.local.element_size()
    is_real = type(item.local) is Tensor
    return is_real and pairs.is_pair(
        item.local.dtype, collective.op, num_bytes, is_shared=is_shared
    )


def start_pair(item: Item, new: Tensor, donate: bool) -> pairs.PairReduction:
    """Start an all-reduce of two ranks, chunk by chunk."""
    collective = item.job.collective
    assert isinstance(collective, AllReduce), "only all-reduces go in pairs"
    old, most = plain(item.local), pairs.CHUNK_BYTES // item.local.element_size()
    chunks = []
    for source, target in zip(item.job.sent[0], item.job.received[0], strict=True):
        whole, into = old[source], new[target]
        for box in cut_box(Box.whole(whole.shape), most):
            chunk = box.slices_from((0,) * whole.ndim)
            chunks.append((whole[chunk], into[chunk]))
    group = group_of(collective.ranks)
    if observe.listeners:
        sizes = item.job.num_sent, item.job.num_received
        num_bytes = sum(term.nbytes for term, _ in chunks)
        observe.notify(
            "all_reduce",
            collective.ranks,
            num_bytes,
            tier=item.job.tier,
            dtype=old.dtype,
            sizes=sizes,
        )
    with observe.profiled("all_reduce"):
        return pairs.PairReduction(chunks, collective.op, group, donate=donate)


def may_pair(job: Job) -> bool:
    """Return whether elements of eight bytes would make the job large enough to go in a pair."""
    is_pair = isinstance(job.collective, AllReduce) and len(job.collective.ranks) == 2
    return is_pair and 8 * job.num_total >= pairs.MIN_BYTES


def plain(local: Tensor) -> Tensor:
    """Return a tensor without a lazy conjugate or negation: bytes are what is sent."""
    return local.resolve_conj().resolve_neg()


def _start_local(step: RankStep, local: Tensor) -> Tensor:
    """Return the new local tensor with what this rank writes alone."""
    out = new_local(step, local)
    copy_own(step, local, out)
    return out


def new_local(step: RankStep, local: Tensor, donate: bool = False) -> Tensor:
    """Return the memory of the new local tensor: the old one's where nothing but it is written."""
    if step.is_kept or (donate and step.is_in_place and local.is_contiguous()):
        return local
    if step.fill is None:
        return new_buffer(local, step.shape)
    return local.new_full(step.shape, step.fill)


def copy_own(step: RankStep, local: Tensor, out: Tensor) -> None:
    """Copy what the rank holds of its new local tensor already."""
    for new, old in step.copies:
        out[new].copy_(local[old])
