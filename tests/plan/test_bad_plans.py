"""Bad plans: every fault is a ``PlanError`` that names the field, and nothing else ever escapes."""

import re

import pytest

from hdtensor.errors import PlanError
from hdtensor.plan import AnnotationPlan, ExpandedPlan, Pipeline, Stage, StrategyPlan, Uniform
from hdtensor.plan.reader import MAX_BYTES
from tests.plan.documents import DELETE, EXPANDED, GOOD, changed, uniform


STAGE = "pipelines[0].stages[1]"


def in_stage(field, value):
    return changed(GOOD, ("pipelines", 0, "stages", 1, field), value)


def in_pipeline(field, value):
    return changed(GOOD, ("pipelines", 0, field), value)


BAD_STRATEGIES = [
    # ranks
    (in_stage("ranks", [2, 2]), f"{STAGE}.ranks[1]: rank 2 stands twice"),
    (in_stage("ranks", [1, 2]), f"{STAGE}.ranks: rank 1 also in pipelines[0].stages[0].ranks"),
    (
        in_stage("ranks", [3, 4]),
        "pipelines[1].stages[0].ranks: rank 4 also in pipelines[0].stages[1]",
    ),
    (in_stage("ranks", []), f"{STAGE}.ranks: must hold at least one rank"),
    (in_stage("ranks", [2, -3]), f"{STAGE}.ranks[1]: must be from 0 to 1048575, got -3"),
    (in_stage("ranks", [2, 1 << 20]), f"{STAGE}.ranks[1]: must be from 0 to 1048575, got 1048576"),
    (
        in_stage("ranks", [2, 10**5000]),
        f"{STAGE}.ranks[1]: must be from 0 to 1048575, got an integer",
    ),
    (in_stage("ranks", [2, True]), f"{STAGE}.ranks[1]: must be an integer, got True"),
    (in_stage("ranks", [2, 3.0]), f"{STAGE}.ranks[1]: must be an integer, got 3.0"),
    (in_stage("ranks", [2, "3"]), f"{STAGE}.ranks[1]: must be an integer, got '3'"),
    (in_stage("ranks", "2,3"), f"{STAGE}.ranks: must be a list of integers, got '2,3'"),
    (in_stage("ranks", 2), f"{STAGE}.ranks: must be a list of integers, got 2"),
    (in_stage("ranks", {"2": 3}), f"{STAGE}.ranks: must be a list of integers, got an object"),
    (in_stage("ranks", DELETE), f"{STAGE}.ranks: missing"),
    # layers
    (
        in_stage("layers", [3, 3]),
        f"{STAGE}.layers: the stage before ends at 1, this must begin at layer 2",
    ),
    (in_stage("layers", [1, 3]), "layer 1 is doubled"),
    (in_stage("layers", [0, 3]), "layer 0 is doubled"),
    (
        in_stage("layers", [2, 2]),
        "pipelines[1].stages[0].layers: ends at layer 3, but pipelines[0] at 2",
    ),
    (
        in_stage("layers", [2, 4]),
        "pipelines[1].stages[0].layers: ends at layer 3, but pipelines[0] at 4",
    ),
    (in_stage("layers", [3, 2]), f"{STAGE}.layers: must be [first, last]"),
    (in_stage("layers", [2]), f"{STAGE}.layers: must be [first, last]"),
    (in_stage("layers", [2, 3, 4]), f"{STAGE}.layers: must be [first, last]"),
    (in_stage("layers", [2, 10**5]), f"{STAGE}.layers[1]: must be from 0 to 99999"),
    (in_stage("layers", [2, None]), f"{STAGE}.layers[1]: must be an integer, got None"),
    (in_stage("layers", DELETE), f"{STAGE}.layers: missing"),
    (changed(GOOD, ("pipelines", 0, "stages", 0, "layers"), [1, 1]), "must begin at layer 0"),
    # degrees
    (in_stage("tp", 3), f"{STAGE}.tp: tp * cp * ep = 3 * 1 * 1 = 3 must be the number of ranks, 2"),
    (in_stage("tp", 0), f"{STAGE}.tp: must be from 1 to"),
    (in_stage("tp", True), f"{STAGE}.tp: must be an integer, got True"),
    (in_stage("cp", 3), f"{STAGE}.ranks: 2 ranks do not divide by cp * ep = 3"),
    (in_stage("ep", 1.0), f"{STAGE}.ep: must be an integer, got 1.0"),
    # unknown keys, wrong kinds
    (in_stage("rank", [2]), f"{STAGE}.rank: unknown key; did you mean 'ranks'?"),
    (in_stage("device", 3), f"{STAGE}.device: must be a text, got 3"),
    (in_stage("name", "a\nb"), f"{STAGE}.name: must be at most 1000 printable characters"),
    (in_pipeline("stage", []), "pipelines[0].stage: unknown key; did you mean 'stages'?"),
    (in_pipeline("stages", []), "pipelines[0].stages: must hold at least one stage"),
    (in_pipeline("stages", {}), "pipelines[0].stages: must be a list of stages"),
    (in_pipeline("stages", [[0, 1]]), "pipelines[0].stages[0]: must be an object"),
    (in_pipeline("stages", DELETE), "pipelines[0].stages: missing"),
    (
        in_pipeline("implied_by_ellipsis", 1),
        "pipelines[0].implied_by_ellipsis: must be true or false",
    ),
    (changed(GOOD, ("pipelines",), []), "pipelines: must hold at least one pipeline"),
    (changed(GOOD, ("pipelines",), {}), "pipelines: must be a list of pipelines"),
    (changed(GOOD, ("pipelines",), DELETE), "pipelines: missing"),
    (changed(GOOD, ("pipelines", 1), 7), "pipelines[1]: must be an object"),
    (changed(GOOD, ("pipeline",), []), "pipeline: unknown key; did you mean 'pipelines'?"),
    (changed(GOOD, ("x\u2028y",), 1), "'x\\u2028y': unknown key"),
    (changed(GOOD, ("zero",), 4), "zero: must be from 0 to 3, got 4"),
    (changed(GOOD, ("zero",), False), "zero: must be an integer, got False"),
    (changed(GOOD, ("version",), 2), "version: 2 is unknown; this package reads version 1"),
    (changed(GOOD, ("version",), "1"), "version: must be an integer, got '1'"),
    (changed(GOOD, ("version",), None), "version: must be an integer, got None"),
    (changed(GOOD, ("label",), "x" * 1001), "label: must be at most 1000 printable characters"),
    (changed(GOOD, ("cluster",), {"H20": 1.5}), "cluster.H20: must be an integer, got 1.5"),
    (changed(GOOD, ("reported_step_time_s",), "fast"), "reported_step_time_s: must be a number"),
    (changed(GOOD, ("max_seq_len_interval",), [1, 2]), "max_seq_len_interval[0]: must be a text"),
    # parts of the batch
    (in_pipeline("microbatches", 0), "pipelines[0].microbatches: must be from 1 to"),
    (
        in_pipeline("microbatches", DELETE),
        "pipelines[0].microbatches: missing; give microbatches and mbs",
    ),
    (in_pipeline("mbs", None), "pipelines[0].mbs: missing; give microbatches and mbs together"),
    (in_pipeline("share", 5), "pipelines[0].share: microbatches and mbs already say how much"),
    (
        changed(in_pipeline("share", 5), ("pipelines", 0, "mbs"), DELETE),
        "pipelines[1]: its part of the batch is given by microbatches x mbs, that of pipelines[0] by share",
    ),
    (
        {"pipelines": [{"share": 0, "stages": [{"ranks": [0], "layers": [0, 0]}]}]},
        "pipelines[0].share: all shares are 0",
    ),
    # the uniform form
    (uniform(dp=0), "uniform.dp: must be from 1 to"),
    (uniform(gpus=5), "uniform.gpus: 5, but the degrees multiply to 4"),
    (uniform(dp=1 << 20, tp=1 << 20), "uniform.dp: the degrees multiply to"),
    (uniform(micro_batches=2), "uniform.micro_batches: unknown key; did you mean 'microbatches'?"),
    (
        uniform(activation_checkpointing=0),
        "uniform.activation_checkpointing: must be true or false",
    ),
    ({"uniform": [2, 2, 1]}, "uniform: must be an object"),
    ({"uniform": {"dp": 2, "tp": 2}}, "uniform.pp: missing"),
    ({"uniform": None}, "pipelines: must hold at least one pipeline"),
    ({**GOOD, **uniform()}, "uniform: the plan has pipelines too"),
    # no object at all
    ([GOOD], "plan: must be an object {...}, got a list of 1"),
    (None, "plan: must be an object {...}, got None"),
    ({}, "pipelines: missing"),
]


