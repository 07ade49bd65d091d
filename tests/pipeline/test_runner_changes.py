"""Models that keep state, work in place, or are changed between steps. One device, with plain tensors, is the oracle."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hdtensor as hd
from hdtensor.errors import PipelineError, PlanError
from hdtensor.pipeline import Runner
from hdtensor.pipeline.runtime.options import runner_options
from tests.pipeline import tiny
from tests.pipeline.test_runner_activations import counted_dropout
from tests.pipeline.tiny import stage
from tests.support.world import run_world


_SIZE, _NUM = 8, 3


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(_SIZE)
        self.up = nn.Linear(_SIZE, _SIZE)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("num_calls", torch.zeros(()))
        self.num_seen, self.last = 0, None
        self.noise = 0.0

    def forward(self, hidden, skip=None):
        hidden = hidden + self.drop(torch.tanh(self.up(self.norm(hidden))))
        return hidden if skip is None else hidden + skip


class _Net(nn.Module):
    def __init__(self, block=_Block):
        super().__init__()
        self.into = nn.Linear(5, _SIZE)
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(_SIZE, 3)

    def forward(self, x):
        return self.head(self.through(self.into(x)))

    def through(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def _squares(output, target):
    return ((output - target) ** 2).sum(), target.numel()


def _plan(zero=0):
    stages = [stage([0], 0, 0), stage([1], 1, 2), stage([2], 3, 3)]
    pipeline = {"stages": stages, "microbatches": _NUM, "mbs": 2}
    return hd.AnnotationPlan.from_dict({"pipelines": [pipeline], "zero": zero})


def _pair(make=_Net):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return models


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(2 * _NUM, 4, size, generator=generator) for size in (5, 3))


def _backward(reference, x, target, parts=1):
    """Return one device's mean loss, after its backward; of a batch that comes in so many parts."""
    pairs = zip(x.chunk(parts), target.chunk(parts), strict=True)
    loss = sum(_squares(reference(a), b)[0] for a, b in pairs) / target.numel()
    loss.backward()
    return loss.detach()


def _check_steps(model, reference, num_steps=3, change=lambda step, model: None, parts=1):
    runner = Runner(model, _plan(), _squares)
    for step in range(num_steps):
        x, target = _batch(step)
        for each in (model, reference):
            each.zero_grad()
            change(step, each)
        loss = runner.step((x.clone(), target))
        expected = _backward(reference, x, target, parts)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
        tiny.assert_same_gradients(model, reference, rtol=1e-3, atol=1e-5)
    return runner


# -- in a call --------------------------------------------------------------------------------------------------------


class _Counts(_Block):
    """Counts its calls in a buffer."""

    def forward(self, hidden):
        self.num_calls += 1
        return super().forward(hidden) * (1 + 0.01 * self.num_calls)


class _CountsItself(_Block):
    """Counts its calls in a number."""

    def forward(self, hidden):
        self.num_seen += 1
        return super().forward(hidden) * (1 + 0.01 * self.num_seen)


class _Remembers(_Block):
    """Adds what it saw in the call before."""

    def forward(self, hidden):
        before, self.last = self.last, hidden.detach().mean()
        return super().forward(hidden if before is None else hidden + 0.1 * before)


class _InPlace(_Net):
    """Centers its input in place."""

    def forward(self, x):
        return super().forward(x.sub_(x.mean(-1, keepdim=True)).mul_(2.0))


class _Checkpointed(_Net):
    """Computes the layers of all stages again in one checkpoint."""

    def through(self, hidden):
        return checkpoint(super().through, hidden, use_reentrant=False)


_MODELS = {
    "counts in a buffer": lambda: _Net(_Counts),
    "counts in a number": lambda: _Net(_CountsItself),
    "remembers a tensor": lambda: _Net(_Remembers),
    "in place": _InPlace,
    "checkpoint over stages": _Checkpointed,
}


def _check_model(rank, name):
    model, reference = _pair(_MODELS[name])
    _check_steps(model, reference, parts=1 if name == "in place" else _NUM)


@pytest.mark.dist(3)
@pytest.mark.parametrize("name", _MODELS)
def test_what_a_call_changes_is_changed_once(name):
    run_world(_check_model, 3, name)


class _Late(_Net):
    """Changes in place what a layer of another stage was given."""

    def through(self, hidden):
        skip = hidden * 0.5
        for layer in self.layers:
            hidden = layer(hidden, skip)
            skip.mul_(1.5)
        return hidden


def _check_changes_on_the_way(rank):
    runner = Runner(_Late(), _plan(), _squares)
    with pytest.raises(PipelineError, match="changes a tensor in place that it has given"):
        runner.step(_batch(0))


@pytest.mark.dist(3)
def test_what_is_on_its_way_may_not_change():
    run_world(_check_changes_on_the_way, 3)


class _Masked(_Net):
    """Gives all layers a tensor of the first stage's, if the mask has a zero."""

    def forward(self, x, attention_mask):
        hidden = self.into(x)
        skip = None if attention_mask.all() else hidden * attention_mask.unsqueeze(-1)
        for layer in self.layers:
            hidden = layer(hidden, skip)
        return self.head(hidden)


