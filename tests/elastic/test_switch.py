"""``switch`` on real processes: training goes on as on one device, whatever plans follow one another."""

import copy

import pytest
import torch

import hdtensor as hd
from hdtensor.elastic import SwitchOptions, switch, switch_tensors
from tests.models.hf import batch, build, strategy
from tests.support.world import run_world


PLANS = [
    strategy(([0, 1], 5), ([2], 3)),  # TP 2 beside TP 1, rank 3 outside
    strategy(([0, 1], 2), ([2], 1), ([3], 1)),  # rank 3 joins
    strategy(([3, 0], 3), ([2], 2)),  # in another order, rank 1 leaves
    strategy(([1], 1), ([3, 2], 3)),  # others
    strategy(([0, 1], 5), ([2], 3)),  # and back
]


def _shared(order):
    """Ranks 0 and 1 share their sequences, rank 3 has its own whole."""
    pair = {"ranks": [0, 1], "layers": [0, 1], "cp": 2}
    pipelines = [(2, pair), (1, {"ranks": [3], "layers": [0, 1]})]
    keys = {"context_parallel": "ring", "sequence_order": order}
    pipelines = [{"share": share, "stages": [stage]} for share, stage in pipelines]
    return hd.AnnotationPlan.from_dict({**keys, "pipelines": pipelines})


#: Between plans that treat the sequence in unlike ways.
SEQUENCES = [
    PLANS[0],
    _shared("zigzag"),
    strategy(([2, 3], 1), ([0], 2), sequence_parallel=True),
    _shared("contiguous"),
    PLANS[1],
]


def _optimizer(model, name):
    makers = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2, foreach=True),
        "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-2, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-1),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
        "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-2),
    }
    return makers[name](model.parameters())


def _losses(model, optimizer, steps, cut=lambda data: data, value=lambda loss: loss.item()):
    losses = []
    for step in steps:
        data = cut(batch(step))
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value(loss))
    return losses


def _check_training(rank, name, options, use_regions=True, plans=PLANS):
    plain = build("llama")
    reference = _optimizer(plain, name)
    model = hd.parallelize(build("llama"), plans[0], use_regions=use_regions)
    optimizer = _optimizer(model, name)
    identities = [id(p) for p in model.parameters()]
    for number, plan in enumerate([None, *plans[1:]]):
        if plan is not None:
            report = switch(model, plan, optimizer, options=options)
            assert report.moved
        steps = range(4 * number, 4 * number + 4)
        wanted = _losses(plain, reference, steps)
        got = _losses(model, optimizer, steps, lambda d: hd.distribute_batch(model, d), hd.item)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        for (name_, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.data, rtol=1e-6, atol=1e-7, msg=name_)
    assert identities == [id(p) for p in model.parameters()]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == identities


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "options",
    [
        None,
        SwitchOptions(atomic=False, budget_bytes=60_000),
        SwitchOptions(budget_bytes=20_000, stage_on_host=False),
        SwitchOptions(budget_bytes=60_000, stage_on_host=True),
        SwitchOptions(rules="relay", topology=hd.Topology.of_nodes(2, 4)),
    ],
    ids=["atomic", "rounds", "atomic_small_budget", "staged", "relay"],
)
def test_training_goes_on(options):
    run_world(_check_training, 4, "adamw", options)


@pytest.mark.dist(4)
@pytest.mark.parametrize("name", ["foreach", "amsgrad", "sgd", "rmsprop", "adagrad", "nadam"])
def test_every_optimizer_goes_along(name):
    run_world(_check_training, 4, name, None)


@pytest.mark.dist(4)
def test_op_by_op():
    run_world(_check_training, 4, "adamw", None, False)


@pytest.mark.dist(4)
def test_the_sequence_is_shared_otherwise():
    run_world(_check_training, 4, "adamw", None, True, SEQUENCES)


def _check_join(rank):
    """Rank 3 joins with a fresh optimizer and no gradients; gradients in accumulation go along."""
    plain, plan = build("llama"), PLANS[0]
    reference = _optimizer(plain, "adamw")
    model = hd.parallelize(build("llama"), plan)
    optimizer = _optimizer(model, "adamw")
    _losses(plain, reference, range(2))
    _losses(model, optimizer, range(2), lambda d: hd.distribute_batch(model, d), hd.item)
    plain(**batch(2)).loss.backward()
    with hd.no_sync(model):
        model(**hd.distribute_batch(model, batch(2))).loss.backward()
    if rank == 3:
        optimizer = _optimizer(model, "adamw")
        for parameter in model.parameters():
            parameter.grad = None

    switch(model, PLANS[1], optimizer)

    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.spec == p.spec
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-9)
        for key, value in reference.state[q].items():
            mine = optimizer.state[p][key]
            mine = mine.full_tensor() if isinstance(mine, hd.HDTensor) else mine
            torch.testing.assert_close(mine, value, rtol=1e-6, atol=1e-9)
    wanted = _losses(plain, reference, range(3, 6))
    got = _losses(model, optimizer, range(3, 6), lambda d: hd.distribute_batch(model, d), hd.item)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.dist(4)
def test_a_rank_joins_and_gradients_in_accumulation_go_along():
    run_world(_check_join, 4)


