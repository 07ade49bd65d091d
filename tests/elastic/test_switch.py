"""``switch`` on real processes: training goes on as on one device, whatever plans follow one another."""

import pytest
import torch

import hdtensor as hd
from hdtensor.elastic import SwitchOptions, switch
from tests.models.hf import batch, build, strategy
from tests.support.world import run_world


PLANS = [
    strategy(([0, 1], 5), ([2], 3)),  # TP 2 beside TP 1, rank 3 outside
    strategy(([0, 1], 2), ([2], 1), ([3], 1)),  # rank 3 joins
    strategy(([3, 0], 3), ([2], 2)),  # in another order, rank 1 leaves
    strategy(([1], 1), ([3, 2], 3)),  # others
    strategy(([0, 1], 5), ([2], 3)),  # and back
]


def _optimizer(model, name):
    makers = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2, foreach=True),
        "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-2, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-1),
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


def _check_training(rank, name, options, use_regions=True):
    plain = build("llama")
    reference = _optimizer(plain, name)
    model = hd.parallelize(build("llama"), PLANS[0], use_regions=use_regions)
    optimizer = _optimizer(model, name)
    identities = [id(p) for p in model.parameters()]
    for number, plan in enumerate([None, *PLANS[1:]]):
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
