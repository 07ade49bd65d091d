"""The paper's strategy tables as plans: Tables 9, 11, 12, 15, 16, and the uniform ones of 8, 10, 13, 14."""

import json
from pathlib import Path

import pytest

from hdtensor.errors import PlanError
from hdtensor.plan import AnnotationPlan, ModelDescription


DATA = json.loads((Path(__file__).parent / "data" / "plans.json").read_text())
PIPELINED = [plan for plan in DATA["plans"] if plan["pipelines"]]
UNIFORM = [plan for plan in DATA["plans"] if not plan["pipelines"]] + DATA["uniform_baselines"]


def name(plan):
    uniform = plan.get("uniform") or {}
    return f"{plan['source_table']}-{plan['label']}-{uniform.get('text', '')}"


def find(table, label):
    (found,) = (
        p for p in DATA["plans"] if p["source_table"] == table and p["label"].startswith(label)
    )
    return AnnotationPlan.from_dict(found)


def llama_32b():
    """Table 6."""
    return ModelDescription.llama(
        num_layers=60,
        hidden_size=6656,
        intermediate_size=17920,
        num_attention_heads=64,
        num_key_value_heads=64,
        vocab_size=50304,
    )


def llama_70b():
    """Llama 2 70B; of its numbers the paper states the layers only (Table 9)."""
    return ModelDescription.llama(
        num_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
    )


MODELS = {"llama-32B": llama_32b, "llama-70B": llama_70b}


def spec(expanded, layer, part):
    return str(expanded.tensors[f"model.layers.{layer}.{part}.weight"])


def test_the_data_has_sixteen_plans_with_pipelines_and_forty_uniform_ones():
    assert (len(PIPELINED), len(UNIFORM)) == (16, 40)


@pytest.mark.paper("Tables 9, 11, 12, 15, 16")
@pytest.mark.parametrize("document", PIPELINED, ids=name)
def test_pipelined_plan_loads_and_puts_every_layer_where_the_table_says(document):
    plan = AnnotationPlan.from_dict(document)
    assert AnnotationPlan.from_json(plan.to_json()) == plan
    cluster = sum(document["cluster"].values())
    plan.check(world_size=48)
    assert len(plan.ranks) <= cluster
    expanded = plan.expand(MODELS[document["model"]]())
    num_layers = DATA["layers"][document["model"]]
    for layer in range(num_layers):
        for part, dim in (("mlp.up_proj", 0), ("mlp.down_proj", 1)):
            wanted = []
            for pipeline in document["pipelines"]:
                (ranks,) = (
                    stage["ranks"]
                    for stage in pipeline["stages"]
                    if stage["layers"][0] <= layer <= stage["layers"][1]
                )
                wanted.append((tuple(ranks), f"S{dim}" if len(ranks) > 1 else "R"))
            found = expanded.tensors[f"model.layers.{layer}.{part}.weight"]
            assert [(g.ranks, g.text().partition(":")[2]) for g in found.subgroups] == wanted
            assert found.hdim == -1
    assert expanded.replicated_kv == ()
    assert expanded.unmatched == ()
    assert expanded.zero == document.get("zero", 0)
    assert AnnotationPlan.from_json(expanded.to_json()) == expanded


@pytest.mark.paper("Tables 9, 11, 12")
@pytest.mark.parametrize("document", [p for p in PIPELINED if p["source_table"] < 15], ids=name)
def test_shares_add_up_to_the_global_batch_of_64(document):
    assert sum(AnnotationPlan.from_dict(document).shares) == 64


@pytest.mark.paper("Tables 15, 16")
@pytest.mark.parametrize("document", [p for p in PIPELINED if p["source_table"] >= 15], ids=name)
def test_plans_for_mixed_lengths_state_no_share(document):
    plan = AnnotationPlan.from_dict(document)
    assert plan.shares is None
    assert [pipeline.role for pipeline in plan.pipelines][:2] == ["long", "short"]


