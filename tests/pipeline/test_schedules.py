"""Schedules: known ones by hand and beside torch's, text form, and what the validator accepts and refuses."""

import itertools
import random

import pytest
from hypothesis import given, settings, strategies as st
from torch.distributed.pipelining import schedules

from hdtensor.errors import ScheduleError
from hdtensor.pipeline import (
    SCHEDULES,
    Action,
    Edge,
    Kind,
    Lane,
    LaneStage,
    Schedule,
    Transport,
    build_schedule,
    microbatch_sizes,
    peak_activations,
    validate,
)
from tests.pipeline.emulation import run


COUNTS = (0, 1, 2, 3, 5, 8)


def chain(num_stages):
    return Lane.chain([(stage,) for stage in range(num_stages)])


def looped(num_places, per_place):
    return Lane.chain([(stage % num_places,) for stage in range(num_places * per_place)])


def v_shape(num_places):
    return Lane.chain([(place,) for place in [*range(num_places), *reversed(range(num_places))]])


def lanes_for(name):
    """Lanes of every shape that a schedule is for."""
    lanes = [chain(n) for n in (1, 2, 4, 7)]
    if name not in ("1F1B", "ZB-H1"):
        lanes += [looped(2, 2), looped(3, 3), looped(4, 2), v_shape(1), v_shape(2), v_shape(4)]
        lanes += [Lane.chain([(0,), (1,), (0,)]), Lane.chain([(0,), (1,), (0,), (2,), (1,)])]
    return lanes


LANES = [(name, lane) for name in SCHEDULES for lane in lanes_for(name)]


@pytest.mark.parametrize(("name", "lane"), LANES, ids=lambda x: str(x))
def test_every_schedule_runs_to_its_end(name, lane):
    for count in COUNTS:
        schedule = build_schedule(name, lane, count)
        assert schedule.num_actions == len(run(schedule.rows, lane, random.Random(count).choice))
        validate(schedule, lane, Transport(rendezvous=True, posted_ahead=None))
        assert Schedule.parse(schedule.to_text()) == schedule


@pytest.mark.paper("Fig. 21")
def test_figure_21_runs_fb_beside_ffb():
    last, first = build_schedule("1F1B", chain(1), 3), build_schedule("1F1B", chain(2), 3)
    assert "".join(a.kind for a in last.rows[0]) == "FBFBFB"
    assert "".join(a.kind for a in first.rows[0]) == "FFBFBB"
    assert "".join(a.kind for a in first.rows[1]) == "FBFBFB"


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_activations_stay_within_the_number_of_stages_left(name):
    for stages, count in itertools.product((1, 2, 4), COUNTS[1:]):
        peaks = peak_activations(build_schedule(name, chain(stages), count).rows)
        wanted = {s: min(count, stages - s if name == "1F1B" else stages) for s in range(stages)}
        assert peaks == wanted if name == "1F1B" else all(peaks[s] <= wanted[s] for s in peaks)
    assert peak_activations(build_schedule("GPipe", chain(3), 6).rows) == {0: 6, 1: 6, 2: 6}


def test_zbv_holds_no_more_than_1f1b():
    for places in (2, 4):
        lane = v_shape(places)
        for row in build_schedule("ZBV", lane, 4 * places).rows:
            held = most = 0
            for action in row:
                held += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD_WEIGHT)
                most = max(most, held)
            assert most <= 2 * places  # stages of half the layers


def torch_order(name, num_places, num_microbatches, per_place=1):
    """What torch's schedule of stub stages does on each rank."""

    class Stage:
        def __init__(self, rank, index):
            self.stage_index, self.group_rank, self.group_size = index, rank, num_places
            self.num_stages, self.is_first, self.is_last = num_places * per_place, False, False
            self.stage_index_to_group_rank, self.has_backward, self.group = {}, True, None
            self.is_first, self.submod, self.device = index == 0, None, "cpu"

    indices = (
        [0, 2 * num_places - 1] if "ZBV" in name else range(0, num_places * per_place, num_places)
    )
    kind = getattr(schedules, f"Schedule{name}")
    order = kind(
        [Stage(0, i) for i in indices], num_microbatches, loss_fn=lambda *a: None
    ).pipeline_order
    return [[a for a in order[rank] if a is not None] for rank in range(num_places)]


def as_rows(order):
    return tuple(tuple(Action.parse(str(action)) for action in row) for row in order)


@pytest.mark.parametrize(("places", "per_place", "count"), [(2, 2, 4), (4, 2, 8), (3, 3, 6)])
def test_interleaved_is_torchs(places, per_place, count):
    rows = as_rows(torch_order("Interleaved1F1B", places, count, per_place))
    assert build_schedule("Interleaved1F1B", looped(places, per_place), count).rows == rows


