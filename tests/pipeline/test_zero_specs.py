"""Which part of a parameter's optimizer state a rank keeps: balanced, within what it holds, one Split collective."""

import math

import pytest
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor.errors import PlanError
from hdtensor.pipeline.zero_specs import (
    Parameter,
    shares,
    split_copies,
    state_elements,
    zero_specs,
)
from hdtensor.placements import HDSpec, Subgroup, check_top_sizes, owned_boxes
from hdtensor.redistribute import resolve
from hdtensor.redistribute.steps import SplitAllGather, SplitReduceScatter


def spec_of(text, shape, **options):
    (spec,) = zero_specs([Parameter("x", HDSpec.from_text(text), shape)], **options).values()
    return str(spec)


@pytest.mark.paper("App. C")
@pytest.mark.parametrize(
    ("parameter", "shape", "state"),
    [
        ("R / 0,1:S0 2:R", (8, 6), "S1[2:1] / 0,1:S0 2:R"),  # a dim that no copy cuts
        ("R / 0,1:S1 2:R 3-6:S1", (14, 8), "S0[2:1:4] / 0,1:S1 2:R 3-6:S1"),
        ("R / 0,1:R 2:R", (6, 4), "S0[1:1:1] / 0:R 1:R 2:R"),  # copies inside a stage
        ("R / 0-3(2x2):R,S0 4:R", (8, 10), "S1[2:2:1] / 0,1:S0 2,3:S0 4:R"),
        ("R / 0,1:S0 2:R", (12,), "S0x2[2:1] / 0,1:S0 2:R"),  # each piece of the only dim
        ("R / 0,1:S0x3 2:R", (36,), "S0x6[2:1] / 0,1:S0x3 2:R"),  # a fused bias
        ("R / 0,1:S0 2:R", (5,), "S0[1:0] / 0,1:S0 2:R"),  # pieces that do not divide
        ("R / 0:R 1:R 2:R", (1,), "S0[1:0:0] / 0:R 1:R 2:R"),
        ("R / 0:R 1:R", (), "R / 0:R 1:R"),
        ("R / 0-3:S0", (8, 4), "R / 0-3:S0"),  # one lane: nothing to cut
        ("R / 0,1:S0 2,3:S0", (8, 4), "S1[1:1] / 0,1:S0 2,3:S0"),
        ("R / 0:R 1:R 2:R 3:R", (2, 12), "S1[1:1:1:1] / 0:R 1:R 2:R 3:R"),  # the dim that divides
    ],
)
def test_how_state_is_cut(parameter, shape, state):
    assert spec_of(parameter, shape) == state


def test_extents_follow_free_memory():
    assert spec_of("R / 0,1:S0 2:R", (8, 10), free_bytes={0: 400, 1: 900, 2: 200}) == (
        "S1[4:1] / 0,1:S0 2:R"
    )
    assert spec_of("R / 0:R 1:R", (8, 10), free_bytes={0: 0, 1: 5}) == "S0[0:1] / 0:R 1:R"


@pytest.mark.parametrize(
    ("free", "message"),
    [
        ({0: 1}, "rank 1 holds a part of 'x', but its free memory is not given"),
        ({0: 1, 1: -3}, "rank 1 holds a part of 'x', but its free memory is -3"),
        ({0: 0, 1: 0}, r"ranks \[0, 1\] hold 'x', and none has memory free"),
    ],
)
def test_free_memory_that_is_no_memory(free, message):
    with pytest.raises(PlanError, match=message):
        spec_of("R / 0:R 1:R", (8, 10), free_bytes=free)


def test_parts_left_over_go_to_whom_most_is_due():
    parameters = [Parameter(f"w{i}", HDSpec.from_text("R / 0:R 1:R 2:R"), (7, 4)) for i in range(3)]
    specs = zero_specs(parameters)
    assert len(set(specs.values())) == 3
    assert state_elements(specs, parameters) == {0: 28, 1: 28, 2: 28}


@st.composite
def plans(draw):
    """Parameters of lanes of unlike tp and unlike layer cuts, tied weights and biases among them."""
    num_layers = draw(st.integers(1, 4))
    first, lanes = 0, []
    for _ in range(draw(st.integers(1, 3))):
        cuts = (
            sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=2)))
            if num_layers > 1
            else []
        )
        stages = []
        for start, stop in zip([0, *cuts], [*cuts, num_layers], strict=True):
            tp, cp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2]))
            stages.append((range(start, stop), range(first, first + tp * cp), (cp, tp)))
            first += tp * cp
        lanes.append(stages)
    found = []
    shapes = {
        "up": (24, 36),
        "down": (36, 24),
        "norm": (31,),
        "bias": (24,),
        "odd": (25,),
        "scale": (),
    }
    roles = {"up": Shard(0), "down": Shard(1), "bias": Shard(0), "odd": Shard(0)}

    def group(stage, role):
        return Subgroup(stage[1], [Replicate(), role], stage[2])

    for layer in range(num_layers):
        for kind, shape in shapes.items():
            role = roles.get(kind, Replicate())
            groups = [group(s, role) for stages in lanes for s in stages if layer in s[0]]
            found.append(Parameter(f"{layer}.{kind}", HDSpec(groups), shape))
    ends = [
        group(s, Shard(0))
        for stages in lanes
        for s in {stages[0][1]: stages[0], stages[-1][1]: stages[-1]}.values()
    ]
    found.append(Parameter("tied", HDSpec(ends), (48, 30)))
    return found


@settings(max_examples=40, deadline=None)
@given(plans())
def test_no_rank_keeps_more_than_its_shares_and_a_few_parts(parameters):
    specs = zero_specs(parameters)
    kept, due = state_elements(specs, parameters), shares(parameters)
    largest = 48 * 3  # a row of what is cut finely, or a bias that is kept whole
    for rank in due:
        assert kept.get(rank, 0) <= due[rank] + largest
    for name, spec, shape in parameters:
        state, copies = specs[name], split_copies(spec)
        if len(copies.subgroups) == 1 or not shape:
            assert state is copies
            continue
        to, back = (
            resolve(copies.replace(top=Partial()), state, shape),
            resolve(state, copies, shape),
        )
        assert [type(step) for step in to.steps] == [SplitReduceScatter]
        assert [type(step) for step in back.steps] == [SplitAllGather]
        sizes = check_top_sizes(state, shape, None)
        elements = sum(
            box.numel for rank in state.ranks for box, _ in owned_boxes(state, shape, sizes, rank)
        )
        assert elements == math.prod(shape), "each element has one keeper"


@settings(max_examples=40, deadline=None)
@given(plans())
def test_copies_hold_what_the_parameter_does(parameters):
    for _, spec, shape in parameters:
        copies = split_copies(spec)
        for rank in spec.ranks:
            assert owned_boxes(copies, shape, None, rank) == owned_boxes(spec, shape, None, rank)
