"""Unmodified Hugging Face models whose sequences are shared by ranks train as on one device."""

import copy

import pytest
import torch
import torch.nn.functional as F

import hdtensor as hd
from hdtensor.debug import count_communication
from tests.models.hf import batch, build, compare_gradient, compare_training
from tests.support.world import run_world


def plan(*stages, **options):
    """Return a plan of one-stage pipelines, each ``(ranks, cp, share)``."""
    pipelines = [
        {"stages": [{"ranks": ranks, "layers": [0, 1], "cp": cp}], "share": share}
        for ranks, cp, share in stages
    ]
    return hd.AnnotationPlan.from_dict({"version": 1, "pipelines": pipelines, **options})


CP2 = [([0, 1], 2, 1)]
CP2_TP2 = [([0, 1, 2, 3], 2, 1)]
CP2_BESIDE_TP1 = [([0, 1], 2, 2), ([2], 1, 1)]
SPLIT = [([0, 1], 1, 2), ([2], 1, 1)]
SPLIT_AND_CP = [([0, 1], 2, 2), ([2], 1, 1)]
SEQUENCE = {"split": "sequence"}
ZIGZAG = {"sequence_order": "zigzag"}
ALSO_TP = {"sequence_parallel": True}
RING = {"context_parallel": "ring"}

CASES = [
    pytest.param("llama", CP2, {}, {}, id="cp2"),
    pytest.param("qwen3", CP2_TP2, {}, {}, id="cp2_tp2"),
    pytest.param("llama", CP2_TP2, RING | ZIGZAG, {}, id="cp2_tp2_ring_zigzag"),
    pytest.param("llama", CP2_TP2, ALSO_TP | ZIGZAG, {}, id="cp2_tp2_sequence_parallel"),
    pytest.param("llama", CP2_BESIDE_TP1, {}, {}, id="cp2_beside_tp1"),
    pytest.param(
        "llama", CP2_BESIDE_TP1, ZIGZAG, {"masked": True}, id="cp2_beside_tp1_zigzag_masked"
    ),
    pytest.param("llama", CP2_BESIDE_TP1, RING, {"masked": True}, id="cp2_beside_tp1_ring_masked"),
    pytest.param("llama", SPLIT, SEQUENCE, {}, id="split"),
    pytest.param("qwen3", SPLIT, SEQUENCE | ZIGZAG, {}, id="split_zigzag"),
    pytest.param("llama", SPLIT_AND_CP, SEQUENCE | ZIGZAG | RING, {}, id="split_and_cp"),
    pytest.param("gpt2", SPLIT, SEQUENCE | ZIGZAG, {}, id="gpt2_split_zigzag"),
]


def _train(rank, family, plan, options):
    compare_training(family, plan, steps=3, lengths=(12, 13, 5), size=3, **options)


@pytest.mark.dist(4)
@pytest.mark.parametrize(("family", "stages", "keys", "options"), CASES)
def test_training_equals_one_device(family, stages, keys, options):
    run_world(_train, 4, family, plan(*stages, **keys), options)


def _count(rank, plan):
    model = hd.parallelize(build("llama", vocab_size=256), plan, use_regions=False)
    data = batch(0, size=2, length=13)
    with count_communication() as count:
        out = model(**hd.distribute_batch(model, data))
        out.loss.backward()
    logits_bytes = 2 * 7 * 256 * 4  # one rank's, in float32
    forward = [e for e in count.events if e.why not in ("gradients",) and "backward" not in e.why]
    reasons = {e.why for e in forward}
    largest = max((e.num_bytes for e in forward), default=0)
    restored = hd.restore_sequence(model, out.logits.detach(), 13)
    expected = build("llama", vocab_size=256)(**data).logits.detach()
    torch.testing.assert_close(restored, expected)
    return reasons, largest, logits_bytes


@pytest.mark.dist(4)
@pytest.mark.parametrize("keys", [{}, RING, ZIGZAG], ids=str)
def test_logits_are_not_gathered(keys):
    attention = f"context parallel ({keys.get('context_parallel', 'all_gather')})"
    loss = "aten.nll_loss_forward.default (effective weight of the loss)"
    reasons, largest, logits_bytes = run_world(_count, 4, plan(*CP2, **keys))[0]
    assert reasons == {attention, loss}
    assert largest < logits_bytes, "keys of two heads of 8 are smaller than logits of 256 words"


