"""What ranks do is compared before it is done: one error everywhere, never a hang."""

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdtensor
from hdtensor import DisagreementError, HDSpec, HDTensor, as_rank, distribute_tensor, resolve
from hdtensor.api.agreement import exchange
from hdtensor.collectives import observe
from hdtensor.collectives.groups import ensure_groups
from hdtensor.debug import agreement, check_agreement, operators
from hdtensor.redistribute.execute import execute
from hdtensor.redistribute.program import partners
from tests.models.hf import strategy
from tests.support.world import run_world


WORLD_SIZE = 4
X = torch.arange(16.0).reshape(4, 4)
SPEC = "S0[3:1] / 0,1:S1 2:R"
WHOLE = "R / 0,1:S1 2:R"
OTHER = "S1 / 0,1:S0 2:R"
#: Until a rank that does nothing is named, and where every rank comes.
SHORT, LONG = 3.0, 60.0


def _cut():
    return distribute_tensor(X, SPEC, src_data_rank=None)


def _other_spec(rank):
    _cut().redistribute(OTHER if rank == 1 else WHOLE)


def _other_shape(rank):
    x = distribute_tensor(X[:, :2] if rank == 2 else X, SPEC, src_data_rank=None)
    x.redistribute(WHOLE)


def _other_order(rank):
    a, b = _cut(), _cut().double()
    for x in (b, a) if rank == 0 else (a, b):
        x.redistribute(WHOLE)


def _other_function(rank):
    if rank == 1:
        hdtensor.item(_cut().sum())
    else:
        distribute_tensor(X, SPEC)


def _other_operator(rank):
    """Implicit conversions inside the pair: columns of one operand, or of the other."""
    a, b = (distribute_tensor(X, s, src_data_rank=None) for s in ("R / 0,1:S0", "R / 0,1:S1"))
    (torch.sub(a, b) if rank else torch.add(a, b)).to_local()


