"""``loss.backward(); optimizer.step()`` under hand-written plans equals one device; accumulation; ``no_sync``."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hdtensor
from hdtensor import HDSpec, PlanError
from hdtensor.plan import ExpandedPlan
from tests.support.world import run_world


WORLD_SIZE = 4
VOCABULARY = 11

#: (batch, column cut, row cut, all on every rank): a plan for ``Net`` each.
PLANS = {
    "unlike tp": ("S0[5:3] / 0,1:R 2:R", "R / 0,1:S0 2:R", "R / 0,1:S1 2:R", "R / 0,1:R 2:R"),
    "tp 3 beside 1": ("S0[3:1] / 0-2:R 3:R", "R / 0-2:S0 3:R", "R / 0-2:S1 3:R", "R / 0-2:R 3:R"),
    "mesh beside ranks": (
        "S0[4:0:1] / 1,3(1x2):R,R 0:R 2:R",
        "R / 1,3(1x2):R,S0 0:R 2:R",
        "R / 1,3(1x2):R,S1 0:R 2:R",
        "R / 1,3(1x2):R,R 0:R 2:R",
    ),
    "one subgroup": ("R / 2,1:R", "R / 2,1:S0", "R / 2,1:S1", "R / 2,1:R"),
    "batch inside too": (
        "S0[2:1] / 0,1:S0 3:R",
        "R / 0,1:R 3:R",
        "R / 0,1:R 3:R",
        "R / 0,1:R 3:R",
    ),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.drop = nn.Dropout(0.0)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return self.head(x)


def new_net(dropout=0.0):
    torch.manual_seed(0)
    net = Net().double()
    net.drop.p = dropout
    return net


def plan_of(name):
    batch, column, row, whole = map(HDSpec.from_text, PLANS[name])
    tensors = dict.fromkeys((n for n, _ in Net().named_parameters()), whole)
    tensors |= {"up.weight": column, "up.bias": column, "down.weight": row, "head.weight": column}
    tensors["embed.weight"] = column
    return ExpandedPlan(tensors=tensors, inputs=batch, labels=batch)


def batch_of(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (8, 5), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0] = -100
    labels[5:, 2:] = -100
    return {"ids": ids, "labels": labels}


WEIGHT = torch.linspace(0.5, 2.0, VOCABULARY).double()


def loss_of(net, batch, weight=WEIGHT):
    logits = net(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), weight)


def spread(net, batch):
    """The batch and the class weights under the net's plan."""
    given = hdtensor.distribute_batch(net, batch)
    spec = net.norm.weight.spec
    return given, hdtensor.distribute_tensor(WEIGHT, spec, src_data_rank=None)


def assert_same(net, reference):
    for (name, p), (_, q) in zip(net.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.allclose(p.detach().full_tensor(), q.detach(), rtol=1e-10), name


def _check_training(rank, name, fused):
    net, reference = new_net(), new_net()
    hdtensor.parallelize(net, plan_of(name))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, fused=fused)
    other = torch.optim.AdamW(reference.parameters(), lr=0.05)
    for step in range(4):
        batch = batch_of(step)
        want = loss_of(reference, batch)
        want.backward()
        loss = loss_of(net, *spread(net, batch))
        loss.backward()
        assert hdtensor.item(loss) == pytest.approx(want.item(), rel=1e-12)
        for p in net.parameters():
            assert p.grad is None or p.grad.spec is p.spec
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
        assert_same(net, reference)


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("name", PLANS)
def test_training_equals_one_device(name):
    run_world(_check_training, WORLD_SIZE, name, name == "unlike tp")


def _check_accumulation(rank, name):
    net, reference = new_net(), new_net()
    hdtensor.parallelize(net, plan_of(name))

    def backward(seed):
        batch = batch_of(seed)
        loss_of(reference, batch).backward()
        loss_of(net, *spread(net, batch)).backward()

    def check():
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            assert p.grad is None or p.grad.spec is p.spec
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(grad.full_tensor(), q.grad)

    backward(0)
    backward(1)  # gradients accumulate, each brought home
    check()
    with hdtensor.no_sync(net):
        backward(2)
        backward(3)
    backward(4)  # brings home what the others left
    check()
    with hdtensor.no_sync(net):
        backward(5)
        with pytest.raises(ZeroDivisionError), hdtensor.no_sync(net):
            raise ZeroDivisionError
        backward(6)
    hdtensor.sync_gradients(net)
    check()
    hdtensor.sync_gradients(net)  # nothing left
    check()


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("name", ["unlike tp", "mesh beside ranks"])
def test_accumulation_and_no_sync(name):
    run_world(_check_accumulation, WORLD_SIZE, name)


def _losses(rank, name):
    """Losses with dropout, which plain torch cannot give: all plans must give the same."""
    net = new_net(dropout=0.4)
    hdtensor.parallelize(net, plan_of(name))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(5)
    losses = []
    for step in range(5):
        loss = loss_of(net, *spread(net, batch_of(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(hdtensor.item(loss))
    return losses


@pytest.mark.dist(WORLD_SIZE)
def test_dropout_is_the_same_under_every_plan():
    found = [run_world(_losses, WORLD_SIZE, name) for name in PLANS]
    for ranks in found:
        for losses in ranks:
            assert losses == pytest.approx(found[0][0], rel=1e-12)


def _check_twice(rank):
    net = new_net()
    with pytest.raises(PlanError, match="parallelize"), hdtensor.no_sync(net):
        pass
    hdtensor.parallelize(net, plan_of("one subgroup"))
    with pytest.raises(PlanError, match="already"):
        hdtensor.parallelize(net, plan_of("one subgroup"))


@pytest.mark.dist(WORLD_SIZE)
def test_parallelize_once():
    run_world(_check_twice, WORLD_SIZE)


def _check_failed_backward(rank):
    net, reference = new_net(), new_net()
    hdtensor.parallelize(net, plan_of("unlike tp"))
    batch = batch_of(0)
    given = spread(net, batch)
    loss = loss_of(net, *given)
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    # Some way in: gradients of late layers are there, and no callback of that backward will come.
    hidden = net.up.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, *given).backward()
    hidden.remove()
    net.zero_grad()
    loss_of(net, *given).backward()
    loss_of(reference, batch).backward()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert p.grad.spec is p.spec
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.dist(WORLD_SIZE)
def test_a_failed_backward_leaves_nothing_behind():
    run_world(_check_failed_backward, WORLD_SIZE)


def _check_frozen(rank):
    net, reference = new_net(), new_net()
    for module in (net, reference):
        module.embed.requires_grad_(False)
        module.up.bias.requires_grad_(False)
    hdtensor.parallelize(net, plan_of("unlike tp"))
    assert not net.up.bias.requires_grad
    for step in range(2):
        loss_of(net, *spread(net, batch_of(step))).backward()
        loss_of(reference, batch_of(step)).backward()
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            assert not p.is_local or (p.grad is None) == (q.grad is None)
            if p.is_local and p.grad is not None:
                assert p.grad.spec is p.spec
                want = hdtensor.distribute_tensor(q.grad, p.spec, src_data_rank=None)
                torch.testing.assert_close(p.grad.to_local(), want.to_local())
        for module in (net, reference):
            module.requires_grad_()  # thawed parameters are brought home as well


@pytest.mark.dist(WORLD_SIZE)
def test_frozen_and_thawed_parameters():
    run_world(_check_frozen, WORLD_SIZE)
