"""Expanding a plan over a model: who holds what, how it is cut, and where data moves on."""

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import Shard

from hdtensor.errors import PlanError
from hdtensor.placements import HDSpec, owned_boxes
from hdtensor.plan import (
    VOCAB_PARALLEL,
    AnnotationPlan,
    ExpandedPlan,
    ModelDescription,
    ParameterDescription,
    Pattern,
    Pipeline,
    RedistributePoint,
    Stage,
    StrategyPlan,
    Uniform,
)


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def llama(num_layers=4, **changes):
    return ModelDescription.llama(**{"num_layers": num_layers, **SIZES, **changes})


def pipeline(*stages, **batch):
    """Build a pipeline from (ranks, last layer) pairs."""
    out, first = [], 0
    for ranks, last in stages:
        out.append(Stage(ranks=ranks, layers=(first, last)))
        first = last + 1
    return Pipeline(stages=tuple(out), **batch)


def two_unlike(last=3):
    return StrategyPlan(
        pipelines=(pipeline(((0, 1), last), share=5), pipeline(((2,), last), share=3))
    )


def staged():
    """Pipeline 0 has two stages of TP 2, pipeline 1 has three of TP 1; the cuts differ."""
    return StrategyPlan(
        pipelines=(
            pipeline(((0, 1), 1), ((2, 3), 3), share=3),
            pipeline(((4,), 0), ((5,), 1), ((6,), 3), share=1),
        )
    )


def text(plan, name):
    return str(plan.tensors[name])


def test_two_unlike_subgroups():
    plan = two_unlike().expand(llama())
    layer = "model.layers.2."
    for name, spec in {
        "model.embed_tokens.weight": "R / 0,1:R 2:R",
        layer + "self_attn.q_proj.weight": "R / 0,1:S0 2:R",
        layer + "self_attn.k_proj.weight": "R / 0,1:S0 2:R",
        layer + "self_attn.v_proj.weight": "R / 0,1:S0 2:R",
        layer + "self_attn.o_proj.weight": "R / 0,1:S1 2:R",
        layer + "mlp.gate_proj.weight": "R / 0,1:S0 2:R",
        layer + "mlp.up_proj.weight": "R / 0,1:S0 2:R",
        layer + "mlp.down_proj.weight": "R / 0,1:S1 2:R",
        layer + "input_layernorm.weight": "R / 0,1:R 2:R",
        layer + "post_attention_layernorm.weight": "R / 0,1:R 2:R",
        "model.norm.weight": "R / 0,1:R 2:R",
        "lm_head.weight": "R / 0,1:R 2:R",
    }.items():
        assert text(plan, name) == spec, name
    assert list(plan.tensors) == [parameter.name for parameter in llama().parameters]
    assert plan.inputs is plan.labels is HDSpec.from_text("S0[5:3] / 0,1:R 2:R")
    assert plan.shares == (5, 3)
    assert plan.ranks == (0, 1, 2)
    assert plan.outside(4) == (3,)
    assert plan.replicated_kv == plan.unmatched == ()
    assert {point.kind for point in plan.points} == {"tp"}


def test_a_layer_is_on_the_stage_that_holds_it_in_each_pipeline():
    plan = staged().expand(llama())
    gate = "model.layers.{}.mlp.gate_proj.weight"
    assert text(plan, "model.embed_tokens.weight") == "R / 0,1:R 4:R"
    assert text(plan, gate.format(0)) == "R / 0,1:S0 4:R"
    assert text(plan, gate.format(1)) == "R / 0,1:S0 5:R"
    assert text(plan, gate.format(2)) == text(plan, gate.format(3)) == "R / 2,3:S0 6:R"
    assert text(plan, "model.norm.weight") == text(plan, "lm_head.weight") == "R / 2,3:R 6:R"
    assert str(plan.inputs) == "S0[3:1] / 0,1:R 4:R"
    assert str(plan.labels) == "S0[3:1] / 2,3:R 6:R"


def test_stage_points_are_the_inputs_of_layers_where_some_stage_begins():
    points = [p for p in staged().expand(llama()).points if p.kind == "stage"]
    assert [(p.module, p.side, str(p.spec)) for p in points] == [
        ("model.layers.1", "input", "S0[3:1] / 0,1:R 5:R"),
        ("model.layers.2", "input", "S0[3:1] / 2,3:R 6:R"),
    ]


