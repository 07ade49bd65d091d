"""The compact form: defaults, shares, the uniform form, round trips, and what people read."""

import copy
import itertools
import pickle
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hdtensor.errors import PlanError
from hdtensor.plan import About, AnnotationPlan, Pipeline, Stage, StrategyPlan, Uniform


EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "plans").glob("*.json"))


def one_stage(*ranks, **batch):
    return Pipeline(stages=(Stage(ranks=ranks, layers=(0, 3)),), **batch)


def two_unlike():
    return StrategyPlan(pipelines=(one_stage(0, 1, share=5), one_stage(2, share=3)))


def test_tp_follows_from_the_ranks():
    assert Stage(ranks=range(8), layers=[0, 1]).tp == 8
    assert Stage(ranks=range(8), layers=[0, 1], cp=2, ep=2).tp == 2
    assert Stage(ranks=range(8), layers=[0, 1]) == Stage(ranks=tuple(range(8)), layers=(0, 1), tp=8)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({}, None),
        ({"share": 5}, 5),
        ({"share": 0}, 0),
        ({"share": 5, "microbatches": 2}, 5),
        ({"share": 5, "mbs": 2}, 5),
        ({"microbatches": 16, "mbs": 2}, 32),
    ],
)
def test_samples_follow_from_what_is_given(batch, samples):
    assert one_stage(0, **batch).samples == samples


def test_ranks_and_shares_of_a_plan():
    plan = two_unlike()
    assert plan.ranks == (0, 1, 2)
    assert plan.outside(5) == (3, 4)
    assert plan.shares == (5, 3)
    assert plan.num_layers == 4
    assert StrategyPlan(pipelines=(one_stage(0), one_stage(1))).shares is None


def test_str_shows_stages_and_shares_and_table_shows_ranks_outside():
    assert two_unlike().table(world_size=4).splitlines() == [
        "plan: 2 pipelines, 3 ranks, 4 layers",
        "pipeline  share      micro-batches  stage  ranks  tp  layers",
        "0         5 (62.5%)  -              0      0,1    2   0-3",
        "1         3 (37.5%)  -              0      2      1   0-3",
        "outside, of 4 ranks: 3",
    ]
    pipeline = Pipeline(
        stages=(
            Stage(ranks=range(4), layers=(0, 1), cp=2, device="H20"),
            Stage(ranks=(9,), layers=(2, 2)),
        ),
        microbatches=4,
        mbs=2,
    )
    plan = StrategyPlan(pipelines=(pipeline,), zero=1, about=About(label="mixed"))
    assert str(plan).splitlines() == [
        "plan 'mixed': 1 pipeline, 5 ranks, 3 layers, zero 1",
        "pipeline  share       micro-batches  stage  ranks  tp  cp  ep  layers  device",
        "0         8 (100.0%)  4 x 2          0      0-3    2   2   1   0-1     H20",
        "                                     1      9      1   1   1   2-2     -",
    ]
    uniform = StrategyPlan(uniform=Uniform(dp=2, tp=4, pp=1, mbs=2))
    assert str(uniform) == "plan: 8 ranks\nuniform: dp 2, tp 4, mbs 2"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_plans_load_and_round_trip(path, tmp_path):
    plan = AnnotationPlan.load(path)
    plan.check(world_size=5 if path.stem == "two_lanes" else 4)
    assert plan.num_layers == 4
    plan.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert AnnotationPlan.load(tmp_path / "again.json") == plan


def test_example_plans_are_the_ones_that_the_docs_name():
    names = ["other_pairs", "single", "three_subgroups", "tp2", "two_lanes", "two_unlike"]
    assert [path.stem for path in EXAMPLES] == names


def test_plans_are_values():
    plan = two_unlike()
    for twin in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), two_unlike()):
        assert twin == plan
        assert hash(twin) == hash(plan)
    with pytest.raises(AttributeError):
        plan.zero = 1


def test_a_byte_order_mark_and_a_missing_version_are_accepted():
    text = '{"pipelines": [{"stages": [{"ranks": [0], "layers": [0, 3]}]}]}'
    plan = AnnotationPlan.from_json(text)
    assert AnnotationPlan.from_json(b"\xef\xbb\xbf" + text.encode()) == plan
    assert plan.to_dict()["version"] == 1


def test_uniform_deals_ranks_tp_innermost_then_pp_then_dp():
    plan = StrategyPlan(uniform=Uniform(dp=2, tp=2, pp=3), zero=1).with_pipelines(7, world_size=12)
    assert [[s.ranks for s in p.stages] for p in plan.pipelines] == [
        [(0, 1), (2, 3), (4, 5)],
        [(6, 7), (8, 9), (10, 11)],
    ]
    assert [s.layers for s in plan.pipelines[1].stages] == [(0, 2), (3, 4), (5, 6)]
    assert plan.shares == (1, 1)
    assert plan.zero == 1
    assert plan.uniform is None
    assert plan.with_pipelines(7) is plan


def test_uniform_keeps_micro_batches():
    uniform = Uniform(dp=2, tp=1, pp=1, microbatches=4, mbs=2)
    plan = StrategyPlan(uniform=uniform).with_pipelines(1)
    assert plan.shares == (8, 8)
    sized = StrategyPlan(uniform=Uniform(dp=2, tp=1, pp=1, mbs=2)).with_pipelines(1)
    assert [(p.mbs, p.microbatches, p.samples) for p in sized.pipelines] == [(2, None, 1)] * 2


def test_uniform_that_does_not_fit():
    plan = StrategyPlan(uniform=Uniform(dp=1, tp=2, pp=3))
    with pytest.raises(
        PlanError, match=r"uniform\.pp: 3 stages need as many layers; the model has 2"
    ):
        plan.with_pipelines(2)
    with pytest.raises(PlanError, match=r"ranks: ranks 4,5 beyond the world"):
        plan.with_pipelines(3, world_size=4)
    ulysses = StrategyPlan(uniform=Uniform(dp=1, tp=1, pp=1, sp=2))
    with pytest.raises(
        PlanError, match=r"uniform\.sp: 2 is valid in a plan, but this version runs"
    ):
        ulysses.with_pipelines(4)


NUMBER = st.integers(1, 40)
BATCHES = [
    st.fixed_dictionaries({"share": NUMBER}, optional={"mbs": NUMBER}),
    st.fixed_dictionaries({"microbatches": NUMBER, "mbs": NUMBER}),
    st.just({}),
]


@st.composite
def strategies_(draw):
    """Draw plans: pipelines cut the same layers at different places; ranks are dealt at random."""
    num_layers = draw(st.integers(1, 9))
    ranks = draw(st.permutations(range(24)))
    kind = draw(st.sampled_from(BATCHES))
    pipelines = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, num_layers - 1), max_size=2)) if num_layers > 1 else ()
        bounds = [0, *sorted(cuts), num_layers]
        stages = []
        for first, stop in itertools.pairwise(bounds):
            size = draw(st.integers(1, 2))
            stages.append(Stage(ranks=[ranks.pop() for _ in range(size)], layers=(first, stop - 1)))
        batch = draw(kind)
        pipelines.append(Pipeline(stages=stages, name=draw(st.none() | st.just("p")), **batch))
    return StrategyPlan(pipelines=pipelines, zero=draw(st.integers(0, 3)))


@given(strategies_())
def test_any_plan_survives_a_round_trip(plan):
    assert AnnotationPlan.from_json(plan.to_json()) == plan
    assert len(str(plan).splitlines()) == 2 + sum(len(p.stages) for p in plan.pipelines)
