"""A switch that fails in the middle: what each rank holds then, and what the error says."""

import os
import pickle
import signal
import time
from datetime import timedelta

import pytest
import torch

import hdtensor as hd
from hdtensor.elastic import SwitchOptions, decision, switch, switch_tensors
from hdtensor.elastic.transport import Carrier
from tests.models.hf import batch, build, strategy
from tests.support.world import WorldError, run_world


SPECS = {f"t{i}": ("R / 0-2:S0", "S1 / 3:R 0,1:R") for i in range(6)}
FULL = {name: torch.arange(3000.0).reshape(60, 50) + i for i, name in enumerate(SPECS)}


def _tensors():
    return {name: hd.distribute_tensor(FULL[name], src) for name, (src, _) in SPECS.items()}


def _die_in_round(number):
    """Have this rank killed when it is about to take part in a round."""
    run, seen = Carrier.run, []

    def dying(self, round_):
        seen.append(round_)
        if len(seen) > number:
            os.kill(os.getpid(), signal.SIGKILL)
        run(self, round_)

    Carrier.run = dying


def _switch_and_die(rank, options, path):
    tensors = _tensors()
    if rank == 2:
        _die_in_round(1)
    before = {name: (str(t.spec), t.to_local().clone()) for name, t in tensors.items()}
    with pytest.raises(hd.SwitchError) as caught:
        switch_tensors(tensors, {n: dst for n, (_, dst) in SPECS.items()}, options=options)
    after = {name: (str(t.spec), t.to_local().clone()) for name, t in tensors.items()}
    error = caught.value
    path.joinpath(str(rank)).write_bytes(
        pickle.dumps((before, after, str(error), error.moved, error.left))
    )


def _outcomes(tmp_path, options):
    with pytest.raises(WorldError):
        run_world(_switch_and_die, 4, options, tmp_path, timeout=30)
    found = {int(p.name): pickle.loads(p.read_bytes()) for p in tmp_path.iterdir()}
    assert sorted(found) == [0, 1, 3]
    return found


@pytest.mark.dist(4)
@pytest.mark.parametrize("stage_on_host", [False, True])
def test_a_killed_peer_leaves_everything_as_it_was(tmp_path, stage_on_host):
    options = SwitchOptions(
        budget_bytes=20_000, timeout=timedelta(seconds=1), stage_on_host=stage_on_host
    )
    for before, after, text, moved, left in _outcomes(tmp_path, options).values():
        assert "Nothing was changed: every tensor is whole and in the old plan" in text
        assert moved == left == ()
        for name, (spec, local) in before.items():
            assert after[name][0] == spec
            assert torch.equal(after[name][1], local)


@pytest.mark.dist(4)
def test_a_killed_peer_leaves_each_tensor_whole_and_named(tmp_path):
    options = SwitchOptions(atomic=False, budget_bytes=20_000, timeout=timedelta(seconds=1))
    found = _outcomes(tmp_path, options)
    for rank, (_, after, text, moved, left) in found.items():
        assert moved  # one round was complete
        assert left
        assert sorted([*moved, *left]) == sorted(SPECS)
        assert f"In the new plan are {len(moved)}: {', '.join(moved)}." in text
        for name, (src, dst) in SPECS.items():
            want = dst if name in moved else src
            assert after[name][0] == want
            with hd.as_rank(rank):
                expected = hd.distribute_tensor(FULL[name], want, src_data_rank=None).to_local()
            assert torch.equal(after[name][1], expected)
    assert len({moved for _, _, _, moved, _ in found.values()}) == 1


def _check_errors(rank):
    tensors = _tensors()
    wanted = {n: dst for n, (_, dst) in SPECS.items()}
    with pytest.raises(hd.PlanError, match="budget_bytes: 100 is too little for 't0'"):
        switch_tensors(tensors, wanted, options=SwitchOptions(atomic=False, budget_bytes=100))
    with pytest.raises(hd.SwitchError, match="the plan says nothing of the parameter 't5'"):
        switch_tensors(tensors, {n: s for n, s in wanted.items() if n != "t5"})
    unlike = SwitchOptions(budget_bytes=10_000 if rank else 20_000)
    with pytest.raises(hd.DisagreementError, match="switch was called with unlike arguments"):
        switch_tensors(tensors, wanted, options=unlike)
    other = {**wanted, "t0": "R / 0,2:S0" if rank == 1 else "R / 0-1:S0"}
    with pytest.raises(hd.DisagreementError, match="switch was called with unlike arguments"):
        switch_tensors(tensors, other)
    bad = {**wanted, "t0": "no spec" if rank == 1 else wanted["t0"]}
    with pytest.raises(hd.HDTensorError, match="no spec" if rank == 1 else "rank 1 fails with"):
        switch_tensors(tensors, bad)
    missing = {n: s for n, s in wanted.items() if rank != 2 or n != "t3"}
    with pytest.raises(hd.HDTensorError, match="'t3'"):
        switch_tensors(tensors, missing)
    with pytest.raises(hd.SwitchError, match="'y' and 'x' are the same tensor"):
        switch_tensors({"x": tensors["t0"], "y": tensors["t0"]}, {"x": "R / 0:R", "y": "R / 1:R"})
    with pytest.raises(hd.PlanError, match=r"needs the excluded ranks \[3\]"):
        switch_tensors(tensors, wanted, options=SwitchOptions(exclude_ranks=(3,)))
    pending = {"p": hd.distribute_tensor(torch.ones(4), "P / 0:R 1:R")}
    with pytest.raises(hd.PlanError, match="'p' has a pending reduction"):
        switch_tensors(pending, {"p": "R / 0,1:R"})
    with pytest.raises(hd.RedistributeError, match="held by none but the left-out ranks"):
        switch_tensors(tensors, wanted, options=SwitchOptions(exclude_ranks=(2,)))
    for name, tensor in tensors.items():
        assert torch.equal(tensor.full_tensor(), FULL[name])