@pytest.mark.parametrize(
    ("name", "lane", "order"),
    [
        ("InterleavedZeroBubble", looped(4, 2), (4, 8, 2)),
        ("ZBVZeroBubble", v_shape(4), (4, 8, 2)),
        ("LoopedBFS", looped(3, 2), (3, 5, 2)),
    ],
)
def test_torchs_schedules_are_read_and_accepted(name, lane, order, tmp_path):
    rows = as_rows(torch_order(name, *order))
    path = tmp_path / f"{name}.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    schedule = build_schedule(path, lane, order[1])
    assert (schedule.name, schedule.rows) == (name, rows)
    with pytest.raises(ScheduleError, match=r"is for \d micro-batches, but the lane has 99"):
        build_schedule(path, lane, 99)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_the_validator_agrees_with_blocking_channels(data):
    """Random orders of complete rows on random graphs: accepted if and only if they run to their end."""
    lane, schedule = data.draw(mutated_schedules())
    is_blocking = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 9))
    done = run(schedule.rows, lane, random.Random(seed).choice, is_blocking=is_blocking)
    is_complete = len(done) == schedule.num_actions
    if is_complete:
        validate(schedule, lane, Transport(rendezvous=is_blocking))
        return
    with pytest.raises(ScheduleError, match=r"(?s)wait for ever.*<-- here"):
        validate(schedule, lane, Transport(rendezvous=is_blocking))


@st.composite
def mutated_schedules(draw):
    """A lane with random visits and skips, and a schedule with some neighbours exchanged, still in order."""
    num_places = draw(st.integers(1, 4))
    visits = draw(st.lists(st.integers(0, num_places - 1), min_size=1, max_size=6))
    lane = Lane.chain([(place,) for place in visits])
    num = lane.num_stages
    skips = draw(st.lists(st.tuples(st.integers(0, num - 1), st.integers(0, num - 1)), max_size=2))
    edges = {*lane.edges, *(Edge(a, b) for a, b in skips if b > a + 1)}
    lane = Lane(stages=lane.stages, edges=tuple(sorted(edges)))
    name = draw(st.sampled_from(["GPipe", "Interleaved1F1B", "ZBV"]))
    schedule = build_schedule(name, lane, draw(st.integers(1, 4)))
    rows = [list(row) for row in schedule.rows]
    for _ in range(draw(st.integers(0, 12))):
        row = draw(st.sampled_from(rows))
        step = draw(st.integers(0, len(row) - 2))
        if row[step][::2] != row[step + 1][::2]:  # not of the same stage and micro-batch
            row[step], row[step + 1] = row[step + 1], row[step]
    rows = tuple(map(tuple, rows))
    return lane, Schedule(name=name, num_microbatches=schedule.num_microbatches, rows=rows)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_changed_action_is_refused(data):
    """Drop, double, replace or move one action to another place: refused, with the cell marked."""
    name, lane = data.draw(st.sampled_from([pair for pair in LANES if pair[1].num_stages > 1]))
    schedule = build_schedule(name, lane, data.draw(st.integers(1, 5)))
    rows = [list(row) for row in schedule.rows]
    place = data.draw(st.integers(0, len(rows) - 1))
    step = data.draw(st.integers(0, len(rows[place]) - 1))
    action = rows[place][step]
    match data.draw(st.sampled_from(["drop", "double", "replace", "other", "beyond", "last"])):
        case "drop":
            del rows[place][step]
        case "double":
            rows[place].insert(data.draw(st.integers(0, len(rows[place]))), action)
        case "replace":
            kind = data.draw(st.sampled_from([k for k in Kind if k is not action.kind]))
            rows[place][step] = action._replace(kind=kind)
        case "other":
            rows[place][step] = action._replace(stage=action.stage + 1000)
        case "beyond":
            rows[place][step] = action._replace(microbatch=schedule.num_microbatches)
        case "last":
            kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT)
            early = next(i for i, a in enumerate(rows[place]) if a.kind in (*kinds, Kind.BACKWARD))
            rows[place].append(rows[place].pop(early))
    changed = Schedule(
        name=name, num_microbatches=schedule.num_microbatches, rows=tuple(map(tuple, rows))
    )
    if changed.rows[place][-1:] == schedule.rows[place][-1:] and changed == schedule:
        return
    with pytest.raises(ScheduleError, match="<-- here"):
        validate(changed, lane)


def test_one_channel_for_both_directions_deadlocks_1f1b_but_not_gpipe():
    lane = chain(3)
    with pytest.raises(ScheduleError, match=r"places wait for ever: .*gradients of micro-batch 0"):
        validate(build_schedule("1F1B", lane, 5), lane, Transport(channels="pair"))
    validate(build_schedule("GPipe", lane, 5), lane, Transport(channels="pair"))


def test_sends_that_block_need_receives_posted_ahead():
    lane = chain(2)
    schedule = build_schedule("1F1B", lane, 3)
    with pytest.raises(ScheduleError, match=r"rank 0 at 0F1 for its activations .* to be taken"):
        validate(schedule, lane, Transport(rendezvous=True))
    validate(schedule, lane, Transport(rendezvous=True, posted_ahead=2))


