"""Lanes from exchanges (App. A.2): Figure 21, the paper's plans, V shapes, skips, and what is no pipeline."""

import itertools

import pytest
from hypothesis import given, strategies as st

from hdtensor.errors import PlanError
from hdtensor.pipeline import Exchange, Lane, exchange_of, find_lanes, plan_lanes
from hdtensor.plan import AnnotationPlan
from hdtensor.redistribute import resolve
from tests.paper.test_plans_json import DATA, MODELS, PIPELINED, UNIFORM, find, name


def move(src, dst, title="x", **fields):
    """One tensor goes from a rank set to another."""
    pairs = tuple((src[i % len(src)], rank) for i, rank in enumerate(dst) if rank not in src)
    return Exchange(name=title, src=(src,), dst=(dst,), transfers=pairs, **fields)


def drawn(exchanges):
    return [str(lane) for lane in find_lanes(exchanges)]


@pytest.mark.paper("Figs. 4, 12, 21")
def test_figure_21():
    w = resolve("S0 / 0,3:S1 1:R 2,4:S1", "R / 0,3:S1 1:R 2,4:R", (6, 6))
    y = resolve("S0 / 0,3:P 1:R 2,4:S1", "S0 / 0,3:S0 5,6:S0 2,4:S1", (12, 4, 6))
    assert any(len(ranks) > 2 for ranks in w.rank_sets()) or w.has_messages
    gather, reshard = exchange_of("1", w, phase="pre"), exchange_of("2", y)
    lanes = find_lanes([gather, reshard])
    assert [str(lane) for lane in lanes] == ["0,3", "1 -> 5,6", "2,4"]
    assert lanes[1].edges[0].exchanges == ("2",)
    # Counted as part of the passes, the gather would make one pipeline of all.
    (all_in_one,) = find_lanes([exchange_of("1", w), reshard])
    assert {0, 1, 2, 3, 4} <= set(all_in_one.ranks)


@pytest.mark.paper("Tables 9, 11, 12, 15, 16")
@pytest.mark.parametrize("document", PIPELINED, ids=name)
def test_the_papers_plans(document):
    lanes = plan_lanes(AnnotationPlan.from_dict(document).expand(MODELS[document["model"]]()))
    wanted = [
        [tuple(stage["ranks"]) for stage in pipeline["stages"]]
        for pipeline in document["pipelines"]
    ]
    assert [[stage.ranks for stage in lane.stages] for lane in lanes] == wanted
    assert all(
        [edge[:2] for edge in lane.edges] == [(i, i + 1) for i in range(len(stages) - 1)]
        for lane, stages in zip(lanes, wanted, strict=True)
    )


@pytest.mark.paper("Tables 8, 10, 13, 14")
@pytest.mark.parametrize(
    "document", [p for p in UNIFORM if p["uniform"].get("sp", 1) == 1], ids=name
)
def test_the_papers_uniform_plans(document):
    plan = AnnotationPlan.from_dict(document)
    lanes = plan_lanes(plan.expand(MODELS[document["model"]]()))
    degrees = document["uniform"]
    size = degrees["tp"] * degrees.get("cp", 1)
    assert [[len(s.ranks) for s in lane.stages] for lane in lanes] == [
        [size] * degrees["pp"]
    ] * degrees["dp"]
    assert len({rank for lane in lanes for rank in lane.ranks}) == len(plan.ranks)


@pytest.mark.paper("Fig. 19")
def test_c2_names_where_stages_begin():
    _, second = plan_lanes(find(11, "C2").expand(MODELS["llama-32B"]()))
    assert str(second) == "16-19 -> 20-23 -> 24-27 -> 28,29 -> 30"
    assert [edge.exchanges for edge in second.edges] == [
        (f"model.layers.{i} input",) for i in (16, 32, 48, 56)
    ]
    assert DATA["plans"]