def test_a_stage_that_begins_at_a_layer_without_parameters_has_its_point_at_the_next():
    names = ["layers.0.w", "layers.2.w"]
    model = ModelDescription(parameters=tuple(ParameterDescription(n, (2,)) for n in names))
    plan = StrategyPlan(pipelines=(pipeline(((0,), 0), ((1,), 2)),)).expand(model)
    assert [(p.module, str(p.spec)) for p in plan.points] == [("layers.2", "R / 1:R")]


def test_tp_points_are_around_columns_and_behind_rows():
    plan = two_unlike(last=0).expand(llama(num_layers=1))
    layer = "model.layers.0."
    assert [(p.module, p.side, p.spec) for p in plan.points] == [
        (layer + "self_attn", "input", plan.inputs),
        (layer + "self_attn.o_proj", "output", plan.inputs),
        (layer + "mlp", "input", plan.inputs),
        (layer + "mlp.down_proj", "output", plan.inputs),
    ]
    alone = StrategyPlan(pipelines=(pipeline(((0,), 0)), pipeline(((1,), 0))))
    assert alone.expand(llama(num_layers=1)).points == ()


def test_points_come_in_the_order_of_the_layers():
    modules = [p.module for p in staged().expand(llama()).points]
    start = modules.index("model.layers.1")
    assert modules[start : start + 3] == [
        "model.layers.1",
        "model.layers.1.self_attn",
        "model.layers.1.self_attn.o_proj",
    ]


def test_a_tied_embedding_has_one_subgroup_per_use():
    plan = staged().expand(llama(tie_word_embeddings=True))
    assert text(plan, "model.embed_tokens.weight") == "R / 0,1:R 2,3:R 4:R 6:R"
    assert "lm_head.weight" not in plan.tensors
    plan = two_unlike().expand(llama(tie_word_embeddings=True))
    assert text(plan, "model.embed_tokens.weight") == "R / 0,1:R 2:R"


def test_a_tied_embedding_without_a_name_for_the_head():
    model = llama(tie_word_embeddings=True)
    bare = model.parameters[:-1]
    assert model.parameters[-1].same_as == "model.embed_tokens.weight"
    plan = staged().expand(model.replace(parameters=bare))
    assert text(plan, "model.embed_tokens.weight") == "R / 0,1:R 2,3:R 4:R 6:R"
    untied = staged().expand(model.replace(parameters=bare, tie_word_embeddings=False))
    assert text(untied, "model.embed_tokens.weight") == "R / 0,1:R 4:R"


def test_vocab_parallel_patterns():
    plan = two_unlike(last=0).expand(llama(num_layers=1), patterns=VOCAB_PARALLEL)
    assert text(plan, "model.embed_tokens.weight") == "R / 0,1:S0 2:R"
    assert text(plan, "lm_head.weight") == "R / 0,1:S0 2:R"
    ends = [(p.module, p.side) for p in (plan.points[0], plan.points[-1])]
    assert ends == [("model.embed_tokens", "output"), ("lm_head", "input")]
    tied = two_unlike().expand(llama(tie_word_embeddings=True), patterns=VOCAB_PARALLEL)
    assert text(tied, "model.embed_tokens.weight") == "R / 0,1:S0 2:R"


def test_a_tied_weight_with_two_roles_is_an_error():
    with pytest.raises(
        PlanError, match=r"embed_tokens\.weight: replicate, lm_head\.weight: column"
    ):
        two_unlike().expand(llama(tie_word_embeddings=True), patterns=VOCAB_PARALLEL[1:])


def test_kv_heads_that_tp_does_not_divide_are_replicated_and_noted():
    tp4 = StrategyPlan(pipelines=(pipeline((range(4), 3), share=1), pipeline(((4, 5), 3), share=1)))
    plan = tp4.expand(llama())
    assert text(plan, "model.layers.0.self_attn.q_proj.weight") == "R / 0-3:S0 4,5:S0"
    assert text(plan, "model.layers.0.self_attn.k_proj.weight") == "R / 0-3:R 4,5:S0"
    assert text(plan, "model.layers.0.self_attn.v_proj.weight") == "R / 0-3:R 4,5:S0"
    assert plan.replicated_kv == ("pipelines[0].stages[0]",)
    assert "k and v projections replicated in: pipelines[0].stages[0]" in str(plan)


def test_query_heads_that_tp_does_not_divide_are_an_error():
    plan = StrategyPlan(pipelines=(pipeline(((0,), 0), (range(1, 4), 3)),))
    message = (
        r"pipelines\[0\]\.stages\[1\]\.tp: 3 does not divide the model's num_attention_heads = 4"
    )
    with pytest.raises(PlanError, match=message):
        plan.expand(llama())