def _other_sizes(rank):
    rows = 6 if rank == 1 else 4
    plan = resolve(HDSpec.from_text("R / 0,1:S0"), HDSpec.from_text("R / 0,1:R"), (rows, 2))
    ensure_groups(plan.rank_sets())
    if rank < 2:
        execute(plan, torch.zeros(rows // 2, 2))


def _other_messages(rank):
    plan = resolve(
        HDSpec.from_text("R / 0:R"), HDSpec.from_text("R / 2,3:S0"), (6 if rank == 3 else 4, 2)
    )
    execute(plan, torch.zeros(4, 2) if rank == 0 else torch.zeros(0))


def _in_backward(rank):
    w = distribute_tensor(X, WHOLE, src_data_rank=None).requires_grad_()
    y = w.redistribute("S0 / 0,1:S1 2:R")
    loss = (y * y).sum().redistribute("R / 0,1:R 2:R")
    if rank == 2:
        _cut().redistribute(WHOLE)
    loss.backward()
    w.grad.redistribute(SPEC)


def _plain_batches(rank):
    """Each rank passes its own part of a batch, as a distributed sampler gives, where all must pass the same."""
    model = hdtensor.parallelize(_Model(), strategy(([0, 1], 3), ([2], 1)))
    model(X)
    model(X.roll(1, 0) if rank == 2 else X)  # of the same sum


def _too_few(rank):
    if rank != 2:
        hdtensor.full_tensor(_cut())


def _some_clip(rank):
    p = nn.Parameter(_cut())
    p.grad = _cut()
    if rank:
        hdtensor.clip_grad_norm_([p], 1.0)
    else:
        hdtensor.item(_cut().sum())


def _other_order_of_norm(rank):
    hdtensor.get_total_norm([_cut()], 1.0 if rank == 2 else 2.0)


def _some_compare(rank):
    a, b = _cut(), _cut()
    if rank != 2:
        torch.equal(a, b)
    hdtensor.item(a.sum())


def _one_scaler(rank):
    found, scale = torch.zeros(1), torch.ones(1)
    if rank == 1:
        torch._amp_foreach_non_finite_check_and_unscale_([_cut()], found, scale)
    hdtensor.item(_cut().sum())


def _fails_alone(rank):
    if rank == 0:
        raise ValueError("a mistake of rank 0")
    _cut().redistribute(WHOLE)


#: what ranks do -> what the one error says.
DIFFERENCES = {
    _other_spec: (f"-> {OTHER}", f"-> {WHOLE}", "do not do the same", "test_agreement.py:"),
    _other_shape: ("(4, 4) float32", "(4, 2) float32", "on rank 2"),
    _other_order: ("float32", "float64", "Event"),
    _other_function: ("distribute_tensor", "redistribute"),
    _other_operator: ("aten.sub.Tensor (implicit", "aten.add.Tensor (implicit", "rank 0", "rank 1"),
    _other_sizes: ("all_gather of [4, 4] float32", "all_gather of [6, 6] float32"),
    _other_messages: (
        "the messages of R / 0:R -> R / 2,3:S0, shape (4, 2)",
        "shape (6, 2)",
        "rank 3",
    ),
    _in_backward: ("rank 2", "redistribute"),
    _some_clip: ("rank 0", "redistribute", "clip_grad_norm_ of norms of order 2"),
    _other_order_of_norm: ("get_total_norm of norms of order 2", "of norms of order 1", "rank 2"),
    _some_compare: ("aten.equal.default", "rank 2 redistribute"),
    _one_scaler: ("rank 1 unscaling of gradients", "redistribute"),
    _plain_batches: (
        "rank 2",
        "the forward of _Model with plain tensors, which must be the same on every rank",
        "hdtensor.distribute_batch(model, batch)",
        "argument 0 float32 [4, 4] of checksum",
    ),
    _too_few: ("rank 2 has not come for 3 s", "redistribute"),
    _fails_alone: ("rank 0 failed with ValueError: a mistake of rank 0", "waits for it in"),
}


def _prepare():
    """Make the groups, so that no function needs a collective of the whole world for them."""
    for spec in (WHOLE, OTHER):
        _cut().redistribute(spec)
    hdtensor.item(_cut().sum())
    for text in ("R / 0,1:S0", "R / 0,1:S1"):
        distribute_tensor(X, text, src_data_rank=None)


def _check_difference(rank, function):
    _prepare()
    dist.barrier()
    said = None
    with check_agreement(seconds=SHORT if function is _too_few else LONG) as check:
        try:
            function(rank)
        except DisagreementError as error:
            said = str(error)
        except ValueError as error:
            check.leave(f"failed with ValueError: {error}")
    dist.barrier()
    return said


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("function", DIFFERENCES, ids=lambda f: f.__name__[1:])
def test_a_difference_is_one_error_everywhere(function):
    said = run_world(_check_difference, WORLD_SIZE, function)

    found = {text for text in said if text is not None}
    assert len(found) == 1, said
    (text,) = found
    for part in DIFFERENCES[function]:
        assert part in text, text
    assert "Every rank must call the same functions in the same order" in text
    assert "Before that rank" in text
    # Whoever takes part in what differs raises; only a rank that has nothing more to do may be done already.
    assert sum(text is not None for text in said) >= 2


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def _check_same(rank):
    _prepare()
    losses = []
    with check_agreement(seconds=LONG):
        model = _Model()
        plans = {"up.weight": "S0", "up.bias": "S0", "down.weight": "S1", "down.bias": "R"}
        for name, p in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            cut = distribute_tensor(p.detach(), f"R / 0,1:{plans[name]} 2:R")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(cut))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            x = distribute_tensor(X / 16, "S0[3:1] / 0,1:R 2:R")
            loss = model(x).square().mean()
            loss.backward()
            for p in model.parameters():
                p.grad = p.grad.redistribute(p.spec)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(hdtensor.item(loss))
    return losses


@pytest.mark.dist(WORLD_SIZE)
def test_ranks_that_agree_train_as_one_device():
    losses = run_world(_check_same, WORLD_SIZE)

    model, want = _Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(X / 16).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    for found in losses:
        assert found == pytest.approx(want, rel=1e-5)


def _check_chain(rank):
    """Rank 3 waits for rank 2, which waits for rank 1, which does nothing: rank 1 is named."""
    for text in ("R / 1,2:S0", "R / 2,3:S0"):
        distribute_tensor(X, text, src_data_rank=None)
    dist.barrier()
    said = None
    with check_agreement(seconds=SHORT), contextlib.suppress(DisagreementError):
        try:
            for text in ("R / 1,2:S0", "R / 2,3:S0") if rank > 1 else ():
                distribute_tensor(X, text, src_data_rank=None).redistribute(text.replace("S0", "R"))
        except DisagreementError as error:
            said = str(error)
    dist.barrier()
    return said


@pytest.mark.dist(WORLD_SIZE)
def test_the_rank_at_the_end_of_a_chain_of_waits_is_named():
    said = run_world(_check_chain, WORLD_SIZE)
    assert said[0] is said[1] is None
    assert said[2] == said[3]
    assert said[2].startswith("rank 1 has not come for 3 s, while rank 2 waits for it in")


def test_a_store_that_is_gone_is_named():
    check = agreement.AgreementCheck(1.0, 0)
    check.note("all_reduce of 4 float32 elements")
    with (
        pytest.raises(DisagreementError, match=r"rank 0 cannot reach .* of 4 float32 elements\.$"),
        check._naming_a_lost_store(),
    ):
        raise dist.DistNetworkError("connection reset")


def test_the_end_of_a_process_is_told(monkeypatch, capsys):
    told, at_exit = [], []
    monkeypatch.setattr(agreement.atexit, "register", at_exit.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    check = agreement.AgreementCheck(1.0, 0)
    monkeypatch.setattr(check, "leave", told.append)
    agreement.tell_ends(check)
    at_exit[0]()
    sys.excepthook(ValueError, ValueError("a mistake."), None)
    at_exit[0]()
    assert told == ["ended", "failed with ValueError: a mistake"]
    assert "ValueError: a mistake." in capsys.readouterr().err


def test_the_end_is_told_though_the_group_is_destroyed():
    """As at the end of most programs: without, whoever waits for the rank waits until the time is up."""
    check = agreement.AgreementCheck(1.0, 0)
    check._store, check._me = dist.HashStore(), 2
    check.leave("ended")
    assert check._get("ended/2") == "ended"


def test_operators_are_noted_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(HDTensor, "__torch_dispatch__", HDTensor.__dict__["__torch_dispatch__"])
    with as_rank(0):
        x = _cut()
        notes = []
        operators.log_operators(notes.append)
        assert torch.equal((x * 2).to_local(), X[:3, :2] * 2)
    assert notes[0] == "aten.mul.Tensor((4, 4) float32 S0[3:1] / 0,1:S1 2:R top_sizes=(3, 1))"


def test_inside_as_rank_nothing_is_compared():
    with check_agreement(seconds=SHORT), as_rank(1):
        x = distribute_tensor(X, "R / 1:R", src_data_rank=None)
        assert torch.equal(hdtensor.full_tensor(x), X)


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("S0[3:1] / 0-2:P 3:R", "S0[3:1] / 0-2:R 3:R", [(0, 1, 2)] * 3 + [()]),
        (SPEC, WHOLE, [(0, 2), (1, 2), (0, 1, 2), ()]),
        ("R / 0:R", "R / 2,3:S0", [(0, 2, 3), (), (0, 2, 3), (0, 2, 3)]),
        (WHOLE, "S0 / 0,1:S1 2:R", [()] * 4),
    ],
)
def test_only_ranks_that_communicate_are_compared(src, dst, expected):
    plan = resolve(HDSpec.from_text(src), HDSpec.from_text(dst), (4, 6))
    assert [partners(plan, rank) for rank in range(4)] == expected


