"""Programs whose sequences ranks share compile to one graph a rank, and compute as on one device."""

import pytest
import torch
import torch.nn.functional as F

import hdtensor as hd
from tests.compile.capture import captured, operators_of
from tests.models.hf import backward_as, batch, build, compare_gradients
from tests.support.world import run_world


def _plan(*stages, **options):
    """Return a plan of one-stage pipelines, each ``(ranks, cp, share)``."""
    pipelines = [
        {"stages": [{"ranks": ranks, "layers": [0, 1], "cp": cp}], "share": share}
        for ranks, cp, share in stages
    ]
    return hd.AnnotationPlan.from_dict({"version": 1, "pipelines": pipelines, **options})


RING = {"context_parallel": "ring", "sequence_order": "zigzag"}
SPLIT = _plan(([0, 1], 2, 2), ([2], 1, 1), split="sequence", **RING)
CP2_BESIDE_TP1 = _plan(([0, 1], 2, 2), ([2], 1, 1), sequence_order="zigzag")


def _train(rank, plan, is_masked, by_layers):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    reference, model = build("llama"), hd.parallelize(build("llama"), plan)
    compiled = model
    if by_layers:
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    else:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(2):
        data = batch(step, size=3, length=13, masked=is_masked)
        backward_as(reference, compiled, data)
    compare_gradients(model, reference, 1e-6)
    assert not torch._dynamo.utils.counters["graph_break"]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("plan", "is_masked", "by_layers"),
    [(SPLIT, False, False), (SPLIT, False, True), (CP2_BESIDE_TP1, True, False)],
    ids=["whole", "layers", "masked"],
)
def test_models_train_as_on_one_device(plan, is_masked, by_layers):
    assert run_world(_train, 4, plan, is_masked, by_layers, timeout=300) == [1] * 4


def _attention(x, w):
    q, k, v = (x @ w).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2).pow(2).sum()


def _check(rank, method, layout, sizes):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def shared(x, w):
        with hd.context_parallel(method):
            return _attention(x, w)

    draw = torch.Generator().manual_seed(0)
    for size in sizes:
        whole = [
            torch.randn(shape, generator=draw, dtype=torch.float64)
            for shape in ((*size, 8), (8, 24))
        ]
        cut = [
            hd.distribute_tensor(t, s).requires_grad_()
            for t, s in zip(whole, (layout, "R / 0,1:R 2:R"), strict=True)
        ]
        expected = _attention(*(t.requires_grad_() for t in whole))
        loss = shared(*cut)
        torch.testing.assert_close(loss.detach().full_tensor(), expected.detach())
        expected.backward()
        loss.backward()
        for mine, one in zip(cut, whole, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.dist(4)
def test_batches_of_any_size_share_a_graph():
    sizes = [(3, 8), (5, 8), (7, 8)]  # whether two ranks could share them evenly decides, too
    assert run_world(_check, 4, "all_gather", "R / 0,1:S1 2:R", sizes) == [2] * 4


@pytest.mark.dist(4)
def test_each_length_has_a_graph():
    sizes = [(3, 8), (3, 12), (3, 8), (3, 12)]
    assert run_world(_check, 4, "ring", "R / 0,1:S1 2:R", sizes) == [2] * 4


def _ring_in_graph(rank):
    def shared(x, w):
        with hd.context_parallel("ring"):
            return _attention(x, w)

    x = hd.distribute_tensor(torch.ones(3, 8, 8), "R / 0,1:S1 2:R").requires_grad_()
    w = hd.distribute_tensor(torch.ones(8, 24), "R / 0,1:R 2:R").requires_grad_()
    sent = torch.ops.hdtensor.send_recv.default
    return [
        sum(operator is sent for operator, _ in operators_of(graph))
        for graph in captured(shared, x, w)
    ]


@pytest.mark.dist(4)
def test_messages_of_a_ring_are_operators_of_the_graph():
    # Of two blocks forward sends one on; backward sends it again, and its sums twice, until they are home.
    assert run_world(_ring_in_graph, 4) == [[1, 3], [1, 3], [0, 0], [0, 0]]
