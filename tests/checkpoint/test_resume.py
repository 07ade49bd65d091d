"""A training that was saved goes on under any plan as if nothing had happened."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import hdtensor as hd
from tests.checkpoint.training import PLANS, start, train, weights
from tests.support.world import run_world


def _resume(rank, folder, optimizer, others):
    model, state = start("unlike", optimizer)
    train(model, state, range(2))
    hd.save_checkpoint(folder, model, state, extra={"step": 2, "seen": torch.tensor([5, 7])})
    expected = train(model, state, range(2, 4))
    after = weights(model)

    again, fresh = start("unlike", optimizer, seed=9)
    extra = hd.load_checkpoint(folder, again, fresh)
    assert extra["step"] == 2
    assert extra["seen"].tolist() == [5, 7]
    assert train(again, fresh, range(2, 4)) == expected, "the same plan goes on bit for bit"
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())

    for plan in others:
        other, fresh = start(plan, optimizer, seed=9)
        hd.load_checkpoint(folder, other, fresh)
        torch.testing.assert_close(train(other, fresh, range(2, 4)), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(weights(other), after, rtol=1e-5, atol=1e-7)


@pytest.mark.dist(4)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "plain sgd", "amsgrad"])
def test_resume(tmp_path, optimizer):
    others = ("three", "pair") if optimizer == "adamw" else ("three",)
    run_world(_resume, 4, str(tmp_path), optimizer, others)


def _as_switch(rank, folder):
    model, optimizer = start("unlike")
    train(model, optimizer, range(2))
    hd.save_checkpoint(folder, model, optimizer)
    loaded, fresh = start("three", seed=9)
    hd.load_checkpoint(folder, loaded, fresh)
    hd.switch(model, PLANS["three"], optimizer)
    for p, q in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        for key, value in optimizer.state[p].items():
            other = fresh.state[q][key]
            value, other = (
                getattr(value, "_local_tensor", value),
                getattr(other, "_local_tensor", other),
            )
            assert torch.equal(value, other), key


@pytest.mark.dist(4)
def test_saving_and_loading_is_switching(tmp_path):
    run_world(_as_switch, 4, str(tmp_path))


def _torch_calls(rank, folder):
    """What torch's own documentation shows."""
    model, optimizer = start("unlike")
    train(model, optimizer, range(2))
    parts = get_state_dict(model, optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder + "/sync")
    future = dcp.async_save(
        {"model": parts[0], "optimizer": parts[1]},
        checkpoint_id=folder + "/async",
        process_group=dist.new_group(backend="gloo"),  # beside the messages of the training
    )
    expected = train(model, optimizer, range(2, 4))  # while the snapshot is being written
    future.result()
    for kind in ("sync", "async"):
        again, fresh = start("unlike", seed=9)
        model_state, optimizer_state = get_state_dict(again, fresh)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        set_state_dict(
            again, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert train(again, fresh, range(2, 4)) == expected, kind
    other, fresh = start("three", seed=9)
    hd.load_checkpoint(folder + "/sync", other, fresh)  # the files are the same
    torch.testing.assert_close(train(other, fresh, range(2, 4)), expected, rtol=1e-6, atol=0)


@pytest.mark.dist(4)
def test_torchs_own_calls(tmp_path):
    run_world(_torch_calls, 4, str(tmp_path))


def _whole(rank):
    model, optimizer = start("unlike")
    train(model, optimizer, range(1))
    whole = hd.full_state_dict(
        {"m": get_model_state_dict(model), "o": get_optimizer_state_dict(model, optimizer)}
    )
    expected = weights(model)
    assert {type(t) for t in whole["m"].values()} == {torch.Tensor}
    torch.testing.assert_close(whole["m"], expected, rtol=0, atol=0)
    moments = whole["o"]["state"]["lm_head.weight"]
    assert type(moments["exp_avg"]) is torch.Tensor
    assert moments["exp_avg"].shape == (64, 32)
    one = hd.full_state_dict(get_model_state_dict(model), rank=3, device="cpu")
    assert sorted(one) == (sorted(expected) if rank == 3 else [])
    torch.testing.assert_close(one, expected if rank == 3 else {}, rtol=0, atol=0)

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    fresh, _ = start("three", seed=9)
    with hd.implicit_replication():
        set_model_state_dict(fresh, dict(expected) if rank == 0 else {}, options=options)
    torch.testing.assert_close(weights(fresh), expected, rtol=0, atol=0)
    offloaded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(t.device.type == "cpu" for t in offloaded.values())


@pytest.mark.dist(4)
def test_whole_state_dicts(tmp_path):
    run_world(_whole, 4)