@pytest.mark.parametrize(
    ("document", "message"), BAD_STRATEGIES, ids=[m for _, m in BAD_STRATEGIES]
)
def test_bad_strategy_names_the_field(document, message):
    assert isinstance(AnnotationPlan.from_dict(GOOD), StrategyPlan)
    with pytest.raises(PlanError, match=re.escape(message)) as error:
        AnnotationPlan.from_dict(document)
    assert error.value.__cause__ is None
    assert len(str(error.value)) < 600


def in_tensors(value):
    return changed(EXPANDED, ("tensors", "a.weight"), value)


def in_point(field, value):
    return changed(EXPANDED, ("points", 0, field), value)


BAD_EXPANDED = [
    (in_tensors("R / 0,1:S0 1:R"), "tensors['a.weight']: rank 1 is in subgroup 0"),
    (in_tensors("P / 0,1:S0 2:R"), "tensors['a.weight']: P / 0,1:S0 2:R is Partial"),
    (in_tensors("R / 0,1:P 2:R"), "is Partial"),
    (in_tensors("R / 0,1:S0 2097152:R"), "tensors['a.weight']: ranks must be below 1048576"),
    (in_tensors("R / 0-99999999:R"), "tensors['a.weight']: the plan's specs name more than"),
    (in_tensors(3), "tensors['a.weight'] must be an object or a text"),
    (in_tensors("nonsense"), "tensors['a.weight']: 'nonsense' is no spec"),
    (in_tensors({"top": "R"}), "tensors['a.weight'] lacks ['subgroups']"),
    (changed(EXPANDED, ("tensors",), {}), "tensors: must name at least one tensor"),
    (changed(EXPANDED, ("tensors",), []), "tensors: must be an object"),
    (changed(EXPANDED, ("tensors", "a\x00"), "R / 0:R"), "tensors['a\\x00']: must be at most"),
    (changed(EXPANDED, ("inputs",), DELETE), "inputs: missing"),
    (changed(EXPANDED, ("inputs",), "S1 / 0,1:R 2:R"), "inputs: the top placement must be S0"),
    (changed(EXPANDED, ("labels",), "S0[1:1] / 0,1:R 2:R"), "labels: must be cut as inputs are"),
    (changed(EXPANDED, ("zero",), -1), "zero: must be from 0 to 3"),
    (changed(EXPANDED, ("tensor",), {}), "tensor: unknown key; did you mean 'tensors'?"),
    (changed(EXPANDED, ("unmatched",), "a"), "unmatched: must be a list of texts"),
    (changed(EXPANDED, ("points",), {}), "points: must be a list of points"),
    (changed(EXPANDED, ("points", 0), "a"), "points[0]: must be an object"),
    (in_point("side", "left"), "points[0].side: must be 'input' or 'output', got 'left'"),
    (in_point("kind", ["tp"]), "points[0].kind: must be 'stage' or 'tp', got a list of 1"),
    (in_point("module", 1), "points[0].module: must be a text"),
    (in_point("spec", "R"), "points[0].spec: 'R' is no spec"),
    (in_point("spec", DELETE), "points[0].spec: missing"),
]