def test_heads_must_be_known_and_divide_the_rows():
    model = llama().replace(num_attention_heads=None)
    message = r"pipelines\[0\]\.stages\[0\]\.tp: 2 cuts .*q_proj.* has no num_attention_heads"
    heads = [("q_proj.weight", "heads")]
    with pytest.raises(PlanError, match=message):
        two_unlike().expand(model, heads)
    with pytest.raises(
        PlanError, match=r"the 16 rows of its shape \(16, 16\) do not divide by .* 6 heads"
    ):
        two_unlike().expand(llama().replace(num_attention_heads=6), heads)


def test_built_in_rules_that_do_not_fit_the_model_replicate():
    name = "model.layers.0.self_attn.q_proj.weight"
    for heads in (None, 6):
        plan = two_unlike().expand(llama().replace(num_attention_heads=heads))
        assert text(plan, name) == "R / 0,1:R 2:R"
        assert name in plan.unmatched


def test_heads_are_not_asked_for_where_nothing_is_cut():
    model = llama().replace(num_attention_heads=None)
    alone = StrategyPlan(pipelines=(pipeline(((0,), 3)),))
    assert text(alone.expand(model), "model.norm.weight") == "R / 0:R"


@pytest.mark.parametrize("field", ["ep"])
def test_parallelism_that_cannot_run_yet_is_refused(field):
    stage = Stage(ranks=(0, 1), layers=(0, 3), **{field: 2})
    plan = StrategyPlan(pipelines=(Pipeline(stages=(stage,)),))
    message = rf"pipelines\[0\]\.stages\[0\]\.{field}: 2 is valid in a plan, but this version"
    with pytest.raises(PlanError, match=message):
        plan.expand(llama())


@pytest.mark.parametrize(("num_layers", "give"), [(3, "0 to 2"), (5, "0 to 4")])
def test_layers_that_differ_from_the_models(num_layers, give):
    message = rf"pipelines\[0\]\.stages\[0\]\.layers: the plan covers 4 .* Give layers {give}"
    with pytest.raises(PlanError, match=message):
        two_unlike().expand(llama(num_layers=num_layers))


def test_zero_is_recorded():
    plan = StrategyPlan(pipelines=(pipeline(((0,), 3)),), zero=1).expand(llama())
    assert plan.zero == 1
    assert AnnotationPlan.from_json(plan.to_json()).zero == 1


def test_a_uniform_plan_expands():
    plan = StrategyPlan(uniform=Uniform(dp=2, tp=2, pp=2)).expand(llama())
    assert text(plan, "model.layers.3.mlp.down_proj.weight") == "R / 2,3:S1 6,7:S1"
    assert str(plan.inputs) == "S0[1:1] / 0,1:R 4,5:R"


def test_equal_parts_of_the_batch_have_no_ratio():
    plan = StrategyPlan(pipelines=(pipeline(((0,), 3)), pipeline(((1,), 3)))).expand(llama())
    assert str(plan.inputs) == "S0 / 0:R 1:R"
    assert plan.shares == (1, 1)


def test_users_patterns_come_first_and_the_rest_is_replicated_and_listed():
    names = ["blocks.0.fc1.weight", "blocks.0.fc1.bias", "blocks.0.fc2.weight", "blocks.0.scale"]
    shapes = [(8, 4), (8,), (4, 8), ()]
    model = ModelDescription(parameters=tuple(map(ParameterDescription, names, shapes)))
    plan = two_unlike(last=0).expand(model)
    assert {str(spec) for spec in plan.tensors.values()} == {"R / 0,1:R 2:R"}
    assert plan.unmatched == tuple(names)
    plan = two_unlike(last=0).expand(model, patterns=[("fc1.*", "column"), Pattern("fc2.*", "row")])
    assert [text(plan, name) for name in names] == [
        "R / 0,1:S0 2:R",
        "R / 0,1:S0 2:R",
        "R / 0,1:S1 2:R",
        "R / 0,1:R 2:R",
    ]
    assert plan.unmatched == ("blocks.0.scale",)
    assert [(p.module, p.side) for p in plan.points] == [
        ("blocks.0.fc1", "input"),
        ("blocks.0.fc2", "output"),
    ]
    with pytest.raises(PlanError, match=r"'blocks\.0\.scale' is a scalar"):
        two_unlike(last=0).expand(model, patterns=[("scale", "column")])
    with pytest.raises(PlanError, match=r"role 'columns'; allowed: column, heads"):
        two_unlike(last=0).expand(model, patterns=[("scale", "columns")])
    with pytest.raises(PlanError, match=r"patterns\[0\] must be a Pattern or \(glob, role\)"):
        two_unlike(last=0).expand(model, patterns=["scale"])


