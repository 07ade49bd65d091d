"""Whole models of transformers compile to one graph a rank, and train as on one device."""

import pytest
import torch

import hdtensor as hd
from tests.models.hf import backward_as, batch, build, compare_gradients, strategy
from tests.support.world import run_world


UNLIKE = strategy(([0, 1], 5), ([2], 3))
FOUR_LAYERS = strategy(([0, 1], 5), ([2], 3), layers=4)


def _build(family):
    model = build(family)
    if (
        family == "mixtral"
    ):  # the default one loops over the experts that the data chose: no graph on one device either
        model.set_experts_implementation("batched_mm")
    return model


def _train(rank, family, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    reference = _build(family)
    model = hd.parallelize(_build(family), UNLIKE)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (reference, model)]
    for step in range(3):
        data = batch(step)
        backward_as(reference, compiled, data)
        compare_gradients(model, reference, 1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_training_equals_one_device(family):
    run_world(_train, 4, family, "aot_eager", timeout=300)


def _compile_layers(rank):
    reference = build("llama", num_hidden_layers=4)
    model = hd.parallelize(build("llama", num_hidden_layers=4), FOUR_LAYERS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for step in range(4):
        data = batch(step)
        backward_as(reference, model, data)
        compare_gradients(model, reference, 1e-6)
        model.zero_grad()
        reference.zero_grad()
    assert not torch._dynamo.utils.counters["graph_break"]
    # One for the first layer, whose input is the embedding's, and one for all others: they share their code.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.dist(4)
def test_layers_compiled_in_place():
    run_world(_compile_layers, 4, timeout=300)


def _switch(rank):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    other = strategy(([0], 1), ([1, 2], 1))
    reference = build("llama")
    model = hd.parallelize(build("llama"), UNLIKE)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (reference, model)]
    now, graphs = UNLIKE, []
    for step, plan in enumerate((UNLIKE, other, UNLIKE, other)):
        if plan is not now:
            hd.switch(model, plan, optimizers[1])
            now = plan
        data = batch(step)
        backward_as(reference, compiled, data)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 2, 2]


@pytest.mark.dist(4)
def test_going_back_to_an_earlier_plan_compiles_nothing():
    run_world(_switch, 4, timeout=300)


OPTIMIZERS = [
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("AdamW", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "foreach": False}),
    ("Adafactor", {"lr": 0.01}),
]


def _step(rank, name, options):
    specs = {"R / 0,1:S1 2:R": (8, 12), "R / 0,1:S0 2:R": (12, 8), "R / 0,1:R 2:R": (8,)}
    results = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        made = [torch.randn(shape, dtype=torch.float64) for shape in specs.values()]
        if is_compiled:
            made = [
                hd.distribute_tensor(t, s, src_data_rank=None)
                for t, s in zip(made, specs, strict=True)
            ]
        parameters = [torch.nn.Parameter(t) for t in made]
        optimizer = getattr(torch.optim, name)(parameters, **options)
        step = torch.compile(optimizer.step, backend="aot_eager") if is_compiled else optimizer.step
        for i in range(3):
            for p in parameters:
                p.grad = p.detach() * (i + 1) + 0.1
            step()
        results.append(
            [p.detach().full_tensor() if is_compiled else p.detach() for p in parameters]
        )
    for plain, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.dist(4)
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
def test_optimizer_steps(name, options):
    run_world(_step, 4, name, options, timeout=200)