def test_stages_of_unlike_tp_cp_and_mesh():
    specs = ["S0 / 0-3(2x2):S1,R 8:R", "S0 / 4,5:R 9,10:S1", "S0 / 6:R 11-14(4):S1"]
    exchanges = [exchange_of("in", resolve(specs[0], specs[0], (8, 8, 8)))]
    exchanges += [exchange_of(b, resolve(a, b, (8, 8, 8))) for a, b in itertools.pairwise(specs)]
    assert drawn(exchanges) == ["0-3 -> 4,5 -> 6", "8 -> 9,10 -> 11-14"]


def test_v_shapes_and_loops_are_visits_not_cycles():
    a, b, c = (0, 1), (2,), (3, 4)
    v = [move(a, b), move(b, c), move(c, c, "turn", starts_stage=True), move(c, b), move(b, a)]
    (lane,) = find_lanes(v)
    assert str(lane) == "0,1 -> 2 -> 3,4 -> 3,4#1 -> 2#1 -> 0,1#1"
    assert [place.stages for place in lane.places] == [(0, 5), (1, 4), (2, 3)]
    assert lane == Lane(stages=Lane.chain([a, b, c, c, b, a]).stages, edges=lane.edges)
    loop = [move(a, b), move(b, a), move(a, b), move(b, a)]
    assert drawn(loop) == ["0,1 -> 2 -> 0,1#1 -> 2#1 -> 0,1#2"]


def test_traffic_inside_the_ranks_of_a_stage_starts_none():
    inside = move((0, 1, 2), (0,), "narrow"), move((0,), (0, 1, 2), "wide")
    assert drawn([move((0, 1, 2), (0, 1, 2)), *inside, move((0, 1, 2), (3,))]) == ["0-2 -> 3"]
    collective = Exchange(name="c", src=((0, 1),), dst=((0, 1),), collectives=((0, 1),))
    assert drawn([collective]) == ["0,1"]


def test_skip_connections_are_edges_not_visits():
    a, b, c, d = (0,), (1,), (2,), (3,)
    chain = [move(a, b, "1"), move(b, c, "2"), move(c, d, "3")]
    (lane,) = find_lanes([*chain[:2], move(a, c, "skip"), chain[2], move(a, d, "long")])
    assert str(lane) == "0 -> 1 -> 2 -> 3 (and stages 0 -> 2, 0 -> 3)"
    assert [edge.exchanges for edge in lane.edges] == [
        *(("1",), ("skip",), ("long",), ("2",), ("3",))
    ]
    # A tensor of the first visit, sent on when its ranks are in their second one.
    names = [move(a, a, "in"), move(a, b, "1"), move(b, c, "2"), move(c, a, "back")]
    late = [*names, move(a, c, "late", since="in")]
    assert drawn(late) == ["0 -> 1 -> 2 -> 0#1 (and stages 0 -> 2)"]
    assert drawn([*names, move(a, c, "late")]) == ["0 -> 1 -> 2 -> 0#1 -> 2#1"]
    with pytest.raises(PlanError, match="says that 'nothing' brought its tensor to ranks 0"):
        find_lanes([*names, move(a, c, "late", since="nothing")])


def test_a_lane_may_have_several_subgroups_in_a_stage():
    x = "S1[2:1] / 0,1:S1 2:R"
    shared = resolve("S1[2:1] / 0,1:S1 2:R", "S1[1:1] / 3:R 4:R", (4, 12, 4))
    assert drawn([exchange_of("in", resolve(x, x, (4, 12, 4))), exchange_of("x", shared)]) == [
        "0-2 -> 3,4"
    ]
    plan = AnnotationPlan.from_dict(
        {
            "split": "sequence",
            "pipelines": [
                {"share": 2, "stages": [{"ranks": [0, 1], "layers": [0, 59]}]},
                {"share": 1, "stages": [{"ranks": [2], "layers": [0, 59]}]},
            ],
        }
    )
    assert [str(lane) for lane in plan_lanes(plan.expand(MODELS["llama-32B"]()))] == ["0-2"]