def cut(full, spec, rank):
    """Return a rank's part of a tensor, by the boxes that it owns."""
    (owned,) = owned_boxes(spec, tuple(full.shape), None, rank)
    return full[owned.box.slices_from((0,) * full.dim())]


@pytest.mark.parametrize("tp", [2, 3])
def test_an_mlp_cut_by_the_plan_adds_up_to_the_whole_one(tp):
    width = 7  # no tp divides it: the chunks are uneven, and the same for columns and rows
    model = llama(num_layers=1, num_attention_heads=6, num_key_value_heads=6, hidden_size=12)
    model = model.replace(intermediate_size=width)
    shapes = {"gate_proj": (width, 12), "up_proj": (width, 12), "down_proj": (12, width)}
    weights = {name: torch.randn(shape, dtype=torch.double) for name, shape in shapes.items()}
    plan = StrategyPlan(pipelines=(pipeline((range(tp), 0), share=1),)).expand(model)
    specs = {name: plan.tensors[f"model.layers.0.mlp.{name}.weight"] for name in shapes}
    x = torch.randn(3, 12, dtype=torch.double)

    def mlp(gate, up, down):
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    parts = [[cut(weights[name], specs[name], rank) for name in shapes] for rank in range(tp)]
    total = torch.stack([mlp(*part) for part in parts]).sum(0)
    torch.testing.assert_close(total, mlp(*weights.values()))


def test_an_expanded_plan_survives_a_round_trip_and_is_a_value(tmp_path):
    plan = staged().expand(llama())
    plan.save(tmp_path / "plan.json")
    for twin in (
        AnnotationPlan.load(tmp_path / "plan.json"),
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
    ):
        assert twin == plan
        assert hash(twin) == hash(plan)
        assert list(twin.tensors) == list(plan.tensors)
    with pytest.raises(TypeError):
        plan.tensors["w"] = plan.inputs


def test_distinct_specs_are_each_spec_once():
    plan = staged().expand(llama())
    found = plan.distinct_specs
    assert len(set(found)) == len(found)
    assert set(found) == {
        plan.inputs,
        plan.labels,
        *plan.tensors.values(),
        *(point.spec for point in plan.points),
    }


def test_an_expanded_plan_checks_that_it_fits_the_model():
    plan = two_unlike().expand(llama())
    assert plan.expand(llama()) is plan
    with pytest.raises(PlanError, match=r"tensors\['model\.layers\.4\.self_attn.*: missing"):
        plan.expand(llama(num_layers=5))
    with pytest.raises(PlanError, match=r"tensors\['model\.layers\.3\..*: the model has no such"):
        plan.expand(llama(num_layers=3))
    with pytest.raises(PlanError, match="patterns: an expanded plan has a spec for every tensor"):
        plan.expand(llama(), patterns=VOCAB_PARALLEL)
    changed = {
        **plan.tensors,
        "model.norm.weight": plan.tensors["lm_head.weight"].map_bottom(lambda _: Shard(1)),
    }
    wrong = ExpandedPlan(tensors=changed, inputs=plan.inputs, labels=plan.labels)
    with pytest.raises(
        PlanError, match=r"tensors\['model\.norm\.weight'\]: .* shape \(16,\) does not"
    ):
        wrong.expand(llama())


def test_points_of_one_place_keep_their_kind_and_side():
    spec = HDSpec.from_text("S0 / 0:R 1:R")
    point = RedistributePoint(module="m", side="output", kind="stage", spec=spec)
    plan = ExpandedPlan(tensors={"w": spec}, inputs=spec, labels=spec, points=[point])
    assert AnnotationPlan.from_json(plan.to_json()).points == (point,)
    assert "stage point: input" not in str(plan)
    assert "stage point: output of m -> S0 / 0:R 1:R" in str(plan)


def test_str_of_an_expanded_plan_joins_layers():
    lines = str(two_unlike().expand(llama())).splitlines()
    assert lines[0] == "expanded plan: 39 tensors, 3 ranks, 2 pipelines, shares 5:3"
    assert "model.layers.*.self_attn.o_proj.weight          0-3     R / 0,1:S1 2:R" in lines
    assert two_unlike().expand(llama()).table(4).endswith("outside, of 4 ranks: 3")
