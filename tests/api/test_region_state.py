"""What changes between calls of modules that run as a whole: rates, modes, what a module keeps, what trains."""

import pytest
import torch
from torch import nn

import hdtensor as hd
from hdtensor.errors import DeductionError
from tests.api.test_regions import Block, distributed, region_of, states


@pytest.mark.parametrize("rank", [0, 1], ids=["held", "skipped"])
def test_dropout_that_is_switched_on_later_draws_on_all_ranks(rank):
    spec = hd.HDSpec.from_text("R / 0:R")
    with hd.as_rank(rank):
        torch.manual_seed(0)
        module = distributed(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), spec)
        region_of(module)
        x = hd.distribute_tensor(torch.ones(4, 8), spec, src_data_rank=None)
        for p, has_drawn in ((0.0, False), (0.5, True), (0.0, False)):
            module[1].p = p
            for _ in range(4):
                before = torch.get_rng_state()
                y = module(x)
                y.sum().backward()
                assert has_drawn != torch.equal(before, torch.get_rng_state())
                if rank == 0 and has_drawn:
                    assert (y.to_local() == 0).any()


class _Kept(nn.Module):
    """Changes what it keeps, or draws, in a way that no operator on an HDTensor shows."""

    def __init__(self, does):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.does, self.num, self.last = does, 0, None

    def forward(self, x):
        y = x * self.weight
        if self.does == "counts":
            self.num += 1
            return y * self.num
        if self.does == "remembers":
            before, self.last = self.last, y.detach()
            return y if before is None else y + before
        if self.does == "caches":
            self.last = 2.0 if self.last is None else self.last
            return y + self.last
        noise = torch.rand(()) if self.does == "draws" or self.num else 0.0
        return y + noise


@pytest.mark.parametrize(
    ("does", "state"),
    [
        ("counts", "failed"),
        ("remembers", "failed"),
        ("draws", "failed"),
        ("caches", "running"),
        ("nothing", "running"),
    ],
)
def test_what_keeps_state_runs_once_a_call(does, state):
    spec = hd.HDSpec.from_text("R / 0:R")
    with hd.as_rank(0):
        module, plain = distributed(_Kept(does), spec), _Kept(does)
        region = region_of(module)
        torch.manual_seed(0)
        found = []
        for _ in range(5):
            y = module(hd.distribute_tensor(torch.ones(2, 8), spec, src_data_rank=None))
            y.sum().backward()
            found.append(y.to_local().detach())
        torch.manual_seed(0)
        for y in found:
            torch.testing.assert_close(y, plain(torch.ones(2, 8)).detach())
        assert states(region) == [state]
        if does == "nothing":
            module.num = 1
            with pytest.raises(DeductionError, match="_Kept draws random numbers now"):
                module(hd.distribute_tensor(torch.ones(2, 8), spec, src_data_rank=None))


def test_hooks_inside_see_distributed_tensors():
    spec = hd.HDSpec.from_text("R / 0:R")
    seen = []
    with hd.as_rank(0):
        module = distributed(Block(), spec)
        region = region_of(module)
        module.up.register_forward_hook(lambda m, a, out: seen.append(type(out)))
        x = hd.distribute_tensor(torch.randn(4, 8), spec, src_data_rank=None)
        for _ in range(4):
            module(x).sum().backward()
    assert states(region) == []
    assert seen == [hd.HDTensor] * 4


def test_a_hook_that_comes_later_is_seen_too():
    spec = hd.HDSpec.from_text("R / 0:R")
    seen = []
    with hd.as_rank(0):
        module = distributed(Block(), spec)
        region = region_of(module)
        x = hd.distribute_tensor(torch.randn(4, 8), spec, src_data_rank=None)
        for _ in range(4):
            module(x).sum().backward()
        assert states(region) == ["running"]
        module.up.register_forward_hook(lambda m, a, out: seen.append(type(out)))
        module(x)
        assert seen == [hd.HDTensor]


def test_gradient_hooks_of_parameters_are_called():
    spec = hd.HDSpec.from_text("R / 0:R")
    seen = []
    with hd.as_rank(0):
        module = distributed(Block(), spec)
        region_of(module)
        module.up.weight.register_hook(lambda grad: seen.append(type(grad)))
        x = hd.distribute_tensor(torch.randn(4, 8), spec, src_data_rank=None)
        for _ in range(5):
            module(x).sum().backward()
    assert seen == [hd.HDTensor] * 5


def test_gradients_accumulate_and_follow_new_weights():
    spec = hd.HDSpec.from_text("R / 0:R")
    with hd.as_rank(0):
        torch.manual_seed(0)
        plain = Block()
        torch.manual_seed(0)
        module = distributed(Block(), spec)
        region_of(module)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, module)]
        for step in range(8):
            x = torch.randn(4, 8)
            plain(x).sum().backward()
            module(hd.distribute_tensor(x, spec, src_data_rank=None)).sum().backward()
            if step % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for p, q in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.detach().to_local(), q.detach())
                if q.grad is not None:
                    torch.testing.assert_close(p.grad.to_local(), q.grad)


def test_gradients_of_a_skipped_module_exist_until_they_are_cleared():
    spec = hd.HDSpec.from_text("R / 0:R")
    with hd.as_rank(3):
        module = distributed(Block(), spec)
        region = region_of(module)
        x = hd.distribute_tensor(torch.ones(4, 8), spec, src_data_rank=None)
        for _ in range(3):
            module(x).sum().backward()
            assert all(p.grad is not None and not p.grad.is_local for p in module.parameters())
            assert all(p.grad.spec is p.spec for p in module.parameters())
            module.zero_grad()
            assert all(p.grad is None for p in module.parameters())
        module.up.weight.requires_grad_(False)
        module(x).sum().backward()
        assert module.up.weight.grad is None
        assert module.down.weight.grad is not None
    assert "pruned" in states(region)


@pytest.mark.parametrize("rank", [0, 3])
def test_parameters_may_thaw(rank):
    spec = hd.HDSpec.from_text("R / 0:R")
    with hd.as_rank(rank):
        module = distributed(Block(), spec)
        region_of(module)
        x = hd.distribute_tensor(torch.ones(4, 8), spec, src_data_rank=None)
        module.requires_grad_(False)
        for _ in range(3):
            assert not module(x).requires_grad
        module.requires_grad_(True)
        for _ in range(4):
            module(x).sum().backward()
            assert all(p.grad is not None and p.grad.spec is p.spec for p in module.parameters())
            module.zero_grad()
        module.up.weight.requires_grad_(False)
        for _ in range(4):
            module(x).sum().backward()
            assert module.up.weight.grad is None
            assert module.down.weight.grad is not None
            module.zero_grad()


def test_parameters_may_thaw_while_the_module_is_called_in_another_mode():
    with hd.as_rank(0):
        module = distributed(Block(), hd.HDSpec.from_text("R / 0:R"))
        region = region_of(module)
        x = hd.distribute_tensor(torch.ones(4, 8), "R / 0:R", src_data_rank=None)
        for trains, is_training in ((False, True), (True, False), (True, True), (False, False)):
            module.requires_grad_(trains).train(is_training)
            for _ in range(3):
                y = module(x)
                assert y.requires_grad == trains
                if trains:
                    y.sum().backward()
                    assert all(p.grad is not None for p in module.parameters())
                    module.zero_grad()
        assert states(region) == ["running"] * 2