@pytest.mark.parametrize(("document", "message"), BAD_EXPANDED, ids=[m for _, m in BAD_EXPANDED])
def test_bad_expanded_plan_names_the_field(document, message):
    assert isinstance(AnnotationPlan.from_dict(EXPANDED), ExpandedPlan)
    with pytest.raises(PlanError, match=re.escape(message)):
        AnnotationPlan.from_dict(document)


BAD_TEXTS = [
    ("", "the plan is empty"),
    (b" \n", "the plan is empty"),
    ("{", "the plan is not JSON: Expecting property name"),
    ("{'pipelines': 1}", "the plan is not JSON"),
    ("pipelines: 3", "the plan is not JSON"),
    (b"\x80\x04K\x01.", "the plan is not UTF-8 text"),
    ('{"zero": NaN}', "NaN is not JSON"),
    ('{"zero": -Infinity}', "-Infinity is not JSON"),
    ('{"zero": 1e999}', "the number 1e999 is too large"),
    ('{"zero": %s}' % ("9" * 5000), "has 5000 digits; allowed: 18"),
    ('{"zero": 0, "zero": 0}', "the key 'zero' stands twice"),
    ('{"pipelines": [{"mbs": 1, "mbs": 2}]}', "the key 'mbs' stands twice"),
    ("[" * 100_000, "nested deeper than 32 levels"),
    ('{"label": ' + "[" * 40 + "]" * 40 + "}", "nested deeper than 32 levels"),
    (" " * (MAX_BYTES + 1), "more than 67108864 bytes"),
    (None, "must be a str or bytes, got None"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS, ids=[m for _, m in BAD_TEXTS])
def test_bad_text(text, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        AnnotationPlan.from_json(text)


def test_bad_files(tmp_path):
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for path, message in (
        (tmp_path / "none.json", "No such file"),
        (tmp_path, "Is a directory"),
        ("a\0b", "null"),
        (large, "more than 67108864 bytes"),
    ):
        with pytest.raises(PlanError, match=message):
            AnnotationPlan.load(path)


def test_a_form_refuses_the_other():
    with pytest.raises(PlanError, match="its form is StrategyPlan, not ExpandedPlan"):
        ExpandedPlan.from_dict(GOOD)
    with pytest.raises(PlanError, match="its form is ExpandedPlan, not StrategyPlan"):
        StrategyPlan.from_dict(EXPANDED)


def test_values_built_in_python_are_checked_too():
    with pytest.raises(
        PlanError, match=r"pipelines\[0\]: must be a Pipeline, got a value of type Stage"
    ):
        StrategyPlan(pipelines=(Stage(ranks=(0,), layers=(0, 0)),))
    with pytest.raises(PlanError, match=r"stages\[0\]: must be a Stage, got a list of 2"):
        Pipeline(stages=((0, 1),))
    with pytest.raises(PlanError, match="uniform: must be a Uniform"):
        StrategyPlan(uniform={"dp": 1})
    with pytest.raises(PlanError, match="tp: must be an integer, got 'two'"):
        Uniform(dp=1, tp="two", pp=1)
    with pytest.raises(PlanError, match=r"inputs: must be an HDSpec, got 'R / 0:R'"):
        ExpandedPlan(
            tensors={"w": AnnotationPlan.from_dict(EXPANDED).inputs}, inputs="R / 0:R", labels=1
        )


@pytest.mark.parametrize(
    ("world_size", "message"),
    [
        (4, "pipelines[1].stages[0].ranks: rank 4 beyond the world, which has ranks 0 to 3"),
        (2, "pipelines[0].stages[1].ranks: ranks 2,3 beyond the world, which has ranks 0 to 1"),
        (0, "world_size: must be from 1 to"),
        (True, "world_size: must be an integer"),
    ],
)
def test_ranks_beyond_the_world(world_size, message):
    plan = AnnotationPlan.from_dict(GOOD)
    plan.check(world_size=5)
    with pytest.raises(PlanError, match=re.escape(message)):
        plan.check(world_size=world_size)


def test_uniform_and_expanded_plans_beyond_the_world():
    with pytest.raises(
        PlanError, match="uniform: the degrees multiply to 4 ranks, but the world has 3"
    ):
        AnnotationPlan.from_dict(uniform()).check(world_size=3)
    plan = AnnotationPlan.from_dict(EXPANDED)
    plan.check(world_size=3)
    with pytest.raises(PlanError, match=r"inputs: rank 2 beyond the world, which has ranks 0 to 1"):
        plan.check(world_size=2)
