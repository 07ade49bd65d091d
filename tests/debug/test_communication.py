"""Counts of communication by tier, kind, reason and module; torch's own count beside them."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import hdtensor
from hdtensor import distribute_tensor
from hdtensor.collectives import observe
from hdtensor.debug import count_communication
from tests.support.world import run_world


WORLD_SIZE = 4
X = torch.arange(16.0).reshape(4, 4)


def _cut(full, spec):
    return distribute_tensor(full, spec, src_data_rank=None)


def _check_tiers(rank):
    pending = _cut(X, "P / 0,1:P 2:R")
    with count_communication() as count:
        pending.redistribute("R / 0,1:R 2:R")  # inside the pair first, then between the subgroups
    found = {
        "kinds": count.by_kind(),
        "tiers": count.by_tier(),
        "top": [(e.kind, e.ranks, e.num_bytes) for e in count.top.events],
        "bottom": [(e.kind, e.ranks, e.num_bytes) for e in count.bottom.events],
    }
    a, b = _cut(X, "R / 0,1:S0 2:R"), _cut(X, "R / 0,1:S1 2:R")
    with count_communication() as count:
        a + b
    found["implicit"] = (count.by_tier(), [e.why.split(" ")[0] for e in count.events])
    with count_communication() as count:
        hdtensor.full_tensor(_cut(X, "R / 0,1:S0"))
    found["full"] = {(e.tier, e.kind): e.num_bytes for e in count.events if e.why == "full_tensor"}
    return found


@pytest.mark.dist(WORLD_SIZE)
def test_each_tier_is_counted_apart():
    first, second, third, outside = run_world(_check_tiers, WORLD_SIZE)

    inside = [("all_reduce", (0, 1), 64)]
    assert first["bottom"] == second["bottom"] == inside
    assert third["bottom"] == outside["bottom"] == []
    # Rank 2 holds all of the block; the pair's members each bring the block once or in halves.
    for found in (first, third):
        assert found["top"], found
        assert all(kind == "all_reduce" for kind, _, _ in found["top"])
        assert found["tiers"].get("top") == len(found["top"])
    assert outside["kinds"] == {}
    assert first["implicit"][0] == {"bottom": 1}
    assert first["implicit"][1] == ["aten.add.Tensor"]
    assert third["implicit"] == ({}, [])
    # Inside the pair each half is gathered; then the first owner sends the whole to ranks 2 and 3.
    assert first["full"] == {("bottom", "all_gather"): 32, ("world", "send_recv"): 64}
    assert second["full"] == {("bottom", "all_gather"): 32}
    assert outside["full"] == {}


#: CommDebugMode's names of what one collective of ours is on gloo.
TORCH_NAMES = {
    "all_reduce": "allreduce_",
    "all_gather": "_allgather_base_",
    "all_to_all": "alltoall_base_",
}


def _check_torchs_count(rank):
    pairs = [
        ("P / 0,1:S1 2:R", "R / 0,1:S1 2:R"),
        ("R / 0,1:S0", "R / 0,1:R"),
        ("R / 0,1:S0", "R / 0,1:S1"),
        ("R / 0,1:P", "R / 0,1:R"),
        ("P / 0,1:P 2:R", "R / 0,1:R 2:R"),
    ]
    for src, dst in pairs:
        _cut(X, src).redistribute(dst)  # makes the groups
    counts = []
    for src, dst in pairs:
        x = _cut(X, src)
        with CommDebugMode() as theirs, count_communication() as ours:
            x.redistribute(dst)
        seen = {str(op).split(".")[-1]: n for op, n in theirs.get_comm_counts().items()}
        assert seen == {TORCH_NAMES[kind]: n for kind, n in ours.by_kind().items()}, (src, dst)
        counts.append(len(ours))
    return counts


@pytest.mark.dist(WORLD_SIZE)
def test_torchs_own_mode_sees_the_same_collectives():
    counts = run_world(_check_torchs_count, WORLD_SIZE)
    assert counts[0][1:4] == [1, 1, 1]
    assert counts[2] == [counts[2][0], 0, 0, 0, counts[2][4]]
    assert counts[2][0] >= 1
    assert counts[3] == [0] * 5


class _Square(nn.Module):
    """Forward gathers at its end; backward gathers at its end, which is forward's start."""

    def forward(self, x):
        rows = x.redistribute("S0[3:1] / 0,1:R 2:R")
        return (rows * rows).redistribute("R / 0,1:R 2:R")


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.square = _Square()

    def forward(self, x):
        return self.square(x) + 1


class _Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = _Block(), _Block()

    def forward(self, x):
        x = self.second(self.first(x))
        return x.redistribute("S0[3:1] / 0,1:R 2:R").redistribute("R / 0,1:R 2:R")


def _check_modules(rank):
    model = _Stack()
    x = _cut(X / 16, "R / 0,1:R 2:R").requires_grad_()
    with count_communication(model) as count:
        (model(x) + x.redistribute("S0 / 0,1:R 2:R").redistribute("R / 0,1:R 2:R")).sum().backward()
    if rank < 3:
        want = (X / 16).requires_grad_()
        (((want**2 + 1) ** 2 + 1) + want).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), want.grad)
    else:
        x.grad.full_tensor()
    events = {False: [], True: []}
    for event in count.events:
        if event.module not in events[event.is_backward][-1:]:
            events[event.is_backward].append(event.module)
    return events, count.by_module(), str(count)


@pytest.mark.dist(WORLD_SIZE)
def test_modules_are_named_in_forward_and_backward():
    results = run_world(_check_modules, WORLD_SIZE)

    for events, by_module, table in results[:3]:
        # The model itself, and what is outside of it, gather too; their backwards come first and last.
        assert events[False] == ["first.square", "second.square", "_Stack", ""]
        inside = [module for module in events[True] if module]
        assert inside == ["_Stack", "second.square", "first.square"]
        assert by_module["first.square"] == by_module["second.square"]
        assert "(no module)" in by_module
        assert re.match(r" *times +bytes +tier +collective +ranks +why +module\n", table)
        assert "redistribute (backward)" in table
    assert results[3][1] == {}


def test_hooks_and_listeners_are_taken_away():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="inside"), count_communication(model):
        raise ValueError("inside")
    with count_communication(model) as count:
        model(X)
    assert len(count) == 0
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    assert not observe.listeners
