"""Cases 16 and 31: checkpoints of uneven vocabularies, and loading on other numbers of ranks."""

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import hdtensor as hd
from tests.checkpoint.ranks import load, save, tensor_of
from tests.checkpoint.training import start, train, weights
from tests.support.world import run_world


VOCABULARY = 50257


def _language_model(plan, seed):
    """An embedding and a head over the whole vocabulary, both cut along it."""
    torch.manual_seed(seed)
    embedding, head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY, bias=False)
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    for module in model.values():
        cut = hd.distribute_tensor(module.weight.detach(), plan)
        module.weight = nn.Parameter(cut)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _steps(model, optimizer, plan, steps):
    ranks = (
        hd.HDSpec.from_text(plan).map_bottom(lambda _: hd.Replicate()).replace(top=hd.Replicate())
    )
    losses = []
    for step in steps:
        ids = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(step))
        ids = hd.distribute_tensor(ids, ranks)
        logits = model["head"](model["embedding"](ids).redistribute(ranks))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(hd.item(loss))
    return losses


def _resume_vocabulary(rank, folder, plan):
    model, optimizer = _language_model(plan, 0)
    if plan == "R / 0-3:S0":
        sizes = [12565, 12565, 12565, 12562]
        assert model["head"].weight.to_local().shape == (sizes[rank], 4)
    losses = []
    for step in range(2):  # the second save finds the plan of the first in torch's cache
        losses += _steps(model, optimizer, plan, [step])
        state = {
            "model": dcp.state_dict.get_model_state_dict(model),
            "optimizer": dcp.state_dict.get_optimizer_state_dict(model, optimizer),
        }
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=f"{folder}/{step}", planner=planner)
    losses += _steps(model, optimizer, plan, [2, 3])
    for step in range(2):
        again, fresh = _language_model(plan, 9)
        hd.load_checkpoint(f"{folder}/{step}", again, fresh)
        assert _steps(again, fresh, plan, range(step + 1, 4)) == losses[step + 1 :]
    return losses


@pytest.mark.dist(4)
@pytest.mark.parametrize("plan", ["R / 0-3:S0", "R / 0,1:S0 3:R"])
def test_16_a_vocabulary_that_ranks_do_not_divide_resumes_bit_for_bit(tmp_path, plan):
    losses = run_world(_resume_vocabulary, 4, str(tmp_path), plan)[0]
    assert len(set(losses)) == 4


LAYOUTS = {
    6: ["R / 0-5:S0", "S0[2:1] / 0-3:S1 4,5:R", "R / 0-3(2x2):S0,R 4,5:S0"],
    8: ["R / 0-7:S0", "R / 0-7(2x4):R,S0", "S1[3:5] / 0-2:S0 3-7:S0"],
    16: ["R / 0-15:S0", "R / 0-15(4x4):S0,S1", "R / 0-7:S1 8-15(2x4):S0,R"],
}


def _state(layout, num_ranks, rank, *, empty=False):
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (50, 6), "up": (37, 13), "bias": (5,), "step": ()}
    full = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    specs = {"embedding": layout, "up": layout, "bias": "R / 0:R 3:R", "step": "R / 1:R"}
    state = {name: tensor_of(value, specs[name], rank, empty=empty) for name, value in full.items()}
    return {"model": state, "lr": 0.0 if empty else 0.1}


@pytest.mark.parametrize(("before", "after"), [(8, 16), (8, 6), (6, 8), (16, 6), (6, 16)])
def test_31_any_number_of_ranks_loads_what_any_wrote(tmp_path, before, after):
    for source, target in itertools.product(LAYOUTS[before], LAYOUTS[after]):
        folder = tmp_path / f"{LAYOUTS[before].index(source)}{LAYOUTS[after].index(target)}"
        save(folder, [_state(source, before, rank) for rank in range(before)])
        states = [_state(target, after, rank, empty=True) for rank in range(after)]
        load(folder, states)
        for rank, state in enumerate(states):
            expected = _state(target, after, rank)
            assert state["lr"] == 0.1
            for name, tensor in state["model"].items():
                assert torch.equal(tensor._local_tensor, expected["model"][name]._local_tensor)


def _fewer_replicas(rank, folder):
    model, optimizer = start("dp")
    train(model, optimizer, range(2))
    hd.save_checkpoint(folder, model, optimizer, extra={"loader": {"rank0": 7, "rank1": 9}})
    expected = train(model, optimizer, range(2, 4))
    fewer, fresh = start("dp2", seed=9)
    extra = hd.load_checkpoint(folder, fewer, fresh)
    assert extra["loader"] == {"rank0": 7, "rank1": 9}, "nothing is dropped silently"
    torch.testing.assert_close(train(fewer, fresh, range(2, 4)), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights(fewer), weights(model), rtol=1e-5, atol=1e-7)


@pytest.mark.dist(4)
def test_31_four_replicas_to_two(tmp_path):
    run_world(_fewer_replicas, 4, str(tmp_path))


class _Loader(nn.Module):
    """A state that has one entry for each of so many ranks."""

    def __init__(self, num_ranks):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        for rank in range(num_ranks):
            self.register_buffer(f"rank{rank}", torch.tensor(rank))


def test_31_all_missing_keys_are_listed(tmp_path):
    hd.save_checkpoint(tmp_path, _Loader(8))
    hd.load_checkpoint(tmp_path, _Loader(8))
    with pytest.raises(hd.CheckpointError) as raised:
        hd.load_checkpoint(tmp_path, _Loader(16))
    assert "lacks " + ", ".join(f"model.rank{r}" for r in (10, 11, 12, 13, 14, 15, 8, 9)) in str(raised.value)  # fmt: skip
    with pytest.raises(hd.CheckpointError, match=r"nobody asks for: model\.rank6, model\.rank7"):
        hd.load_checkpoint(tmp_path, _Loader(6))
    hd.load_checkpoint(tmp_path, _Loader(6), strict=False)
