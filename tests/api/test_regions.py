"""Modules that run as a whole give the same as op by op, and fall back where they must."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hdtensor as hd
from hdtensor.api.gradients import GradientSync
from hdtensor.api.regions import Region
from hdtensor.ops import dispatch
from tests.support.world import run_world


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x, scale=None):
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


def distributed(module, spec):
    for inner in module.modules():
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                cut = hd.distribute_tensor(parameter.detach(), spec, src_data_rank=None)
                inner._parameters[key] = nn.Parameter(cut)
    return module


def region_of(module):
    return Region(module, GradientSync(module.parameters()))


def states(region):
    return [layout.state for layout in region.layouts.values()]


class Calls:
    """Counts operators that are dispatched."""

    def __enter__(self):
        self.count, self.original = 0, vars(hd.HDTensor)["__torch_dispatch__"]

        def counting(func, types, args=(), kwargs=None):
            self.count += 1
            return dispatch.dispatch(func, types, args, kwargs)

        hd.HDTensor.__torch_dispatch__ = staticmethod(counting)
        return self

    def __exit__(self, *_):
        hd.HDTensor.__torch_dispatch__ = self.original


def train(module, batches, spec):
    losses, grads = [], []
    for x in batches:
        x = hd.distribute_tensor(x, spec, src_data_rank=None).requires_grad_()
        loss = module(x).pow(2).mean()
        loss.backward()
        losses.append(hd.item(loss))
        grads.append([p.grad.full_tensor() for p in module.parameters()] + [x.grad.full_tensor()])
        for p in module.parameters():
            p.grad = None
    return losses, grads


def _check_equal(rank, batch_spec, weight_spec):
    batch_spec, weight_spec = hd.HDSpec.from_text(batch_spec), hd.HDSpec.from_text(weight_spec)
    batches = [torch.randn(rows, 8) for rows in (8, 8, 8, 6, 5, 8, 7, 3, 9)]
    torch.manual_seed(1)
    plain = Block()
    torch.manual_seed(1)
    tested = distributed(Block(), weight_spec)
    region = region_of(tested)
    losses, grads = train(tested, batches, batch_spec)
    for x, loss, found in zip(batches, losses, grads, strict=True):
        x = x.clone().requires_grad_()
        expected = plain(x).pow(2).mean()
        expected.backward()
        torch.testing.assert_close(torch.tensor(loss), expected.detach())
        for a, b in zip(found, [p.grad for p in plain.parameters()] + [x.grad], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        plain.zero_grad()
    assert states(region) == (["running"] if rank in weight_spec.ranks else ["pruned"])


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("batch_spec", "weight_spec"),
    [
        ("S0[3:1] / 0,1:R 2:R", "R / 0,1:R 2:R"),
        ("S0 / 0,1:S0 2:R", "R / 0,1:R 2:R"),
        ("R / 1,2:S0", "R / 1,2:R"),
        ("R / 1,3:R", "R / 1,3:R"),
    ],
)
def test_a_region_gives_what_one_device_gives(batch_spec, weight_spec):
    run_world(_check_equal, 4, batch_spec, weight_spec)


def test_a_weight_that_is_written_to_before_backward():
    """One device refuses it; a region must not take the new values silently."""
    with hd.as_rank(0):
        spec = hd.HDSpec.from_text("R / 0:R 1:R")
        module = distributed(Block(), spec)
        region = region_of(module)
        x = hd.distribute_tensor(torch.randn(4, 8), spec, src_data_rank=None)
        for _ in range(3):
            module(x).sum().backward()
        assert states(region) == ["running"]
        loss = module(x).sum()
        with torch.no_grad():
            torch._foreach_mul_(list(module.parameters()), 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_running_region_dispatches_no_operator():
    with hd.as_rank(0):
        spec = hd.HDSpec.from_text("R / 0:R 1:R")
        region = region_of(distributed(Block(), spec))
        x = hd.distribute_tensor(torch.randn(4, 8), spec, src_data_rank=None)
        for _ in range(3):
            region.module(x).sum().backward()
        assert states(region) == ["running"]
        with Calls() as calls:
            y = region.module(x)
        assert calls.count == 0
        assert y.spec is spec


@pytest.mark.parametrize("grad", [False, True])
def test_a_pruned_module_is_one_node_whatever_its_size(grad):
    with hd.as_rank(5):
        spec = hd.HDSpec.from_text("S0 / 0:R 1:R")
        module = distributed(
            nn.Sequential(*[Block() for _ in range(6)]), spec.replace(top=hd.Replicate())
        )
        region = region_of(module)
        x = hd.distribute_tensor(torch.randn(4, 8), spec, src_data_rank=None).requires_grad_(grad)
        module(x).sum().backward()
        assert states(region) == ["pruned"]
        with Calls() as calls:
            y = module(x)
        assert calls.count == 0
        assert y.spec is spec
        assert y.shape == (4, 8)
        assert y.requires_grad
        if grad:
            leaves = [f for f, _ in y.grad_fn.next_functions if f]
            assert {type(f).__name__ for f in leaves} == {"AccumulateGrad"}
            assert len(leaves) <= 2 + len(list(module.parameters()))
            y.sum().backward()
            assert not x.grad.is_local


def test_a_pruned_module_draws_as_many_random_keys():
    spec = hd.HDSpec.from_text("R / 0:R")
    after = {}
    for rank in (0, 1):
        with hd.as_rank(rank):
            torch.manual_seed(0)
            module = distributed(
                nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout(0.2)), spec
            )
            region = region_of(module)
            x = hd.distribute_tensor(torch.ones(4, 8), spec, src_data_rank=None)
            for _ in range(4):
                module(x).sum().backward()
            after[rank] = torch.randn(3)
            assert states(region) == (["failed"] if rank == 0 else ["pruned"])
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=0)


class GlobalSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.weight) / x.shape[0]


@pytest.mark.parametrize(
    "module",
    [GlobalSize(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))],
    ids=["global size", "random"],
)
def test_what_is_not_local_stays_op_by_op(module):
    spec = hd.HDSpec.from_text("S0[3:1] / 0:R 1:R")
    with hd.as_rank(0):
        region = region_of(distributed(module, spec.replace(top=hd.Replicate())))
        region.sync.enabled = False  # one process cannot sum over subgroups
        x = hd.distribute_tensor(torch.randn(8, 8), spec, src_data_rank=None)
        for _ in range(4):
            module(x).sum().backward()
        assert states(region) == ["failed"]


class FirstFive(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.weight)[:, :5]


@pytest.mark.parametrize("rank", [0, 1, 5])
@pytest.mark.parametrize("lengths", [(8, 8, 8, 9, 12, 3, 4, 10, 2), (3, 3, 3, 4, 9, 6, 7, 5, 20)])
def test_sizes_beyond_the_seen_ones_are_not_guessed(rank, lengths):
    spec = hd.HDSpec.from_text("R / 0,1:R")
    with hd.as_rank(rank):
        module = distributed(FirstFive(), spec)
        region_of(module)
        for length in lengths:
            x = hd.distribute_tensor(torch.randn(2, length, 8), spec, src_data_rank=None)
            y = module(x)
            assert y.shape == (2, min(length, 5), 8)
            y.sum().backward()
            z = hd.distribute_tensor(torch.randn(2, length), spec, src_data_rank=None)[:, :5]
            assert z.shape == (2, min(length, 5))
