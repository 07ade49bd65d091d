"""Dropout, checkpointing and offloading under pipelines: the values of one device on the whole batch."""

import contextlib
import functools

import pytest
import torch
from hdtensor.triton_kernels.counter_random import keep_mask
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hdtensor as hd
from hdtensor.errors import PlanError
from hdtensor.pipeline import Runner, causal_lm_loss
from hdtensor.pipeline.runtime import activations, passage
from tests.pipeline import tiny
from tests.support.counter_random import row_major
from tests.support.world import run_world


@contextlib.contextmanager
def counted_dropout():
    """Have dropout on one device take the numbers that belong to elements."""

    def dropout(x, p=0.5, training=True, inplace=False):
        if not training or not p:
            return x
        key = int(torch.randint(-(2**63), 2**63 - 1, ()).item())
        mask = torch.empty(x.shape, dtype=torch.bool)
        keep_mask(mask, key, (0,) * x.ndim, row_major(x.shape), 1.0 - p)
        return x * mask / (1.0 - p)

    before, functional.dropout = functional.dropout, dropout
    try:
        yield
    finally:
        functional.dropout = before


def dropping(**config):
    return tiny.llama(attention_dropout=0.3, attn_implementation="eager", **config).train()


def one_device_step(reference, whole):
    """Return the loss of a step and the next number of torch's generator."""
    torch.manual_seed(7)
    with counted_dropout():
        loss = tiny.one_device(reference, whole)
    return loss, torch.rand(()).item()


def _check_dropout(rank, schedule, options):
    whole, reference = tiny.batch(), dropping()
    runner = Runner(dropping(), tiny.unlike(), schedule=schedule, **options)
    for _ in range(3):
        expected, following = one_device_step(reference, whole)
        torch.manual_seed(7)
        loss = runner.step(whole)
        assert torch.rand(()).item() == following
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        tiny.assert_same_gradients(runner.model, reference)
    # A lane without samples: its rank draws nothing itself, and yet stands where the others do.
    lanes = [whole, []]
    reference.zero_grad()
    expected, following = one_device_step(reference, whole)
    torch.manual_seed(7)
    runner.model.zero_grad()
    torch.testing.assert_close(runner.step(lanes=lanes), expected, rtol=1e-5, atol=1e-6)
    assert torch.rand(()).item() == following


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "options",
    [{}, {"activation_checkpointing": True}, {"activation_offload": [0]}],
    ids=["kept", "computed again", "offloaded"],
)
def test_dropout_is_that_of_the_whole_batch(options):
    run_world(_check_dropout, 4, "1f1b", options)


class _DropConnect(torch.nn.Linear):
    """Drops weights: a matrix whose rows are multiples of a micro-batch's samples, and have nothing to do with them."""

    def forward(self, x):
        dropped = functional.dropout((2.0 * self.weight.t()).t(), 0.3, self.training)
        return functional.linear(functional.dropout(x, 0.2, self.training), dropped)


def _dropping_weights():
    model = tiny.llama().train()
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = _DropConnect
    return model


def _check_dropped_weights(rank, plan, schedule, options):
    whole, reference = tiny.batch(), _dropping_weights()
    runner = Runner(_dropping_weights(), plan, schedule=schedule, **options)
    for _ in range(2):
        expected, following = one_device_step(reference, whole)
        torch.manual_seed(7)
        torch.testing.assert_close(runner.step(whole), expected, rtol=1e-5, atol=1e-6)
        assert torch.rand(()).item() == following
        tiny.assert_same_gradients(runner.model, reference)


@pytest.mark.dist(4)
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}], ids=["kept", "again"])
def test_what_drops_from_weights_is_the_same_for_every_micro_batch(options):
    run_world(_check_dropped_weights, 4, tiny.unlike(), "1f1b", options)
    stages = [tiny.stage([r], i, i) for i, r in enumerate([0, 1, 0])]
    turns = tiny.plan((stages, 3, 2), ([tiny.stage([2, 3], 0, 2)], 2, 1))
    run_world(_check_dropped_weights, 4, turns, "interleaved1f1b", options)


def _check_turns(rank, schedule, options):
    stages = [
        tiny.stage([0], 0, 0),
        tiny.stage([1], 1, 1),
        tiny.stage([0], 2, 2),
        tiny.stage([1], 3, 3),
    ]
    if schedule == "ZBV":
        stages[2:] = [tiny.stage([1], 2, 2), tiny.stage([0], 3, 3)]
    the_plan = tiny.plan((stages, 4, 2))
    whole, reference = tiny.batch(), dropping(num_layers=4)
    runner = Runner(dropping(num_layers=4), the_plan, schedule=schedule, **options)
    for _ in range(2):
        expected, following = one_device_step(reference, whole)
        torch.manual_seed(7)
        torch.testing.assert_close(runner.step(whole), expected, rtol=1e-5, atol=1e-6)
        assert torch.rand(()).item() == following
        tiny.assert_same_gradients(runner.model, reference)


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("Interleaved1F1B", {"activation_checkpointing": [0, 3]}),
        ("Interleaved1F1B", {"activation_offload": [1, 2]}),
        ("ZBV", {"activation_checkpointing": True}),
    ],
)
def test_several_stages_of_a_rank_drop_alike_too(schedule, options):
    run_world(_check_turns, 2, schedule, options)