def _check_alone(rank):
    """What a pair does by itself is nothing that the other subgroup's rank must do too: it may skip it."""
    x = distribute_tensor(X, "S0[3:1] / 0,1:P 2:R", src_data_rank=None)
    whole = "S0[3:1] / 0,1:R 2:R"
    x.redistribute(whole)
    with check_agreement(seconds=LONG):
        done = distribute_tensor(X, whole, src_data_rank=None)
        if rank < 2:
            done = x.redistribute(whole)
        return hdtensor.item(done.sum())


@pytest.mark.dist(WORLD_SIZE)
def test_what_a_subgroup_does_alone_concerns_nobody_else():
    assert run_world(_check_alone, WORLD_SIZE) == [float(X.sum())] * 4


def _check_ahead(rank):
    with pytest.raises(DisagreementError, match=r"ranks 0 and 1 .*Event 3 .*4 float32.*5 float32"):
        _start_ahead(rank)


def _start_ahead(rank):
    with check_agreement():
        for size in (4, 4, 4 + rank):
            told = ((size,), (size,))
            with observe.ahead():  # nobody waits here, whoever comes second sees the first
                observe.notify("all_reduce", (0, 1), size, dtype=torch.float32, sizes=told)
        exchange("the end", None, None)


@pytest.mark.dist(2)
def test_what_is_started_ahead_is_compared_by_whoever_comes_second():
    run_world(_check_ahead, 2)
