"""The module that holds the layers runs as a whole; modules that compute again in backward, or look into masks, do not."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

import hdtensor as hd
from hdtensor.api import regions
from hdtensor.api.gradients import GradientSync
from hdtensor.api.region_install import install
from tests.api.test_regions import Block, distributed, region_of, states


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.block = Block()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_module_that_computes_again_in_backward_stays_op_by_op(use_reentrant):
    spec = hd.HDSpec.from_text("R / 0:R")
    with hd.as_rank(0):
        torch.manual_seed(0)
        plain = Checkpointed(use_reentrant)
        module = distributed(copy.deepcopy(plain), spec)
        region = region_of(module)
        for _ in range(4):
            x = torch.randn(4, 8)
            plain(x.requires_grad_()).sum().backward()
            mine = hd.distribute_tensor(x.detach(), spec, src_data_rank=None).requires_grad_()
            module(mine).sum().backward()
            for p, q in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad.to_local(), q.grad)
    assert states(region) == ["failed"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_that_is_switched_on_later_is_noticed(use_reentrant):
    spec = hd.HDSpec.from_text("R / 0:R")
    with hd.as_rank(0):
        torch.manual_seed(0)
        plain = nn.Sequential(Block(), Block())
        module = distributed(copy.deepcopy(plain), spec)
        sync = GradientSync(module.parameters())
        inner = [regions.Region(block, sync) for block in module]
        region = regions.Region(module, sync)
        for i in range(6):
            if i == 3:
                assert states(region) == ["running"]
                plain.forward = functools.partial(_checkpointed, plain, use_reentrant)
                region.forward = functools.partial(_checkpointed, module, use_reentrant)
            x = torch.randn(4, 8)
            plain(x.requires_grad_()).sum().backward()
            mine = hd.distribute_tensor(x.detach(), spec, src_data_rank=None).requires_grad_()
            module(mine).sum().backward()
            for p, q in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad.to_local(), q.grad)
    assert states(region) == ["failed"]
    assert len(inner) == 2


def _checkpointed(stack, use_reentrant, x):
    for block in stack:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    return x


@dataclasses.dataclass
class Output(ModelOutput):
    hidden: torch.Tensor | None = None
    extra: torch.Tensor | None = None
    layers: tuple[torch.Tensor, ...] | None = None


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x, mask=None):
        first = x = self.layers[0](x)
        x = self.layers[1](x)
        if mask is not None and not mask.all():
            x = x * mask[:, None]
        return Output(hidden=x, layers=(first,))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Stack()

    def forward(self, x, mask=None):
        out = self.backbone(x, mask)
        return out.hidden + out.layers[0]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_stack_of_layers_runs_as_a_whole(rank):
    spec = hd.HDSpec.from_text("R / 0:R 1:R")
    with hd.as_rank(rank):
        torch.manual_seed(0)
        plain = Model()
        module = distributed(copy.deepcopy(plain), spec)
        stack, *inner = install(
            module, hd.ModelDescription.from_module(plain), GradientSync(module.parameters())
        )
        stack.sync.enabled = False  # one process cannot sum over subgroups
        for rows in (4, 4, 4, 6, 5):
            x = torch.randn(rows, 8)
            mine = module(hd.distribute_tensor(x, "S0[3:1] / 0:R 1:R", src_data_rank=None))
            expected = hd.distribute_tensor(plain(x).detach(), mine.spec, src_data_rank=None)
            torch.testing.assert_close(mine.detach().to_local(), expected.to_local())
            assert mine.shape == (rows, 8)
            mine.pow(2).sum().backward()
    assert states(stack) == ["pruned" if rank == 3 else "running"]
    assert not any(map(states, inner))


def test_a_stack_that_may_look_into_a_plain_mask_runs_layer_by_layer():
    spec = hd.HDSpec.from_text("R / 0:R 1:R")
    with hd.as_rank(0), hd.implicit_replication():
        torch.manual_seed(0)
        plain = Model()
        module = distributed(copy.deepcopy(plain), spec)
        stack, *inner = install(
            module, hd.ModelDescription.from_module(plain), GradientSync(module.parameters())
        )
        stack.sync.enabled = False
        mask = torch.ones(4)
        for step in range(5):
            mask[step % 3] = float(step < 3)  # whole at first, then with holes
            x = torch.randn(4, 8)
            mine = module(hd.distribute_tensor(x, "S0[3:1] / 0:R 1:R", src_data_rank=None), mask)
            torch.testing.assert_close(mine.detach().to_local(), plain(x, mask)[:3].detach())
            mine.pow(2).sum().backward()
    assert states(stack) == []
    assert any("running" in states(region) for region in inner)
