"""docs/elastic.md: its examples print what it says, and its programs train as one device does."""

import contextlib
import doctest
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

import hdtensor as hd
from hdtensor.elastic import SwitchOptions
from hdtensor.elastic.transport import Carrier
from tests.models.hf import SIZES, batch
from tests.support import world
from tests.support.world import run_world


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "elastic.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
FIRST, EXTRA, ROUNDS, DEAD, JOIN = [block for block in BLOCKS if not block.startswith(">>>")]

CONFIG = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 4})


def test_the_examples_print_what_the_page_says():
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted > 10
    assert results.failed == 0


def plan(name):
    return hd.AnnotationPlan.load(ROOT / "examples" / "plans" / f"{name}.json")


def build(seed):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(CONFIG)


class Beside:
    """Trains a model, and the same one on one device; every loss must be the same."""

    def __init__(self):
        self.plain = build(0)
        self.optimizer = torch.optim.AdamW(self.plain.parameters())
        self.step = 0

    def alone(self):
        """Make a step on one device; return its batch and its loss."""
        data = batch(self.step)
        loss = self.plain(**data).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return data, loss.item()

    def train(self, model, optimizer, num_steps):
        for _ in range(num_steps):
            data, expected = self.alone()
            loss = model(**hd.distribute_batch(model, data)).loss
            loss.backward()
            torch.testing.assert_close(hd.item(loss), expected, rtol=1e-5, atol=0)
            optimizer.step()
            optimizer.zero_grad()


def _check_switch(rank):
    beside = Beside()
    torch.manual_seed(0)
    names = {"config": CONFIG, "train": beside.train}
    with contextlib.chdir(ROOT):
        exec(compile(FIRST, PAGE.name, "exec"), names)
        model, optimizer = names["model"], names["optimizer"]
        assert names["report"].moved
        exec(compile(EXTRA, PAGE.name, "exec"), names)
    assert any(name.startswith("average of ") for name in names["report"].moved)
    for name, tensor in names["averages"].items():
        assert tensor.spec == names["specs"][name]
        parameter = model.get_parameter(name)
        assert torch.equal(tensor.full_tensor(), parameter.detach().full_tensor())
    beside.train(model, optimizer, 2)

    run, num_rounds = Carrier.run, []

    def failing(self, round_):
        num_rounds.append(round_)
        if len(num_rounds) == 3:
            raise RuntimeError("a rank is gone")
        run(self, round_)

    printed = []
    names |= {"new_plan": plan("other_pairs"), "print": lambda *words: printed.append(words)}
    block = ROUNDS.replace("1 << 20", "60_000")  # so that there are some rounds
    assert block != ROUNDS
    Carrier.run = failing
    try:
        exec(compile(block, PAGE.name, "exec"), names)
    finally:
        Carrier.run = run
    ((moved, _, left, _),) = printed
    assert moved > 0 < left
    hd.switch(model, plan("three_subgroups"), optimizer)
    beside.train(model, optimizer, 2)
    exec(compile(block, PAGE.name, "exec"), names)
    assert len(printed) == 1
    beside.train(model, optimizer, 2)


@pytest.mark.dist(4)
def test_a_training_goes_on_through_the_switches_of_the_page():
    run_world(_check_switch, 4)


def _check_death(rank, folder):
    beside = Beside()
    model = hd.parallelize(build(0), plan("three_subgroups"))
    optimizer = torch.optim.AdamW(model.parameters())
    beside.train(model, optimizer, 3)
    if rank == 3:
        return  # it takes no part in anything any more
    names = {"model": model, "optimizer": optimizer, "rank": rank, "dist": dist, "hd": hd}
    names |= {"plan_of_three": plan("two_unlike"), "SwitchOptions": SwitchOptions}
    names["store"] = dist.FileStore(str(folder / "store"), 3)
    exec(compile(DEAD, PAGE.name, "exec"), names)
    beside.train(model, optimizer, 3)
    assert dist.get_world_size() == 3


def _check_arrival(rank, folder):
    beside = Beside()
    old = plan("two_unlike")
    names = {"hd": hd, "dist": dist, "torch": torch, "rank": rank}
    names |= {"build_model": lambda: build(7), "old_plan": old, "new_plan": plan("other_pairs")}
    names["store"] = dist.FileStore(str(folder / "four"), 4)
    dist.destroy_process_group()
    if rank == 3:
        for _ in range(3):
            beside.alone()
        exec(compile(JOIN, PAGE.name, "exec"), names)
        model, optimizer = names["model"], names["optimizer"]
    else:
        store = dist.FileStore(str(folder / "three"), 3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        model = hd.parallelize(build(0), old)
        optimizer = torch.optim.AdamW(model.parameters())
        beside.train(model, optimizer, 3)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=names["store"], rank=rank, world_size=4)
        hd.switch(model, names["new_plan"], optimizer)
    beside.train(model, optimizer, 3)
    parts = [(p.is_local, rank in p.spec.ranks) for p in model.parameters()]
    assert all(is_local == is_inside for is_local, is_inside in parts)


@pytest.mark.dist(4)
@pytest.mark.parametrize("check", [_check_death, _check_arrival])
def test_ranks_die_and_join(check, tmp_path):
    try:
        run_world(check, 4, tmp_path)
    finally:
        world.stop_pools()  # its ranks are in other process groups now
