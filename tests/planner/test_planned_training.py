"""A plan for this machine, its five ranks declared as two fast and three slow, trains as one process does."""

import json
import warnings
from pathlib import Path

import pytest
import torch

import hdtensor as hd
from hdtensor import cli
from hdtensor.pipeline import Runner
from tests.pipeline.training import batch, llama
from tests.support.world import run_world


CLUSTER = """
devices:
  fast: {like: CPU, speed: 2}
  slow: {like: CPU}
nodes:
  - {device: fast, count: 2}
  - {device: slow, count: 3}
network: 1 GB/s
"""
SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "config.json").write_text(json.dumps(SIZES))
    return folder


def _check_training(rank, path):
    plan = hd.AnnotationPlan.load(path)
    runner, reference = Runner(llama(), plan), llama()
    optimizer = torch.optim.AdamW(runner.optimizer_parameters(), lr=0.01)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(3):
        data = batch(step)
        loss = runner.step(data)
        optimizer.step()
        optimizer.zero_grad()
        # The model's own loss is the mean over the tokens that count.
        expected = reference(**data).loss
        expected.backward()
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    return float(loss)


@pytest.mark.dist(5)
@pytest.mark.parametrize("zero", [0, 1])
def test_five_ranks_train_by_the_plan_made_for_them(files, capsys, zero):
    path = str(files / f"plan{zero}.json")
    arguments = ["plan", "--model", str(files / "config.json"), "--cluster", str(files / "cluster.yaml"),
                 "--batch", "8", "--context", "2048", "--precision", "float32", "--mbs", "1,2", "--min-lanes", "2",
                 "--zero", str(zero), "-o", path]  # fmt: skip
    assert cli.main(arguments) == 0
    capsys.readouterr()
    plan = hd.AnnotationPlan.load(path)
    assert len(plan.pipelines) >= 2
    assert sum(plan.shares) == 8
    samples = dict.fromkeys(range(5), 0.0)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for r in stage.ranks:
                samples[r] += pipeline.samples * stage.num_layers / len(stage.ranks)
    # The fast ranks do more of the samples' layers than the slow ones.
    assert min(samples[0], samples[1]) > max(samples[2], samples[3], samples[4])
    losses = run_world(_check_training, 5, path)
    assert len(set(losses)) == 1


def _check_warning(rank, path):
    plan = hd.AnnotationPlan.load(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Runner(llama(), plan)
        Runner(llama(), plan, num_microbatches=2)
    return [str(each.message)[:60] for each in caught if "planned_for" in str(each.message)]


@pytest.mark.dist(2)
def test_a_runner_warns_of_a_batch_that_the_plan_was_not_made_for(files, capsys):
    path = str(files / "edited.json")
    arguments = ["plan", "--model", str(files / "config.json"), "--cluster", "2x CPU", "--batch", "4", "--context",
                 "32", "--precision", "float32", "--min-lanes", "2", "--mbs", "1", "-o", path]  # fmt: skip
    assert cli.main(arguments) == 0
    capsys.readouterr()
    assert run_world(_check_warning, 2, path) == [[], []]
    value = json.loads(Path(path).read_text())
    value["pipelines"][0]["microbatches"] += 1
    Path(path).write_text(json.dumps(value))
    message = "batch: the pipelines take 5 samples, but planned_for says th"
    assert run_world(_check_warning, 2, path) == [[message], []]
