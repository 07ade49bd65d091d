"""What importing hdtensor puts before torch's functions and steps leaves plain tensors as they are."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.optim import _adafactor, _muon

import hdtensor  # noqa: F401 - what it does when it is imported is the subject


KINDS = [optim.Adafactor, optim.Muon, optim.LBFGS, optim.AdamW]


class _Own(optim.Adafactor):
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("kind", [*KINDS, _Own], ids=lambda kind: kind.__name__)
def test_plain_steps_are_those_of_torch(kind, monkeypatch):
    """With torch's own functions back in place, and without hooks, the same bits come out."""
    found = []
    for own in (False, True):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(4, 6))
        optimizer = kind([p], lr=0.1)
        with monkeypatch.context() as patch:
            if own:
                patch.setattr(_adafactor, "adafactor", _adafactor.adafactor.__wrapped__)
                name = "_zeropower_via_newtonschulz"
                patch.setattr(_muon, name, getattr(_muon, name).__wrapped__)
                for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
                    patch.setattr(sys.modules[optim.Optimizer.__module__], hooks, {})

            def closure(p=p, optimizer=optimizer):
                optimizer.zero_grad()
                loss = p.sin().sum()
                loss.backward()
                return loss

            for _ in range(3):
                optimizer.step(closure)
        found.append((p.detach(), optimizer.state_dict()))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon, optim.AdamW, _Own])
def test_copies_and_pickles(kind):
    p = nn.Parameter(torch.ones(4, 6))
    optimizer = kind([p], lr=0.1)
    for change in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        optimizer = change(optimizer)
        (q,) = optimizer.param_groups[0]["params"]
        before = q.detach().clone()
        q.grad = torch.ones_like(q)
        optimizer.step()
        assert not torch.equal(q.detach(), before)


def test_a_compiled_step():
    found = []
    for compiled in (False, True):
        p = nn.Parameter(torch.ones(4, 6))
        optimizer = optim.AdamW([p], lr=0.1)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step  # fmt: skip
        for _ in range(3):
            p.grad = p.detach().sin()
            step()
        found.append(p.detach())
    torch.testing.assert_close(*found)


def test_plain_state_dicts_go_straight_to_torch():
    net = nn.Linear(3, 2)
    options = state_dicts.StateDictOptions(full_state_dict=True)
    state = state_dicts.get_model_state_dict(net, options=options)
    torch.testing.assert_close(state, dict(net.state_dict()), rtol=0, atol=0)
    state_dicts.set_model_state_dict(net, {n: t + 1 for n, t in state.items()}, options=options)
    assert state_dicts._gather_state_dict.__wrapped__.__name__ == "_gather_state_dict"