def _check_kinds(rank):
    """Every dtype, odd shapes, non-contiguous locals, tensors that stay: one batch."""
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8]
    dtypes += [torch.float64, torch.int16, torch.complex128, torch.float8_e4m3fn]
    specs = ["R / 0,1:S0", "S0[3:1] / 0,1:S1 2:R", "R / 2:R", "S1 / 3,1:S0x2 0:R", "R / 0-3:R"]
    tensors, wanted, whole = {}, {}, {}
    for i, dtype in enumerate(dtypes):
        for j, src in enumerate(specs):
            shape = [(8, 6), (4, 5, 3), (8, 0), (4, 1)][(i + j) % 4]
            full = (torch.arange(torch.Size(shape).numel()) % 7).reshape(shape).to(dtype)
            tensors[f"{dtype} {j}"] = hd.distribute_tensor(full, src)
            wanted[f"{dtype} {j}"] = specs[(i + 2 * j) % len(specs)]
            whole[f"{dtype} {j}"] = full
    tensors["scalar"] = hd.distribute_tensor(torch.tensor(5.0), "R / 1:R")
    wanted["scalar"], whole["scalar"] = "R / 0,2:R", torch.tensor(5.0)
    wide = torch.arange(64.0).reshape(8, 8)
    local = {0: wide[:4], 1: wide[4:]}.get(rank, torch.empty(0))
    strided = torch.stack([local, local], -1)[..., 0]  # every other element of a wider tensor
    tensors["strided"] = hd.from_local(strided, "R / 0,1:S0", shape=(8, 8))
    wanted["strided"], whole["strided"] = "R / 2,3:S1", wide

    report = switch_tensors(tensors, wanted, options=SwitchOptions(budget_bytes=700))

    assert report.num_rounds > 1
    for name, tensor in tensors.items():
        assert tensor.spec == hd.HDSpec.from_text(wanted[name])
        got, want = tensor.full_tensor(), whole[name]
        assert got.dtype == want.dtype
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), (
            name
        )
    assert str(report).startswith(f"{len(report.moved)} tensors")


@pytest.mark.dist(4)
def test_kinds_of_tensors():
    run_world(_check_kinds, 4)


def _check_dead_ranks(rank):
    """What only living ranks hold is taken from them."""
    full = torch.arange(24.0).reshape(6, 4)
    tensor = hd.distribute_tensor(full, "R / 0-3(2x2):S0,R")
    options = SwitchOptions(exclude_ranks=(3,))
    report = switch_tensors({"w": tensor}, {"w": "R / 0,1:S1"}, options=options)
    assert 3 not in report.plan.sent_bytes
    assert torch.equal(tensor.full_tensor(), full)


@pytest.mark.dist(4)
def test_dead_ranks_neither_send_nor_receive():
    run_world(_check_dead_ranks, 4)


def _check_shared_hops(rank):
    """A part that two ranks of a node want crosses once, in however many rounds."""
    full = torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256)
    for budget in (1 << 22, 1 << 16):
        tensor = hd.distribute_tensor(full, "R / 0:R")
        options = SwitchOptions(
            budget_bytes=budget, rules="relay", topology=hd.Topology.of_nodes(2, 4)
        )
        with hd.debug.count_communication() as counted:
            report = switch_tensors({"w": tensor}, {"w": "R / 2:R 3:R"}, options=options)
        sent = sum(e.num_bytes for e in counted.events if e.kind == "send_recv")
        assert sent == sum(report.plan.sent_bytes.get(rank, {}).values())
        assert torch.equal(tensor.full_tensor(), full)


@pytest.mark.dist(4)
def test_relays_send_what_the_plan_says():
    run_world(_check_shared_hops, 4)


def _check_adafactor(rank):
    plans = [strategy(([0, 1], 2), ([2], 1), ([3], 1)), strategy(([1, 0], 1), ([3], 1), ([2], 2))]
    plain = build("llama")
    reference = _optimizer(plain, "adafactor")
    model = hd.parallelize(build("llama"), plans[0])
    optimizer = _optimizer(model, "adafactor")
    for number, plan in enumerate([None, plans[1], plans[0]]):
        if plan is not None:
            switch(model, plan, optimizer)
        steps = range(2 * number, 2 * number + 2)
        wanted = _losses(plain, reference, steps)
        got = _losses(model, optimizer, steps, lambda d: hd.distribute_batch(model, d), hd.item)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.dist(4)
def test_adafactor_keeps_its_factors_whole():
    run_world(_check_adafactor, 4)


class _Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


def _check_patterns(rank):
    """Plans of a model with patterns of its own: remembered, given anew, or expanded already."""
    patterns = [("fc1.*", "column"), ("fc2.weight", "row")]
    plans = [strategy(([0, 1], 1)), strategy(([2, 3], 1))]
    model = hd.parallelize(_Net(), plans[0], patterns=patterns)
    assert str(model.fc1.weight.spec) == "R / 0,1:S0"
    switch(model, plans[1])
    assert str(model.fc1.weight.spec) == "R / 2,3:S0"
    report = switch(model, plans[0].expand(hd.ModelDescription.from_module(_Net()), patterns))
    assert str(model.fc1.weight.spec) == "R / 0,1:S0"
    assert repr(report).startswith("SwitchReport(")
    assert repr(report.plan).startswith("SwitchPlan(4 tensors, ")
    switch(model, plans[1], patterns=[("fc1.*", "column")])
    assert str(model.fc2.weight.spec) == "R / 2,3:R"
    for name, parameter in _Net().named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter)
    switch(other := copy.deepcopy(model), plans[0])
    assert str(model.fc1.weight.spec) == "R / 2,3:S0"
    assert str(other.fc1.weight.spec) == "R / 0,1:S0"


@pytest.mark.dist(4)
def test_patterns_of_the_users_own():
    run_world(_check_patterns, 4)
