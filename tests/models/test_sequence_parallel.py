"""Sequence parallelism: hidden states between blocks are cut on the sequence, inside each subgroup."""

from collections import Counter

import pytest

import hdtensor as hd
from hdtensor import AnnotationPlan
from hdtensor.plan import StrategyPlan
from tests.models.hf import batch, build, compare_training, strategy
from tests.support.world import run_world


UNLIKE = strategy(([0, 1], 5), ([2], 3), sequence_parallel=True)
TP3 = strategy(([0, 1, 2], 3), ([3], 1), sequence_parallel=True)


def _train(rank, families, plan, lengths):
    for family in families:
        compare_training(family, plan, steps=2, lengths=lengths, rounding=1e-6)


@pytest.mark.dist(4)
@pytest.mark.parametrize("lengths", [(12,), (7, 4)], ids=["even", "uneven"])
def test_training_equals_one_device(lengths):
    families = ("llama", "gpt2", "deepseek_v3")
    run_world(_train, 4, families, UNLIKE, lengths)


@pytest.mark.dist(4)
def test_other_families():
    run_world(_train, 4, ("gemma2", "opt", "phi3", "qwen3_moe"), UNLIKE, (7,))


def _train_wide(rank):
    model = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
    compare_training("llama", TP3, steps=2, lengths=(7,), model=model)


@pytest.mark.dist(4)
def test_kv_heads_are_replicated_beside_a_cut_sequence():
    run_world(_train_wide, 4)


def _count(rank, family, num_layers):
    plan = UNLIKE.to_dict()
    for pipeline in plan["pipelines"]:
        pipeline["stages"][0]["layers"] = [0, num_layers - 1]
    model = build(family, num_hidden_layers=num_layers)
    hd.parallelize(model, AnnotationPlan.from_dict(plan), use_regions=False)
    data = hd.distribute_batch(model, batch(0, length=7))
    with hd.debug.count_communication() as forward:
        loss = model(**data).loss
    with hd.debug.count_communication() as backward:
        loss.backward()
    if rank > 1:
        return Counter(), Counter()
    return tuple(
        Counter(e.kind for e in c.events if e.why == "redistribute") for c in (forward, backward)
    )


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_layer_gathers_twice_and_scatters_twice(family):
    """One all-gather more leaves the last layer, and one enters the first one's gradient into the embedding."""
    one, three = (run_world(_count, 4, family, n)[0] for n in (1, 3))
    for few, many in zip(one, three, strict=True):
        assert few == {"all_gather": 3, "reduce_scatter": 2}
        assert many - few == {"all_gather": 4, "reduce_scatter": 4}


def test_points_of_a_plan():
    plan = UNLIKE.expand(build("llama"))
    cut, whole = "S0[5:3] / 0,1:S1 2:R", "S0[5:3] / 0,1:R 2:R"
    points = {(p.module.removeprefix("model.layers."), p.side): str(p.spec) for p in plan.points}
    assert points == {
        ("0", "input"): cut,
        ("0.self_attn", "input"): whole,
        ("0.self_attn.o_proj", "output"): cut,
        ("0.mlp", "input"): whole,
        ("0.mlp.down_proj", "output"): cut,
        ("1.self_attn", "input"): whole,
        ("1.self_attn.o_proj", "output"): cut,
        ("1.mlp", "input"): whole,
        ("1.mlp.down_proj", "output"): cut,
        ("1", "output"): whole,
    }


def test_the_key_survives_a_round_trip_and_is_checked():
    assert StrategyPlan.from_dict(UNLIKE.to_dict()) == UNLIKE
    assert "sequence_parallel" not in strategy(([0, 1], 1)).to_dict()
    with pytest.raises(hd.PlanError, match="sequence_parallel"):
        strategy(([0, 1], 1), sequence_parallel="yes")