def _train_with_checkpoints(rank, plan):
    reference, tested = build("llama"), build("llama")
    tested.activation_checkpointing_enable()
    hd.parallelize(tested.train(), plan, use_regions=False)
    for step in range(2):
        data = batch(step, size=2, length=13)
        reference(**data).loss.backward()
        tested(**hd.distribute_batch(tested, data)).loss.backward()
    for (name, p), q in zip(tested.named_parameters(), reference.parameters(), strict=True):
        compare_gradient(name, p, q)


@pytest.mark.dist(4)
def test_layers_computed_again_in_backward():
    keys = SEQUENCE | ZIGZAG | RING
    run_world(_train_with_checkpoints, 4, plan(*SPLIT_AND_CP, **keys))


def _switch(rank, before, after):
    reference, tested = build("llama"), hd.parallelize(build("llama"), before)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, tested)]
    for step in range(2):
        data = batch(step, size=3, length=12)
        expected = reference(**data).loss
        loss = tested(**hd.distribute_batch(tested, data)).loss
        torch.testing.assert_close(hd.item(loss), expected.item(), rtol=1e-6, atol=0)
        for each in (expected, loss):
            each.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            hd.switch(tested, after, optimizers[1])


@pytest.mark.dist(4)
def test_a_switch_between_plans_that_share_sequences_and_not():
    run_world(_switch, 4, plan(*SPLIT, **SEQUENCE | ZIGZAG), plan(([0], 1, 1), ([1, 2], 1, 2)))
    run_world(_switch, 4, plan(([0, 1], 1, 1)), plan(*CP2_TP2, **RING))


def _refuse(rank, plan, options, changes, message):
    model = hd.parallelize(build("llama", **options), plan)

    def run():
        return model(**hd.distribute_batch(model, batch(0, size=2) | changes))

    with pytest.raises(hd.PlanError, match=message):
        run()


@pytest.mark.dist(4)
def test_other_orders_need_attention_by_position():
    zigzag = plan(*CP2, **ZIGZAG)
    eager = {"attn_implementation": "eager"}
    run_world(_refuse, 4, zigzag, eager, {}, "LlamaAttention did not call F.scaled_dot_product")
    positions = torch.arange(12).remainder(6).expand(2, -1)
    packed = {"position_ids": positions}
    run_world(_refuse, 4, zigzag, {}, packed, "position_ids other than 0, 1, 2")


class Block(torch.nn.Module):
    """A model of its own: other names, no masks, no positions."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 48)
        self.outer = torch.nn.Linear(16, 16)

    def forward(self, x):
        """Attend over dim 1 of [batch, sequence, 16]."""
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.outer(out.transpose(1, 2).flatten(2))


def _train_own(rank, plan):
    torch.manual_seed(0)
    reference, x = Block().double(), torch.randn(2, 13, 16, dtype=torch.float64)
    tested = hd.parallelize(copy.deepcopy(reference), plan)
    reference(x).pow(2).mean().backward()
    result = tested(hd.distribute_batch(tested, x))
    result.pow(2).mean().backward()
    for (name, p), q in zip(tested.named_parameters(), reference.named_parameters(), strict=True):
        compare_gradient(name, p, q[1])


@pytest.mark.dist(4)
@pytest.mark.parametrize("keys", [{}, RING, SEQUENCE], ids=str)
def test_any_module_that_calls_scaled_dot_product_attention(keys):
    stages = [{"ranks": [0, 1], "layers": [0, 0], "cp": 2}], [{"ranks": [2], "layers": [0, 0]}]
    pipelines = [{"stages": s, "share": 3 - i} for i, s in enumerate(stages)]
    own = hd.AnnotationPlan.from_dict({"version": 1, "pipelines": pipelines, **keys})
    run_world(_train_own, 4, own)
    zigzag = hd.AnnotationPlan.from_dict({"version": 1, "pipelines": pipelines, **keys, **ZIGZAG})
    run_world(_refuse_own, 4, zigzag)


def _refuse_window(rank, plan):
    model = hd.parallelize(build("llama"), plan)
    model.config.sliding_window = 12
    hd.distribute_batch(model, batch(0, size=2, length=11, masked=True))
    with pytest.raises(hd.PlanError, match="a window of 12 positions"):
        hd.distribute_batch(model, batch(0, size=2, length=12, masked=True))


@pytest.mark.dist(4)
def test_no_mask_takes_the_place_of_a_window():
    run_world(_refuse_window, 4, plan(*SPLIT, **SEQUENCE | ZIGZAG))


def _refuse_own(rank, plan):
    model = hd.parallelize(Block().double(), plan)
    with pytest.raises(hd.PlanError, match="must take position_ids; Block"):
        hd.distribute_batch(model, torch.zeros(2, 13, 16, dtype=torch.float64))