def test_ranks_that_share_sequences_go_on_together():
    """One pipeline moves on and the other stays: its rank is in both stages of their lane."""
    stages = (
        [{"ranks": [0, 1], "layers": [0, 29]}, {"ranks": [3, 4], "layers": [30, 59]}],
        [{"ranks": [2], "layers": [0, 59]}],
    )
    plan = AnnotationPlan.from_dict(
        {"split": "sequence", "pipelines": [{"share": 1, "stages": own} for own in stages]}
    )
    (lane,) = plan_lanes(plan.expand(MODELS["llama-32B"]()))
    assert [set(stage.ranks) for stage in lane.stages] == [{0, 1, 2}, {2, 3, 4}]
    assert [place for place in lane.places if len(place.stages) == 2] == [((2,), (0, 1))]


def test_a_pipeline_without_a_share_is_a_lane():
    stages = [
        [{"ranks": [2 * p], "layers": [0, 29]}, {"ranks": [2 * p + 1], "layers": [30, 59]}]
        for p in (0, 1)
    ]
    plan = AnnotationPlan.from_dict(
        {"pipelines": [{"share": p, "stages": stages[p]} for p in (0, 1)]}
    )
    assert [str(lane) for lane in plan_lanes(plan.expand(MODELS["llama-32B"]()))] == [
        *("0 -> 1", "2 -> 3")
    ]


def test_a_cycle_is_drawn():
    joins = Exchange(name="norm", src=((1, 2),), dst=((1, 2),), collectives=((1, 2),))
    with pytest.raises(PlanError) as caught:
        find_lanes([move((0, 1), (2,), "a"), move((2,), (3,), "b"), joins])
    assert str(caught.value).splitlines() == [
        "the plan is no pipeline: data must pass stage 0-2 before it can get there. A collective joins ranks of "
        "stages that follow one another; let it run over ranks of one stage.",
        "  0-2 -> 0-2  a  <-- here",
        "  0-2 -> 3    b",
        "  0-2            <-- here",
    ]


def test_a_rank_in_two_lanes_is_drawn():
    swapped = resolve("S0 / 0:R 1:R", "S0 / 1:R 2:R", (4, 4))
    with pytest.raises(PlanError, match="rank 1 is in two of them, 0 -> 1 and 1 -> 2"):
        find_lanes([exchange_of("x", swapped)])


def test_ranks_that_do_not_fit_are_named():
    with pytest.raises(PlanError, match="lets ranks 7 communicate, which are in no set of src"):
        find_lanes([Exchange(name="x", src=((0,),), dst=((1,),), transfers=((7, 1),))])
    with pytest.raises(PlanError, match="rank 0 in two sets of src"):
        find_lanes([Exchange(name="x", src=((0,), (0, 1)), dst=())])
    with pytest.raises(
        PlanError, match=r"rank 9 is not in the lane 0 -> 1; its ranks are \(0, 1\)"
    ):
        Lane.chain([(0,), (1,)]).place_of(9)


@given(st.data())
def test_random_lanes_are_found_again(data):
    """Lanes of random rank sets and orders of visits, their exchanges interleaved."""
    lanes, queues, rank = [], [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        sets = []
        for _ in range(data.draw(st.integers(1, 4))):
            size = data.draw(st.integers(1, 4))
            sets.append(tuple(range(rank, rank + size)))
            rank += size
        walk = [sets[0]]
        for following in data.draw(st.lists(st.sampled_from(sets), max_size=6)):
            if following != walk[-1]:
                walk.append(following)
        lanes.append(walk)
        queues.append([move(walk[0], walk[0]), *map(move, walk, walk[1:])])
    merged = []
    while any(queues):
        merged.append(data.draw(st.sampled_from([q for q in queues if q])).pop(0))
    found = {lane.stages[0].ranks: lane for lane in find_lanes(merged)}
    assert len(found) == len(lanes)
    for walk in lanes:
        assert [stage.ranks for stage in found[walk[0]].stages] == walk
        assert found[walk[0]].stages == Lane.chain(walk).stages
