"""Layers that a user compiles, inside pipelines: one device's values, and nothing is compiled where it does not run."""

import warnings

import pytest
import torch

from hdtensor.errors import PlanError
from hdtensor.pipeline import Runner
from tests.pipeline import tiny
from tests.support.world import run_world


def _compile_layers(model):
    """Compile each layer in place; return the list that its graphs come into."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return graphs


def _check_compiled_layers(rank):
    whole, reference = tiny.batch(), tiny.llama()
    runner = Runner(tiny.llama(), tiny.pairs())
    graphs = _compile_layers(runner.model)
    for _ in range(3):
        with (
            warnings.catch_warnings()
        ):  # the tracer looks at gradients of tensors that are no leaves
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            loss = runner.step(whole)
        expected = tiny.one_device(reference, whole)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        tiny.assert_same_gradients(runner.model, reference)
        with torch.no_grad():  # what was compiled reads the weights of now
            for model in (runner.model, reference):
                for p in model.parameters():
                    p.mul_(1.01)
    num_layers = (2, 1, 1, 2)[rank]
    assert 1 <= len(graphs) <= num_layers  # layers alike share what is compiled
    torch.testing.assert_close(
        runner.eval(whole), tiny.one_device(reference, whole), rtol=1e-5, atol=1e-6
    )

    runner.model.compile(backend="eager")
    with pytest.raises(PlanError, match="the model was compiled, but would trace"):
        runner.step(whole)
    runner.model._compiled_call_impl = None
    runner.model.model.layers[1] = torch.compile(runner.model.model.layers[1], backend="eager")
    with pytest.raises(PlanError, match=r"Compile in place, with module.compile\(\)"):
        runner.step(whole)


@pytest.mark.dist(4)
def test_layers_are_compiled_where_they_run():
    run_world(_check_compiled_layers, 4)


def _check_tensor_parallel_layers(rank, schedule):
    plan = tiny.plan(
        ([tiny.stage([0, 1], 0, 1), tiny.stage([2], 2, 2)], 2, 2), ([tiny.stage([3], 0, 2)], 4, 1)
    )
    whole, reference = tiny.batch(), tiny.llama()
    runner = Runner(tiny.llama(), plan, schedule=schedule)
    warnings.filterwarnings("ignore", "the backward of a compiled module cannot be split")
    graphs = _compile_layers(runner.model)
    for _ in range(2):
        loss = runner.step(whole)
        expected = tiny.one_device(reference, whole)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        tiny.assert_same_gradients(runner.model, reference)
    assert 1 <= len(graphs) <= (2, 2, 1, 3)[rank]


@pytest.mark.dist(4)
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZB-H1"])
def test_layers_with_redistribute_points_are_compiled(schedule):
    run_world(_check_tensor_parallel_layers, 4, schedule)
