"""Parameters by sizes alone: as many as the planner counts, named as plans know them; and dry runs of planned models."""

import json
import math

import pytest

from hdtensor import cli
from hdtensor.pipeline.plan_files import MODELS as LLAMAS
from hdtensor.plan import ModelDescription
from hdtensor.planner.description import description_of
from hdtensor.planner.models import MODELS, find_model, shape_of_config


GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 6,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 128,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_the_sizes_say(name):
    model = MODELS[name]
    found = description_of(model)
    assert sum(map(math.prod, found.shapes.values())) == model.num_parameters
    assert found.num_layers == model.num_layers


def test_a_tied_head_is_counted_once():
    model = shape_of_config(GPT2)
    assert model.is_tied
    assert sum(map(math.prod, description_of(model).shapes.values())) == model.num_parameters


def test_a_llama_is_described_as_a_llama():
    for name, sizes in LLAMAS.items():
        number = dict(sizes)
        expected = ModelDescription.llama(num_layers=number.pop("num_hidden_layers"), **number)
        assert description_of(find_model(name)) == expected


@pytest.mark.parametrize("model", ["mixtral-8x7B", "deepseek-v2-lite", "opt-350", GPT2], ids=str)
def test_a_dry_run_knows_the_model_that_was_planned_for(model, tmp_path, capsys):
    name = model
    if isinstance(model, dict):
        name = str(tmp_path / "config.json")
        (tmp_path / "config.json").write_text(json.dumps(model))
    plan = str(tmp_path / "plan.json")
    arguments = [
        "plan",
        "--model",
        name,
        "--cluster",
        "16x H200",
        "--batch",
        "16",
        "--context",
        "128",
    ]
    assert cli.main([*arguments, "--max-lanes", "1", "-o", plan]) == 0
    capsys.readouterr()
    assert cli.main(["dry-run", plan]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    total = find_model(name).num_parameters
    said = int(out.split(" elements")[0].rsplit(" ", 1)[1].replace(",", ""))
    assert (
        total <= said < 2 * total
    )  # what a stage's ranks all hold, such as norms, counts for each
    assert cli.main(["dry-run", plan, "--model", "llama-70b"]) == 2
    assert "but the model has 80" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "simulate", "dry-run"])
def test_commands_warn_of_a_batch_that_the_plan_was_not_made_for(command, tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = [
        "plan",
        "--model",
        "llama-7b",
        "--cluster",
        "4x H800",
        "--batch",
        "8",
        "--context",
        "512",
    ]
    assert cli.main([*arguments, "-o", str(path)]) == 0
    capsys.readouterr()
    assert cli.main([command, str(path)]) == 0
    assert capsys.readouterr().err == ""
    value = json.loads(path.read_text())
    first = value["pipelines"][0]
    first["microbatches"] += 3
    batch = 8 + 3 * first["mbs"]
    path.write_text(json.dumps(value))
    assert cli.main([command, str(path)]) == 0
    out, err = capsys.readouterr()
    assert out
    assert err.startswith(
        f"hdtensor {command}: warning: batch: the pipelines take {batch} samples, "
    )
    assert err.count("\n") == 1