@pytest.mark.paper("Table 11")
def test_c2_has_four_ranks_beside_one_in_the_last_layers():
    plan = find(11, "C2")
    assert plan.shares == (33, 31)
    assert plan.outside(32) == (31,)
    expanded = plan.expand(llama_32b())
    assert spec(expanded, 0, "self_attn.q_proj") == "R / 0-3:S0 16-19:S0"
    assert spec(expanded, 15, "self_attn.q_proj") == "R / 4-7:S0 16-19:S0"
    assert spec(expanded, 31, "self_attn.o_proj") == "R / 8-11:S1 20-23:S1"
    assert spec(expanded, 55, "self_attn.o_proj") == "R / 12-15:S1 28,29:S1"
    assert spec(expanded, 56, "self_attn.q_proj") == "R / 12-15:S0 30:R"
    assert spec(expanded, 56, "mlp.down_proj") == "R / 12-15:S1 30:R"
    assert spec(expanded, 59, "input_layernorm") == "R / 12-15:R 30:R"
    assert str(expanded.tensors["model.embed_tokens.weight"]) == "R / 0-3:R 16-19:R"
    assert str(expanded.tensors["lm_head.weight"]) == "R / 12-15:R 30:R"
    assert str(expanded.inputs) == "S0[33:31] / 0-3:R 16-19:R"
    assert [p.module.rpartition(".")[2] for p in expanded.points if p.kind == "stage"] == [
        *("15", "16", "30", "32", "45", "48", "56")
    ]


@pytest.mark.paper("Table 12")
def test_c6_has_tp_4_beside_2_and_beside_1():
    expanded = find(12, "C6").expand(llama_32b())
    assert spec(expanded, 39, "mlp.gate_proj") == "R / 4-7:S0 8-11:S0"
    assert spec(expanded, 40, "mlp.gate_proj") == "R / 4-7:S0 12,13:S0"
    assert spec(expanded, 53, "mlp.gate_proj") == "R / 4-7:S0 14:R"


@pytest.mark.paper("Table 15")
def test_strategy_a_has_tp_16_beside_four_pipelines_of_tp_4():
    expanded = find(15, "32K, Strategy A").expand(llama_32b())
    wanted = "R / 0-15:S0 16-19:S0 20-23:S0 24-27:S0 28-31:S0"
    assert spec(expanded, 59, "self_attn.k_proj") == wanted
    assert str(expanded.inputs) == "S0 / 0-15:R 16-19:R 20-23:R 24-27:R 28-31:R"


@pytest.mark.paper("Table 9")
def test_70b_is_one_pipeline():
    expanded = find(9, "70B, 16 H800, 24 H20").expand(llama_70b())
    assert spec(expanded, 54, "self_attn.k_proj") == "R / 0-7:S0"
    assert spec(expanded, 55, "self_attn.k_proj") == "R / 8-15:S0"


@pytest.mark.paper("Tables 8, 10, 13, 14, 16")
@pytest.mark.parametrize("document", UNIFORM, ids=name)
def test_uniform_plan_expands_unless_it_asks_for_what_cannot_run(document):
    plan = AnnotationPlan.from_dict(document)
    assert AnnotationPlan.from_json(plan.to_json()) == plan
    degrees = document["uniform"]
    model = MODELS[document["model"]]()
    if degrees.get("sp", 1) > 1:
        with pytest.raises(PlanError, match=rf"\.sp: {degrees['sp']} is valid in a plan"):
            plan.expand(model)
        return
    size = degrees["tp"] * degrees.get("cp", 1)
    expanded = plan.expand(model)
    assert len(expanded.ranks) == degrees["dp"] * size * degrees["pp"]
    assert expanded.inputs.num_subgroups == degrees["dp"]
    assert {len(g.ranks) for s in expanded.tensors.values() for g in s.subgroups} == {size}
    points = [point for point in expanded.points if point.kind == "stage"]
    assert len(points) == degrees["pp"] - 1