def test_a_deadlock_is_drawn():
    crossed = Schedule.parse("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1")
    validate(crossed, chain(2))
    crossed = Schedule.parse("# schedule: crossed\n0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ScheduleError) as caught:
        validate(crossed, chain(2))
    assert str(caught.value).splitlines() == [
        "crossed: 2 of 2 places wait for ever: rank 0 at 0B0 for gradients of micro-batch 0 from stage 1 to 0; "
        "rank 1 at 1F1 for activations of micro-batch 1 from stage 0 to 1. Put actions that others wait for "
        "earlier, or post receives ahead.",
        "step  rank 0  rank 1",
        "   0   0F0     1F0",
        "   1  [0B0]   [1F1]  <-- here",
        "   2   0F1     1B0",
        "   3   0B1     1B1",
    ]


def test_faults_are_named():
    lane = chain(2)

    def fault(text):
        with pytest.raises(ScheduleError) as caught:
            validate(Schedule.parse(text), lane)
        return str(caught.value).splitlines()[0]

    assert "it has 1 rows, but the lane has 2 places (rank 0: stages [0], rank 1" in fault(
        "0F0,0B0"
    )
    assert "1F0 stands in the row of rank 0, which has stages [0] only" in fault("1F0\n1B0")
    assert "0F0 stands twice in the row of rank 0" in fault("0F0,0F0,0B0\n1F0,1B0")
    assert "1W0 is missing in the row of rank 1" in fault("0F0,0B0\n1F0,1I0")
    assert "1B1 is missing in the row of rank 1" in fault("0F0,0B0,0F1,0B1\n1F0,1B0,1F1")
    assert "whole and in parts; keep B, or I and W" in fault("0F0,0B0\n1F0,1B0,1W0")
    assert "0B0 stands before 0F0 in the row of rank 0" in fault("0B0,0F0\n1F0,1B0")
    assert "0W0 stands before 0I0 in the row of rank 0; W needs I" in fault("0F0,0W0,0I0\n1F0,1B0")
    many = fault("# micro-batches: 1\n0F0,0B0\n1F0,1B3")
    assert "1B3 is of a micro-batch that does not exist: there are 1, from 0" in many


def test_a_long_grid_is_cut_to_what_is_near():
    lane = chain(32)
    rows = [list(row) for row in build_schedule("1F1B", lane, 64).rows]
    del rows[20][60]
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule(name="cut", num_microbatches=64, rows=tuple(map(tuple, rows))), lane)
    lines = str(caught.value).splitlines()
    assert len(lines) < 12
    assert max(map(len, lines[1:])) < 60
    assert "rank 19  rank 20  rank 21" in lines[1]


def test_a_stage_on_ranks_of_several_places_runs_when_all_have_come():
    lane = Lane(stages=(LaneStage((0, 1)), LaneStage((1, 2))), edges=(Edge(0, 1),))
    assert [place.stages for place in lane.places] == [(0,), (0, 1), (1,)]
    good = Schedule.parse("0F0,0F1,0B0,0B1\n0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n1F0,1F1,1B0,1B1")
    validate(good, lane)
    with pytest.raises(ScheduleError, match="for the other ranks of stage 0 to come to 0F1"):
        validate(Schedule.parse(good.to_text().replace("0F0,0F1,0B0,0B1", "0F1,0F0,0B0,0B1")), lane)
    with pytest.raises(ScheduleError, match="each once"):
        build_schedule("ZBV", lane, 2)


def test_texts_that_are_no_schedule(tmp_path):
    for text, fault in [
        ("0F0,0X1", r"line 1, cell 2: '0X1' is no action\. Write stage, kind and micro-batch"),
        ("# a\n\n0F0,0SEND_F0", "line 3, cell 2: '0SEND_F0' is no action"),
        ("# micro-batches: many", "line 1: micro-batches must be a whole number, got 'many'"),
        ("0F" + "9" * 99, r"cell 1: '0F9+'\.\.\. is no action"),
    ]:
        with pytest.raises(ScheduleError, match=fault):
            Schedule.parse(text)
    with pytest.raises(
        ScheduleError, match=r"cannot read the schedule .*nothing.csv.*: No such file"
    ):
        build_schedule(tmp_path / "nothing.csv", chain(1), 1)
    with pytest.raises(ScheduleError, match="there is no schedule '2F2B'; there are GPipe, 1F1B"):
        build_schedule("2F2B", chain(1), 1)
    with pytest.raises(ScheduleError, match="1F1B is for places with one stage each"):
        build_schedule("1F1B", looped(2, 2), 4)
    with pytest.raises(ScheduleError, match="num_microbatches: must be from 0"):
        build_schedule("1F1B", chain(1), -1)


def test_micro_batches_of_unlike_lanes():
    assert microbatch_sizes(33, 33) == (1,) * 33
    assert [microbatch_sizes(33, 5), microbatch_sizes(31, 3)] == [(7, 7, 7, 6, 6), (11, 10, 10)]
    assert microbatch_sizes(0, 0) == ()
    for bad in ((3, 4), (3, 0), (0, 1)):
        with pytest.raises(ScheduleError, match="samples cannot be"):
            microbatch_sizes(*bad)