def _crossings(runner, whole, monkeypatch):
    """Return how many tensors this rank sends and receives in a step."""
    seen = []
    for name in ("send", "receive"):
        cross = getattr(passage.Passage, name)
        monkeypatch.setattr(
            passage.Passage, name, lambda *a, cross=cross: seen.append(1) or cross(*a)
        )
    runner.step(whole)
    monkeypatch.undo()
    return len(seen)


class _Stack(torch.nn.Module):
    """Layers that are called inside of checkpoints, or are not."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = torch.nn.Embedding(tiny.VOCABULARY, 8)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(8, 16),
                torch.nn.GELU(),
                torch.nn.Dropout(0.3),
                torch.nn.Linear(16, 8),
            )
            for _ in range(3)
        )
        self.lm_head = torch.nn.Linear(8, tiny.VOCABULARY)
        self.call = call

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.lm_head(x)


def _plain(layer, x):
    return layer(x)


def _check_checkpointing_inside(rank, use_reentrant):
    whole, reference = tiny.batch(), _Stack(_plain)
    plain = Runner(_Stack(_plain), tiny.pairs())
    with pytest.MonkeyPatch.context() as monkeypatch:
        num = _crossings(plain, whole, monkeypatch)
    runner = Runner(
        _Stack(functools.partial(checkpoint, use_reentrant=use_reentrant)), tiny.pairs()
    )
    for _ in range(2):
        torch.manual_seed(7)
        with pytest.MonkeyPatch.context() as monkeypatch:
            assert _crossings(runner, whole, monkeypatch) == num
        torch.manual_seed(7)
        with counted_dropout():
            total, count = causal_lm_loss(reference(whole["input_ids"]), whole["labels"])
        (total / count).backward()
        tiny.assert_same_gradients(runner.model, reference)


@pytest.mark.dist(4)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_inside_the_model_repeat_no_message(use_reentrant):
    run_world(_check_checkpointing_inside, 4, use_reentrant)


def _check_library_checkpointing(rank):
    whole, reference = tiny.batch(), dropping()
    model = dropping()
    model.activation_checkpointing_enable()
    runner = Runner(model, tiny.pairs())
    torch.manual_seed(7)
    runner.step(whole)
    one_device_step(reference, whole)
    tiny.assert_same_gradients(runner.model, reference)


@pytest.mark.dist(4)
def test_a_model_s_own_checkpointing():
    run_world(_check_library_checkpointing, 4)


def _saved_by_stage(runner, whole):
    """Return how many tensors autograd saves on each stage in a step."""
    saved = {}

    def pack(x):
        now = passage.running()
        is_held = not isinstance(x, hd.HDTensor) or x.is_local
        if now is not None and now.stage is not None and is_held:
            saved[now.stage] = saved.get(now.stage, 0) + 1
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        runner.step(whole)
    return saved


def _check_chosen_stages(rank):
    whole = tiny.batch()
    kept = _saved_by_stage(Runner(tiny.llama(), tiny.pairs()), whole)
    runner = Runner(tiny.llama(), tiny.pairs(), activation_checkpointing=[(0, 1), (1, 0)])
    fewer = _saved_by_stage(runner, whole)
    (stage,) = kept
    if rank in (1, 2):
        assert fewer[stage] < kept[stage] / 2
    else:
        assert fewer == kept

    moved = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(activations, "to_host", lambda x: moved.append(x) or x.clone())
        runner = Runner(tiny.llama(), tiny.pairs(), activation_offload=[1])
        weights = {p._local_tensor.untyped_storage().data_ptr() for p in runner.model.parameters()}
        runner.step(whole)
    assert bool(moved) == (rank in (1, 3))
    assert all(x.untyped_storage().data_ptr() not in weights for x in moved)
    reference = tiny.llama()
    tiny.one_device(reference, whole)
    tiny.assert_same_gradients(runner.model, reference)
    with pytest.raises(
        PlanError, match="no stage 2; the stages are lane 0: 0 to 1, lane 1: 0 to 1"
    ):
        Runner(tiny.llama(), tiny.pairs(), activation_offload=[2])


@pytest.mark.dist(4)
def test_only_the_chosen_stages_compute_again_or_offload():
    run_world(_check_chosen_stages, 4)
