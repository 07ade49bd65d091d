"""Plans whose ranks share sequences, inside a stage or between pipelines."""

import pytest

from hdtensor.errors import PlanError
from hdtensor.plan import AnnotationPlan, ExpandedPlan, Pipeline, Stage, StrategyPlan
from tests.plan.test_expand import llama, pipeline, text


def shared(**options):
    stages = Stage(ranks=range(4), layers=(0, 3), cp=2), Stage(ranks=(4,), layers=(0, 3))
    pipelines = tuple(Pipeline(stages=(s,), share=2 - i) for i, s in enumerate(stages))
    return StrategyPlan(pipelines=pipelines, **options)


def test_context_parallel_stages_are_meshes_of_cp_by_tp():
    plan = shared().expand(llama())
    assert str(plan.inputs) == "S0[2:1] / 0-3(2x2):S1,R 4:R"
    assert text(plan, "model.layers.0.self_attn.q_proj.weight") == "R / 0-3(2x2):R,S0 4:R"
    assert {str(point.spec) for point in plan.points} == {str(plan.inputs)}
    assert plan.shared_sequences.modules[0] == "model.layers.0.self_attn"
    assert AnnotationPlan.from_json(plan.to_json()) == plan


def test_pipelines_that_split_every_sequence():
    plan = shared(split="sequence", sequence_order="zigzag").expand(llama())
    assert str(plan.inputs) == "S1[2:1] / 0-3(2x2):S1,R 4:R"
    assert plan.shared_sequences.order == "zigzag"
    assert "shares of every sequence" in str(shared(split="sequence"))
    with pytest.raises(PlanError, match="inputs: the top placement must be S0, the batch"):
        ExpandedPlan(tensors=plan.tensors, inputs=plan.inputs, labels=plan.labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "rows"}, "split: must be one of batch, sequence, got 'rows'"),
        ({"context_parallel": "rings"}, "context_parallel: must be one of all_gather, ring"),
        (
            {"sequence_order": "zigzag"},
            "sequence_order: 'zigzag' is for ranks that share sequences",
        ),
    ],
)
def test_words_for_shared_sequences_are_checked(options, message):
    with pytest.raises(PlanError, match=message):
        StrategyPlan(pipelines=(pipeline(((0,), 3)),), **options)
