"""torch's getters and setters with ``full_state_dict=True``: what plain PyTorch keeps, and back into any plan."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import hdtensor as hd
from hdtensor.tensor import HDTensor
from tests.checkpoint.training import OPTIMIZERS, PLANS, start, train, weights
from tests.models.hf import batch, build
from tests.support.world import run_world


FULL = StateDictOptions(full_state_dict=True)
HOST = StateDictOptions(full_state_dict=True, cpu_offload=True)
SENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _reference(name, steps):
    """One device: a model and an optimizer after some steps."""
    model = build("llama", 0)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in steps:
        model(**batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _tensors(value):
    if isinstance(value, dict):
        return [t for inner in value.values() for t in _tensors(inner)]
    if isinstance(value, list | tuple):
        return [t for inner in value for t in _tensors(inner)]
    return [value] if isinstance(value, torch.Tensor) else []


def _there_and_back(rank, name):
    plain, reference = _reference(name, range(2))
    expected = get_state_dict(plain, reference)
    model, optimizer = start("unlike", name)
    train(model, optimizer, range(2))
    state = get_state_dict(model, optimizer, options=FULL)
    assert {type(t) for t in _tensors(state)} == {torch.Tensor}
    torch.testing.assert_close(_tensors(state), _tensors(expected), rtol=1e-5, atol=1e-7)
    assert state[1]["param_groups"] == expected[1]["param_groups"]
    host = [get_model_state_dict(model, options=HOST), get_optimizer_state_dict(model, optimizer, options=HOST)]  # fmt: skip
    assert [sorted(part) for part in host] == [sorted(part) if rank == 0 else [] for part in state]
    torch.testing.assert_close(_tensors(host), _tensors(state) if rank == 0 else [], rtol=0, atol=0)

    plain_again, theirs = _reference(name, range(0))
    set_state_dict(plain_again, theirs, model_state_dict=copy.deepcopy(state[0]), optim_state_dict=copy.deepcopy(state[1]))  # fmt: skip
    runs = []
    for plan, options in (("three", FULL), ("unlike", SENT), ("dp2", HOST)):
        fresh, own = start(plan, name, seed=9)
        given = [{}, {}] if options is SENT and rank else copy.deepcopy(list(expected))
        set_model_state_dict(fresh, given[0], options=options)
        set_optimizer_state_dict(fresh, own, given[1], options=options)
        assert all(isinstance(p, HDTensor) for p in fresh.parameters())
        kept = [t for p in fresh.parameters() for t in own.state[p].values()]
        assert all(isinstance(t, HDTensor) for t in kept if t is not None and t.ndim)
        runs.append((fresh, own))
    losses = [train(fresh, own, range(2, 4)) for fresh, own in runs]
    after, optimizer = plain_again, theirs
    for step in range(2, 4):
        loss = after(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for found in losses:
            assert found[step - 2] == pytest.approx(loss.item(), rel=1e-5)
    for fresh, _ in runs:
        torch.testing.assert_close(weights(fresh), dict(after.named_parameters()), rtol=1e-4, atol=1e-6)  # fmt: skip


@pytest.mark.dist(4)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_there_and_back(name):
    run_world(_there_and_back, 4, name)


def _variants(rank):
    """Tied weights, a model on the meta device, flat optimizer states, names that are missing, other shapes."""
    plain = build("llama", 0, tie_word_embeddings=True)
    model, optimizer = start("unlike", tie_word_embeddings=True)
    whole = get_model_state_dict(model, options=FULL)
    torch.testing.assert_close(whole, plain.state_dict(), rtol=0, atol=0)
    fresh, _ = start("three", seed=9, tie_word_embeddings=True)
    set_model_state_dict(fresh, dict(whole) if rank == 0 else {}, options=SENT)
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight
    torch.testing.assert_close(weights(fresh), weights(model), rtol=0, atol=0)

    train(model, optimizer, range(1))
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=flat)
    assert type(state["state.model.norm.weight.exp_avg"]) is torch.Tensor

    whole.pop("model.norm.weight")
    before = fresh.model.norm.weight.detach().full_tensor()
    for options in (FULL, SENT):
        given = dict(whole) if rank == 0 or options is FULL else {}
        loose = StateDictOptions(full_state_dict=True, broadcast_from_rank0=options is SENT, strict=False)  # fmt: skip
        set_model_state_dict(fresh, dict(given), options=loose)
        assert torch.equal(fresh.model.norm.weight.detach().full_tensor(), before)
        given.update({"model.norm.weight": torch.ones(7)} if given else {})
        with pytest.raises(hd.CheckpointError, match=r"model\.norm\.weight \(\(7,\), \(32,\)\)"):
            set_model_state_dict(fresh, given, options=options)
    with pytest.raises(hd.CheckpointError, match=r"lm_head\.weight \(HDTensor, "):
        set_model_state_dict(fresh, get_model_state_dict(model), options=FULL)
    with pytest.raises(RuntimeError, match="Missing key"):
        set_model_state_dict(fresh, dict(whole) if rank == 0 else {}, options=SENT)


@pytest.mark.dist(4)
def test_variants():
    run_world(_variants, 4)


def _meta(rank):
    plain = build("llama", 3)
    with torch.device("meta"):
        model = build("llama", 0)
    model = hd.parallelize(model, PLANS["unlike"])
    given = plain.state_dict() if rank == 0 else {}
    set_model_state_dict(model, given, options=SENT)
    torch.testing.assert_close(weights(model), dict(plain.named_parameters()), rtol=0, atol=0)


@pytest.mark.dist(4)
def test_a_model_made_on_the_meta_device():
    run_world(_meta, 4)
