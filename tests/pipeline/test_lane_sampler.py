"""One global order of samples, whatever the lanes are: nothing is lost or doubled, across changes of plan too."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import hdtensor as hd
from hdtensor.errors import PlanError
from hdtensor.pipeline import LaneSampler


SHARES = st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any)


def lanes_of(num, batch_size, shares, seed):
    return [
        LaneSampler(num, batch_size=batch_size, shares=shares, lane=lane, seed=seed)
        for lane in range(len(shares))
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 50),
    st.lists(st.tuples(SHARES, st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(0, 2**40),
)
def test_no_sample_is_lost_or_doubled_by_changes_of_plan(num, plans, seed):
    whole = LaneSampler(num, batch_size=1, seed=seed)
    order = [i for batch in whole for i in batch]
    assert sorted(order) == list(range(num))

    taken, state = [], None
    for shares, batch_size, num_steps in [
        *plans,
        ([2, 1], 4, num),
    ]:  # the last one makes the epoch's rest
        lanes = lanes_of(num, batch_size, shares, seed)
        if state is not None:
            for lane in lanes:
                lane.load_state_dict(state)
            if state["position"] == num:
                break
        steps = [iter(lane) for lane in lanes]
        for _ in range(min(num_steps, len(lanes[0]))):
            taken += [i for step in steps for i in next(step)]
        states = [lane.state_dict() for lane in lanes]
        assert all(found == states[0] for found in states)
        state = states[0]
    assert taken == order


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 9), SHARES, st.data())
def test_the_state_of_steps_that_were_made_forgets_what_was_drawn_ahead(
    num, batch_size, shares, data
):
    ahead = lanes_of(num, batch_size, shares, 3)[0]
    made = data.draw(st.integers(0, len(ahead)))
    drawn = data.draw(st.integers(made, len(ahead)))
    steps = iter(ahead)
    batches = [next(steps) for _ in range(drawn)]
    later = lanes_of(num, batch_size, shares, 0)[0]
    later.load_state_dict(ahead.state_dict(made))
    again = iter(later) if made < -(-num // batch_size) else iter(())
    assert [next(again) for _ in range(drawn - made)] == batches[made:]
    with pytest.raises(PlanError, match="num_steps"):
        ahead.state_dict(drawn + 1)


def test_epochs_have_orders_of_their_own_and_begin_by_themselves():
    sampler = LaneSampler(20, batch_size=6, seed=5)
    first, second = list(sampler), list(sampler)
    assert (len(first), sampler.epoch) == (4, 1)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(LaneSampler(20, batch_size=6, seed=6)) != first


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_deals_what_a_step_would_take_of_the_whole_batch(num_workers):
    data = torch.arange(22.0)
    inputs = hd.HDSpec.from_text("S0[3:2] / 0,1:R 2:R")
    whole = torch.utils.data.DataLoader(data, batch_sampler=LaneSampler(22, batch_size=8, seed=1))
    lanes = [
        torch.utils.data.DataLoader(
            data,
            batch_sampler=LaneSampler(22, batch_size=8, shares=inputs, lane=lane, seed=1),
            num_workers=num_workers,
        )
        for lane in (0, 1)
    ]
    found = [torch.cat(parts) for parts in zip(*lanes, strict=True)]
    assert [len(batch) for batch in found] == [8, 8, 6]
    for batch, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(batch, expected, rtol=0, atol=0)


def test_wrong_arguments_are_refused():
    with pytest.raises(PlanError, match="batch_size"):
        LaneSampler(4, batch_size=0)
    with pytest.raises(PlanError, match="none of the 2 lanes"):
        LaneSampler(4, batch_size=2, shares=(1, 1), lane=2)
    with pytest.raises(PlanError, match="shares"):
        LaneSampler(4, batch_size=2, shares=(0, 0))
    with pytest.raises(PlanError, match="of 5 samples, this sampler has 4"):
        LaneSampler(4, batch_size=2).load_state_dict(LaneSampler(5, batch_size=2).state_dict())