@pytest.mark.dist(4)
def test_errors_come_before_anything_moves_and_on_every_rank():
    run_world(_check_errors, 4)


def _check_between_steps(rank):
    one, other = strategy(([0, 1], 1)), strategy(([0], 1), ([1], 1))
    model = hd.parallelize(build("llama"), one)
    data = hd.distribute_batch(model, batch(0))
    for _ in range(4):
        model(**data).loss.backward()
    hook = model.model.register_forward_hook(lambda *_: switch(model, other))
    with pytest.raises(hd.SwitchError, match="called inside a forward"):
        model(**data)
    hook.remove()
    loss = model(**data).loss
    loss.register_hook(lambda grad: switch(model, other))
    with pytest.raises(hd.SwitchError, match="called inside a backward"):
        loss.backward()
    loss = model(**data).loss
    switch(model, other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.dist(2)
def test_case_36_a_switch_inside_a_step_raises():
    run_world(_check_between_steps, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exclude_ranks", "3"),
        ("exclude_ranks", [-1]),
        ("exclude_ranks", ["x"]),
        ("rules", "Relay"),
        ("rules", ["relay"]),
        ("budget_bytes", None),
        ("budget_bytes", 2.5),
        ("budget_bytes", 0),
        ("timeout", 3),
        ("topology", "nodes"),
    ],
)
def test_options_that_are_none(field, value):
    with pytest.raises(hd.PlanError, match=f"^{field}: must be"):
        SwitchOptions(**{field: value})


def _check_slow(rank, atomic, slow):
    """A rank that is late at the end: either all go on, or none; nothing is lost."""
    tensors = _tensors()
    wanted = {n: dst for n, (_, dst) in SPECS.items()}
    options = SwitchOptions(atomic=atomic, budget_bytes=10**6, timeout=timedelta(seconds=1))
    agree = decision.Decisions.agree

    def late(self):
        time.sleep(2.5)
        agree(self)

    if rank == slow:
        decision.Decisions.agree = late
    try:
        switch_tensors(tensors, wanted, options=options)
        moved = True
    except hd.SwitchError:
        moved = False
    finally:
        decision.Decisions.agree = agree
    specs = {str(tensor.spec) for tensor in tensors.values()}
    return moved, specs


@pytest.mark.dist(4)
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_rank_does_not_split_the_others(atomic, slow):
    outcomes = run_world(_check_slow, 4, atomic, slow)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0] == (False, {"R / 0-2:S0"})


def _check_strided(rank):
    """Transposed locals are packed within the budget, on every rank alike."""
    full = torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512)
    local = {0: full[:256], 1: full[256:]}.get(rank, torch.empty(0))
    if rank == 0:
        local = local.t().contiguous().t()
    tensor = hd.from_local(local, "R / 0,1:S0", shape=(512, 512))
    options = SwitchOptions(budget_bytes=1 << 17)
    report = switch_tensors({"w": tensor}, {"w": "R / 2,3:S0"}, options=options)
    assert report.num_rounds > 4
    assert torch.equal(tensor.full_tensor(), full)


@pytest.mark.dist(4)
def test_strided_locals_keep_the_budget():
    run_world(_check_strided, 4)


def _check_inference(rank):
    tensors = _tensors()
    with torch.inference_mode():
        switch_tensors(tensors, {n: dst for n, (_, dst) in SPECS.items()})
    assert not any(tensor.to_local().is_inference() for tensor in tensors.values())


@pytest.mark.dist(4)
def test_inference_mode_leaves_no_trace():
    run_world(_check_inference, 4)
