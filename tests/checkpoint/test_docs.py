"""docs/checkpoint.md: its programs run on ranks, and do what the page says."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

import hdtensor as hd
from tests.checkpoint.training import PLANS, train
from tests.models.hf import SIZES
from tests.support.world import run_world


PAGE = Path(__file__).parents[2] / "docs" / "checkpoint.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def _run(rank, folder):
    torch.manual_seed(0)
    losses = {}

    def noted(model, optimizer, steps):
        losses.update(zip(steps, train(model, optimizer, steps), strict=True))

    space = {
        "config": transformers.LlamaConfig(**SIZES),
        "folder": folder,
        "other_plan": PLANS["three"],
        "plan": PLANS["unlike"],
        "train": noted,
    }
    for block in BLOCKS:
        # A program builds a model anew on every rank, with one seed, and other values each time.
        torch.manual_seed(len(losses))
        exec(compile(block, str(PAGE), "exec"), space)
        dist.barrier()
    whole = hd.full_state_dict(space["model"].state_dict())
    for name, tensor in space["again"].state_dict().items():
        assert torch.equal(tensor, whole[name]), name
    fresh = hd.full_state_dict(space["fresh"].state_dict())
    assert all(torch.equal(fresh[name], whole[name]) for name in whole)
    return losses


@pytest.mark.dist(4)
def test_the_programs_of_the_page(tmp_path):
    losses = run_world(_run, 4, str(tmp_path))[0]
    assert sorted(losses) == [0, 1, 2, 3, 4]
    assert losses[4] < losses[0]