def _check_masks(rank, before, after):
    runner = Runner(_Masked(), _plan(), _squares)
    x, target = _batch(0)
    masks = torch.ones(2 * _NUM, 4)
    masks[:2, 1], masks[2:, 1] = before, after
    with pytest.raises(PipelineError, match="may depend on shapes, but not on values"):
        runner.step({"x": x, "attention_mask": masks, "labels": target})


@pytest.mark.dist(3)
@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1)], ids=["comes", "goes"])
def test_what_crosses_by_values_is_refused(before, after):
    run_world(_check_masks, 3, before, after)


# -- between steps ----------------------------------------------------------------------------------------------------


def _set_rate(step, model):
    """Drop in every other step: by the rate, then by the mode of some modules."""
    for layer in model.layers:
        layer.drop.p = 0.3 if step in (1, 3, 4) else 0.0
        layer.drop.train(step != 4)


def _check_rates(rank):
    model, reference = _pair()
    runner = Runner(model, _plan(), _squares)
    for step in range(6):
        x, target = _batch(step)
        for each in (model, reference):
            each.zero_grad()
            _set_rate(step, each)
        torch.manual_seed(step)
        loss = runner.step((x, target))
        torch.manual_seed(step)
        with counted_dropout():
            expected = _backward(reference, x, target)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
        tiny.assert_same_gradients(model, reference, rtol=1e-3, atol=1e-5)


@pytest.mark.dist(3)
def test_dropout_may_begin_and_end():
    run_world(_check_rates, 3)


class _Noisy(_Block):
    def forward(self, hidden):
        hidden = super().forward(hidden)
        return hidden + self.noise * torch.rand_like(hidden) if self.noise else hidden


def _check_noise(rank):
    model, reference = _pair(lambda: _Net(_Noisy))
    runner = _check_steps(model, reference)
    for layer in model.layers:
        layer.noise = 0.1
    with pytest.raises(PipelineError, match="draws random numbers now, and drew none"):
        runner.step(_batch(0))


@pytest.mark.dist(3)
def test_plain_stages_do_not_draw():
    run_world(_check_noise, 3)


def _check_frozen(rank, zero):
    model, reference = _pair()
    runner = Runner(model, _plan(zero), _squares)
    ours, theirs = runner.optimizer_parameters(), list(reference.parameters())
    first = True
    for step, trains in enumerate((False, True, False, True)):
        for each in (model, reference):
            each.layers.requires_grad_(trains)
        x, target = _batch(step)
        runner.step((x, target))
        _backward(reference, x, target)
        for each in (model, reference):  # what comes next does not change what is there
            each.layers.requires_grad_(not trains)
        for p, q in zip(ours, theirs, strict=True):
            assert (p.grad is None) == (q.grad is None), (step, tuple(p.shape))
        assert first == any(p.grad is None for p in ours)
        first = False
        norm = hd.clip_grad_norm_(ours, 1.0)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 1.0))
        if step == 1:
            for p in (*ours, *theirs):
                p.grad = None
            first = True


@pytest.mark.dist(3)
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_there_for_what_trained(zero):
    run_world(_check_frozen, 3, zero)


def _check_replaced(rank):
    model = _Net()
    runner = Runner(model, _plan(), _squares)
    runner.step(_batch(0))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    runner.step(_batch(0))
    weight = model.layers[1].up.weight
    handle = weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(PlanError, match=r"a hook on the parameter layers\.1\.up\.weight"):
        runner.step(_batch(0))
    handle.remove()
    model.to(torch.float64)
    with pytest.raises(PlanError, match=r"is torch\.float64 now, and was torch\.float32"):
        runner.step(_batch(0))
    model.to(torch.float32)
    runner.step(_batch(0))
    model.layers[2].adapter = nn.Linear(_SIZE, 1)
    with pytest.raises(PlanError, match=r"layers\.2\.adapter\.weight came to the model after"):
        runner.step(_batch(0))
    del model.layers[2].adapter
    model.load_state_dict(state, assign=True)
    with pytest.raises(PlanError, match=r"into\.weight was replaced after the Runner was made"):
        runner.eval(_batch(0))


@pytest.mark.dist(3)
def test_what_a_runner_cannot_follow_is_refused():
    run_world(_check_replaced, 3)


def _check_copy(rank):
    model, reference = _pair()
    _check_steps(model, reference)
    other, expected = copy.deepcopy(model), copy.deepcopy(reference)
    _check_steps(other, expected)
    _check_steps(model, reference)


@pytest.mark.dist(3)
def test_a_copy_of_a_model_has_a_runner_of_its_own():
    run_world(_check_copy, 3)


def test_an_option_with_a_slip_is_told_the_nearest_one():
    assert runner_options({"targets": ("y",)}).targets == ("y",)
    with pytest.raises(
        PlanError, match=r"^activation_ofload: .* Did you mean activation_offload\?"
    ):
        runner_options({"activation_ofload": True})
    with pytest.raises(PlanError, match=r"Did you mean num_microbatches\?"):
        Runner(None, None, num_microbatch=4)
