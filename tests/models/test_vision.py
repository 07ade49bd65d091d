"""Models of torch alone train as on one device: a batch that is cut keeps the statistics of the whole."""

import pytest
import torch

import hdtensor as hd
from hdtensor.tensor import HDTensor
from tests.models.hf import compare_gradient, strategy
from tests.models.vision import VIT_PATTERNS, ResNet, ViT
from tests.support.world import run_world


PLANS = (([0, 1], 1),), (([0, 1], 5), ([2], 3)), (([0, 1], 2), ([2], 1), ([3], 1))


def _model(kind):
    torch.manual_seed(0)
    return kind().double()


def _data(step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 3, 8, 8, dtype=torch.double, generator=generator)
    return images, torch.randint(0, 5, (8,), generator=generator)


def _train(rank, kind, pipelines, keys, patterns):
    layers = [0, 1] if kind is ViT else [0, 0]
    plan = strategy(*pipelines, **keys).to_dict()
    for pipeline in plan["pipelines"]:
        pipeline["stages"][0]["layers"] = layers
    reference = _model(kind)
    tested = hd.parallelize(_model(kind), hd.AnnotationPlan.from_dict(plan), patterns=patterns)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    mixed = torch.optim.AdamW(tested.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        expected = reference(*_data(step))
        loss = tested(*hd.distribute_batch(tested, _data(step)))
        expected.backward(), loss.backward()
        torch.testing.assert_close(hd.item(loss), expected.item(), rtol=1e-9, atol=0)
        for (name, p), q in zip(tested.named_parameters(), reference.parameters(), strict=True):
            compare_gradient(name, p, q)
        plain.step(), mixed.step()
        plain.zero_grad(), mixed.zero_grad()
    for (name, b), c in zip(tested.named_buffers(), reference.buffers(), strict=True):
        whole = b.full_tensor() if isinstance(b, HDTensor) else b
        torch.testing.assert_close(whole, c, msg=lambda m, name=name: f"{name}: {m}")
    return tested


@pytest.mark.dist(4)
@pytest.mark.parametrize("pipelines", PLANS, ids=["TP2", "TP2_TP1", "TP2_TP1_TP1"])
def test_a_convolutional_network_with_batch_norm(pipelines):
    run_world(_train_resnet, 4, pipelines)


def _train_resnet(rank, pipelines):
    tested = _train(rank, ResNet, pipelines, {}, ())
    with hd.debug.count_communication() as count:
        tested(*hd.distribute_batch(tested, _data(0)))
    if rank == 2 and len(pipelines) > 1:
        reasons = count.by_reason()
        assert reasons["batch norm (statistics of the whole batch)"] == 2 * 6


@pytest.mark.dist(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("pipelines", PLANS[:2], ids=["TP2", "TP2_TP1"])
def test_a_vision_transformer_with_rules_of_its_own(pipelines, sequence_parallel):
    run_world(_train_vit, 4, pipelines, sequence_parallel)


def _train_vit(rank, pipelines, sequence_parallel):
    tested = _train(rank, ViT, pipelines, {"sequence_parallel": sequence_parallel}, VIT_PATTERNS)
    placed = tested.blocks[0].attention["into"].weight.spec.subgroups[0]
    assert "S0x3" in placed.text()
