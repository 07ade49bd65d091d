"""Unmodified models with task heads, encoders, encoder-decoders and vision models: gradients are those of one device."""

import re
from pathlib import Path

import pytest
import torch

import hdtensor as hd
from hdtensor.placements import checks
from hdtensor.plan import ModelDescription
from tests.models.hf import compare_gradient
from tests.models.tasks import REFUSED, TASKS, batch, build, loss_of
from tests.support.world import run_world


DOCUMENT = Path(__file__).parents[2] / "docs" / "plans.md"


def _plan(model, shares):
    is_described = isinstance(model, ModelDescription)
    description = model if is_described else ModelDescription.from_module(model)
    layers = [0, max(description.layer_modules, default=0)]
    stages = ({"ranks": [0, 1], "layers": layers, "tp": 2}, {"ranks": [2], "layers": layers})
    return hd.AnnotationPlan.from_dict(
        {
            "version": 1,
            "pipelines": [
                {"stages": [stage], "share": n} for stage, n in zip(stages, shares, strict=True)
            ],
        }
    )


def _compare(rank, names, shares, steps, attention="sdpa"):
    for name in names:
        reference, data = build(name, attention), batch(name)
        expected = loss_of(reference(**data))
        expected.backward()
        tested = build(name, attention)
        tested = hd.parallelize(tested, _plan(tested, shares))
        for _ in range(steps):
            tested.zero_grad()
            loss = loss_of(tested(**hd.distribute_batch(tested, data)))
            loss.backward()
            torch.testing.assert_close(hd.item(loss), expected.item(), rtol=1e-6, atol=0, msg=name)
            pairs = zip(tested.named_parameters(), reference.parameters(), strict=True)
            for (parameter, p), q in pairs:
                compare_gradient(f"{name} {parameter}", p, q, rounding=1e-6)


@pytest.mark.dist(4)
@pytest.mark.parametrize("part", range(3))
def test_every_model_of_the_list_has_the_gradients_of_one_device(part):
    run_world(_compare, 4, list(TASKS)[part::3], (3, 1), 1)


POOLED = ["LlamaForSequenceClassification", "CLIPTextModel", "SwinForImageClassification"]


@pytest.mark.dist(4)
def test_pooled_models_in_later_steps_and_with_other_attention():
    """Modules may be regions by then; shares are equal, and attention is a chain of operators."""
    run_world(_compare, 4, [*POOLED, "GptOssForCausalLM"], (1, 1), 3, "eager")


def _errors(rank, name):
    model = build(name)
    model = hd.parallelize(model, _plan(model, (3, 1)))
    with pytest.raises(hd.DeductionError) as error:
        loss_of(model(**hd.distribute_batch(model, batch(name)))).backward()
    return str(error.value)


@pytest.mark.dist(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_alike_with_advice(name):
    said = run_world(_errors, 4, name)
    assert said == [said[0]] * 4
    assert re.search(REFUSED[name][3], said[0])


def _row(name):
    """Return a model's row of the documentation's table: how many of its matrices a stage of two ranks cuts."""
    with torch.device("meta"):
        model = ModelDescription.from_module(build(name))
    tensors = _plan(model, (3, 1)).expand(model).tensors
    matrices = [n for n, shape in model.shapes.items() if len(shape) > 1 and n in tensors]
    cut = [n for n in matrices if any(checks.is_cut(p) for p in _placements(tensors[n]))]
    return f"| `{name}` | {len(cut)} of {len(matrices)} |"


def _placements(spec):
    return spec.subgroups[0].placements


def test_the_documentation_lists_what_is_tested():
    listed = DOCUMENT.read_text().split("## Families")[1].split("\n## ")[0]
    assert re.findall(r"^\| `\w+` \| \d+ of \d+ \|$", listed, re.M) == [_row(n) for n in TASKS]
    assert all(f"`{name}`" in listed for name in REFUSED)
