"""What a model gives to several layers, or past them, follows to each stage that uses it. One device is the oracle."""

import pytest
import torch
from torch import nn

import hdtensor as hd
from hdtensor.pipeline import Runner
from tests.pipeline import tiny
from tests.pipeline.tiny import stage
from tests.support.world import run_world


class _Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, hidden, skip, scale):
        hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden)))) * scale
        return hidden if skip is None else hidden + skip


class _Net(nn.Module):
    """Every layer gets the scale; the layers of the second half get outputs of the first, as in a U-Net."""

    def __init__(self, size=8):
        super().__init__()
        self.into = nn.Linear(5, size)
        self.tilt = nn.Parameter(torch.ones(size))
        self.layers = nn.ModuleList(_Block(size) for _ in range(4))
        self.head = nn.Linear(size, 3)

    def forward(self, x):
        hidden = self.into(x)
        scale = hidden.mean(1, keepdim=True) * self.tilt
        outputs = []
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, outputs[3 - i] if i >= 2 else None, scale)
            outputs.append(hidden)
        return self.head(hidden)


def _squares(output, target):
    return ((output - target) ** 2).sum(), target.numel()


_PLANS = {
    "stages of several layers": (
        "1F1B",
        [[([0, 1], 0, 0), ([2], 1, 3)], [([3], 0, 2), ([4], 3, 3)]],
    ),
    "past two stages": ("ZB-H1", [[([0], 0, 0), ([1], 1, 1), ([2], 2, 2), ([3], 3, 3)]]),
    "stages of the same ranks": (
        "Interleaved1F1B",
        [[([0], 0, 0), ([1], 1, 1), ([0], 2, 2), ([1], 3, 3)]],
    ),
    "over the turn of a V": ("ZBV", [[([0, 2], 0, 0), ([1], 1, 1), ([1], 2, 2), ([0, 2], 3, 3)]]),
    "a turn beside none": (
        "Interleaved1F1B",
        [[([0], 0, 1), ([0], 2, 3)], [([1], 0, 0), ([2], 1, 3)]],
    ),
}


def _check_what_passes_stages(rank, name, checkpoints):
    schedule, lanes = _PLANS[name]
    plan = tiny.plan(*(([stage(*s) for s in stages], 3, 2) for stages in lanes))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(_Net())
    model, reference = models
    runner = Runner(model, plan, _squares, schedule=schedule, activation_checkpointing=checkpoints)
    for length in (4, 5, 4):
        x, target = torch.randn(6 * len(lanes), length, 5), torch.randn(6 * len(lanes), length, 3)
        loss = runner.step((x, target))
        expected = ((reference(x) - target) ** 2).mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-6)
        tiny.assert_same_gradients(model, reference, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(
            runner.eval((x, target)), expected.detach(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.dist(5)
@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("name", _PLANS)
def test_skip_connections_and_what_all_layers_get(name, checkpoints):
    run_world(_check_what_passes_stages, 5, name, checkpoints)


def _check_positions_of_the_batch(rank, keep_plain):
    stages = [stage([0, 1], 0, 0), stage([2], 1, 3)]
    plan = tiny.plan((stages, 3, 2), ([stage([3], 0, 3)], 2, 1))
    model, reference = tiny.llama(4), tiny.llama(4)
    runner = Runner(model, plan, keep_plain=keep_plain)
    whole = tiny.batch()
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    whole["position_ids"] = torch.arange(6).expand(8, 6) + torch.arange(8).unsqueeze(1) % 3
    if "position_ids" in keep_plain:
        del whole["attention_mask"]  # transformers then reads the values of positions on every rank
    for _ in range(2):
        loss = runner.step(whole)
        expected = tiny.one_device(reference, whole)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        tiny.assert_same_gradients(model, reference)


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "keep_plain", [("attention_mask",), ("attention_mask", "position_ids")], ids=["cut", "plain"]
)
def test_positions_reach_all_layers_of_later_stages(keep_plain):
    run_world(_check_positions_of_the_batch, 4, keep_plain)


class _Looped(_Net):
    """Calls its first layer once more behind the last one."""

    def forward(self, x):
        hidden = self.into(x)
        scale = hidden.mean(1, keepdim=True)
        for layer in [*self.layers, self.layers[0]]:
            hidden = layer(hidden, None, scale)
        return self.head(hidden)


def _check_layers_out_of_order(rank):
    plan = tiny.plan(([stage([0], 0, 1), stage([1], 2, 3)], 2, 2))
    runner = Runner(_Looped(), plan, _squares)
    with pytest.raises(hd.errors.HDTensorError, match="passes its stages once, in order"):
        runner.step((torch.randn(4, 4, 5), torch.randn(4, 4, 3)))


@pytest.mark.dist(2)
def test_a_layer_behind_a_later_stage_is_refused():
    run_world(_check_layers_out_of_order, 2)


def _check_another_runner(rank):
    schedule, lanes = _PLANS["over the turn of a V"]
    plan = tiny.plan(*(([stage(*s) for s in stages], 3, 2) for stages in lanes))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(_Net())
    model, reference = models
    runners = [Runner(model, plan, _squares, schedule=name) for name in (schedule, "GPipe")]
    for runner in (*runners, runners[0]):
        x, target = torch.randn(6, 4, 5), torch.randn(6, 4, 3)
        loss = runner.step((x, target))
        expected = ((reference(x) - target) ** 2).mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-6)
        tiny.assert_same_gradients(model, reference, rtol=1e-3, atol=1e-5)


@pytest.mark.dist(3)
def test_another_runner_of_the_same_model():
    run_world(_check_another_runner, 3)


def _check_shared_sequences(rank):
    pipelines = [{"stages": [stage([i], 0, 2)], "share": 1, "microbatches": 2} for i in range(2)]
    plan = hd.AnnotationPlan.from_dict({"split": "sequence", "pipelines": pipelines})
    with pytest.raises(hd.errors.PlanError, match="lanes each take samples of their own"):
        Runner(tiny.llama(), plan)


@pytest.mark.dist(2)
def test_lanes_that_share_sequences_are_refused():
    run_world(_check_shared_sequences, 2)
