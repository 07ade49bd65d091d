"""Cost models: parts that add up, known lines found again, and the roofline where nothing was measured."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from hdtensor.errors import PlannerError
from hdtensor.planner.calibrate import calibrate
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.collective_times import all_reduce_seconds, gather_seconds
from hdtensor.planner.costs import LayerSpan, StageGroup
from hdtensor.planner.library import DEVICES
from hdtensor.planner.models import MODELS
from hdtensor.planner.profile_lines import unit_operations
from hdtensor.planner.profiled import ProfiledCosts, RuntimeConstants
from hdtensor.planner.profiles import Profile, TransferTime, UnitSize, UnitTime
from hdtensor.planner.regression import fit_line, held_out_errors
from hdtensor.planner.roofline import Efficiency, RooflineCosts
from hdtensor.planner.simulate import step_seconds
from hdtensor.planner.unit_sizes import span_parameters, unit_parameters, unit_work
from hdtensor.planner.workload import Workload
from tests.planner.costs import lane, strategy


NVLINK, NETWORK = Link(200e9, 5e-6), Link(25e9, 1e-5)
H800, H20 = DEVICES["H800"], DEVICES["H20"]
LLAMA = MODELS["llama-7B"]
UNITS = ("embedding", "layer", "head")


def roofline(model=LLAMA, **others):
    work = {"batch": 64, "context": 4096} | others
    return RooflineCosts(model=model, workload=Workload(**work))


def group(device=H800, tp=4, cp=1):
    return StageGroup(device, NVLINK, tp, cp)


@pytest.mark.parametrize("name", MODELS)
def test_one_ranks_parameters_are_the_models(name):
    """But for the router of dense first layers, which a mean layer has too."""
    model = MODELS[name]
    whole = span_parameters(model, LayerSpan(model.num_layers, True, True), 1)
    router = model.num_dense_layers * model.hidden * model.num_experts
    assert whole == pytest.approx(model.num_parameters + router, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-70B", "mixtral-8x7B", "deepseek-v3"])
def test_ranks_of_a_degree_hold_each_parameter_once_or_more(name):
    model = MODELS[name]
    for tp in (2, 8, 16):
        copies = tp * unit_parameters(model, "layer", tp) / unit_parameters(model, "layer", 1)
        assert 1 <= copies < 1.2


def test_work_of_a_llama_layer_by_hand():
    """h 4096, f 11008: 2 T (4 h^2 + 3 h f) operations, and 2 T C h of attention under the diagonal."""
    work = unit_work(LLAMA, "layer", 1, 4096, 4096)
    assert work.matmul == 2 * 4096 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert work.attention == 2 * 4096 * 4096 * 4096
    quarter = unit_work(LLAMA, "layer", 4, 4096, 4096)
    assert (quarter.matmul, quarter.attention) == (work.matmul / 4, work.attention / 4)


@pytest.mark.paper("Tables 9, 12")
@pytest.mark.parametrize(
    ("name", "tp", "least", "most"), [("llama-32B", 4, 3.17, 3.30), ("llama-70B", 8, 2.56, 2.73)]
)
def test_datasheets_give_the_ratio_of_speeds_behind_the_papers_splits(name, tp, least, most):
    """Its splits of layers follow from ratios within 3.17-3.30 (tp 4) and 2.56-2.70 (tp 8) of H20 to H800."""
    costs = roofline(MODELS[name])
    slow, fast = (
        sum(costs.seconds("layer", StageGroup(d, Link(d.link_bandwidth, 1e-5), tp), 1))
        for d in (H20, H800)
    )
    assert least <= slow / fast <= most


@pytest.mark.parametrize(
    ("name", "least", "most"), [("A100-80", 220, 260), ("H800", 600, 720), ("H20", 125, 142)]
)
def test_large_matrix_products_reach_what_is_measured_on_such_devices(name, least, most):
    """TFLOPS of a layer's matrix products in bfloat16, as public benchmarks of large ones find them."""
    device = DEVICES[name]
    parts = roofline().terms("layer", StageGroup(device, NVLINK, 1), 1)
    work = unit_work(LLAMA, "layer", 1, 4096, 4096)
    share = work.matmul / (work.matmul + work.attention)
    seconds = parts["matrix products"].forward + share * parts["operands"].forward
    assert least <= work.matmul / seconds / 1e12 <= most


def test_rings_by_hand():
    link = Link(bandwidth=1e9, latency=1e-3)
    assert gather_seconds(8e9, 8, link) == pytest.approx(7 * (1.0 + 1e-3))
    assert all_reduce_seconds(8e9, 8, link) == pytest.approx(14 * (1.0 + 1e-3))
    assert all_reduce_seconds(8e9, 1, link) == 0


@pytest.mark.parametrize(
    ("unit", "device", "tp", "cp"),
    list(itertools.product(UNITS, (H800, H20), (1, 8), (1, 2))),
)
def test_terms_add_up_to_the_seconds(unit, device, tp, cp):
    for recompute in ("none", "full"):
        costs = roofline(recompute=recompute)
        parts = costs.terms(unit, group(device, tp, cp), 2)
        whole = costs.seconds(unit, group(device, tp, cp), 2)
        assert whole.forward == pytest.approx(sum(part.forward for part in parts.values()))
        assert whole.backward == pytest.approx(sum(part.backward for part in parts.values()))
        assert ("computed again" in parts) == (recompute == "full" and unit == "layer")
        assert ("all-reduces of tensor parallelism" in parts) == (tp > 1)


def test_computing_again_costs_one_forward_and_keeps_the_input_only():
    plain, again = roofline(), roofline(recompute="full")
    one, other = (costs.seconds("layer", group(), 1) for costs in (plain, again))
    assert other.backward == pytest.approx(one.backward + one.forward)
    kept, input_only = (
        costs.memory(group(), LayerSpan(10), 1).activation for costs in (plain, again)
    )
    assert input_only == 10 * 4096 * 4096 / 4 * 2
    assert kept > 8 * input_only


def test_memory_of_a_stage_by_hand():
    """bfloat16 parameters and gradients, 12 bytes of Adam and master for each parameter."""
    memory = roofline().memory(group(tp=1), LayerSpan(2), 1)
    parameters = 2 * LLAMA.layer_parameters
    assert (memory.parameters, memory.gradients) == (2 * parameters, 2 * parameters)
    assert memory.optimizer == 12 * parameters
    plain = roofline(precision="float32", optimizer="sgd")
    device = group(DEVICES["A100-40"], 1)
    assert plain.memory(device, LayerSpan(2), 1).optimizer == 0


@given(tp=st.sampled_from([1, 2, 4, 8]), mbs=st.integers(1, 8), device=st.sampled_from([H800, H20]))
@settings(max_examples=40, deadline=None)
def test_more_work_takes_longer_and_more_ranks_compute_less(tp, mbs, device):
    costs = roofline()
    here = costs.seconds("layer", group(device, tp), mbs)
    assert costs.seconds("layer", group(device, tp), mbs + 1).forward > here.forward
    alone = replace(costs, efficiency=Efficiency(link=1e6))  # links beside nothing
    fast = StageGroup(device, Link(1e18, 0.0), tp)
    wide = StageGroup(device, Link(1e18, 0.0), 2 * tp)
    assert alone.seconds("layer", wide, mbs).forward < alone.seconds("layer", fast, mbs).forward


def test_unlike_degrees_synchronize_as_the_largest_part_takes():
    costs = roofline()
    both = costs.synchronize((group(tp=8), group(tp=2)), LayerSpan(4), NETWORK)
    assert both == costs.synchronize((group(tp=2), group(tp=2)), LayerSpan(4), NETWORK)
    assert costs.synchronize((group(tp=8),), LayerSpan(4), NETWORK) == 0


@pytest.mark.parametrize(
    ("others", "message"),
    [({"precision": "float8"}, "precision: "), ({"optimizer": "lion"}, "optimizer: ")],
)
def test_unknown_words_are_refused(others, message):
    with pytest.raises(PlannerError, match=message):
        roofline(**others)


def profile(rate, fixed, tps=(1, 2, 4), batches=(1, 2, 4, 8), has_collectives=False, **others):
    """Return a profile whose layer takes ``fixed + rate * mbs / tp`` forward, and twice that backward."""
    units = [
        UnitTime("layer", tp, mbs, 4096, fixed + rate * mbs / tp, 2 * (fixed + rate * mbs / tp))
        for tp in tps
        for mbs in batches
    ]
    return Profile(
        device="H800",
        model=LLAMA,
        precision="bfloat16",
        units=tuple(units),
        has_collectives=has_collectives,
        **others,
    )


def profiled(found, **others):
    return ProfiledCosts(roofline=roofline(), profiles={"H800": found}, **others)


def test_the_line_of_a_profile_is_found_again_and_goes_on():
    costs = profiled(profile(rate=0.1, fixed=0.02, has_collectives=True))
    for tp, mbs in ((1, 3), (2, 16), (4, 1)):
        whole = costs.seconds("layer", group(tp=tp), mbs)
        assert whole.forward == pytest.approx(0.02 + 0.1 * mbs / tp, rel=1e-6)
        assert whole.backward == pytest.approx(2 * whole.forward, rel=1e-6)
    assert costs.held_out()["H800"] < 1e-6


def test_another_degree_is_what_divides_and_what_a_ring_sends():
    """Work of 0.1 / t s and a ring of 0.04 (t - 1) / t s a sample, seen at 1, 2 and 4, hold at 8 too."""
    units = [
        UnitTime("layer", t, mbs, 4096, *[mbs * (0.1 + 0.04 * (t - 1)) / t] * 2)
        for t in (1, 2, 4)
        for mbs in (1, 4)
    ]
    costs = profiled(replace(profile(1, 1), units=tuple(units), has_collectives=True))
    whole = costs.seconds("layer", group(tp=8), 2)
    assert whole.forward == pytest.approx(2 * (0.1 + 0.04 * 7) / 8, rel=1e-6)


def test_collectives_that_a_profile_lacks_are_added():
    """By measured all-reduces where there are some: 1 ms and 1 ns for each 10 bytes; else by the roofline's."""
    transfers = tuple(
        TransferTime("all_reduce", 4, size, 1e-3 + size * 1e-10) for size in (1 << 20, 1 << 24)
    )
    plain = profiled(profile(0.1, 0.02)).seconds("layer", group(), 1)
    ring = roofline().tensor_parallel_seconds("layer", group(), 4096)
    assert plain.forward == pytest.approx(0.02 + 0.1 / 4 + ring)
    measured = profiled(profile(0.1, 0.02, transfers=transfers)).seconds("layer", group(), 1)
    num_bytes = 4096 * 4096 * 2
    wanted = 0.02 + 0.1 / 4 + 2 * (1e-3 + num_bytes * 1e-10)
    assert measured.forward == pytest.approx(wanted, rel=1e-6)


def test_attention_and_mlp_together_are_a_layer():
    halves = [
        UnitTime(unit, 1, mbs, 4096, share * mbs, 2 * share * mbs)
        for unit, share in (("attention", 0.01), ("mlp", 0.03))
        for mbs in (1, 2)
    ]
    costs = profiled(replace(profile(1, 1), units=tuple(halves)))
    assert costs.seconds("layer", group(tp=1), 4).forward == pytest.approx(0.16)


def test_a_measurement_counts_as_much_as_smoothing_says():
    odd = (UnitTime("layer", 1, 1, 4096, 0.5, 0.5), UnitTime("layer", 1, 8, 4096, 0.8, 0.8))
    found = profile(0.1, 0.0, tps=(1,))
    found = replace(found, units=(*found.units[1:3], *odd))
    line = profiled(found, smoothing=1.0).seconds("layer", group(tp=1), 1).forward
    assert line != pytest.approx(0.5)
    assert profiled(found, smoothing=0.0).seconds("layer", group(tp=1), 1).forward == 0.5
    half = profiled(found, smoothing=0.5).seconds("layer", group(tp=1), 1).forward
    assert half == pytest.approx((line + 0.5) / 2)


def test_what_was_not_measured_is_the_rooflines():
    costs = profiled(profile(0.1, 0.02))
    for unit, where in (("head", group()), ("layer", group(H20))):
        assert costs.seconds(unit, where, 2) == roofline().seconds(unit, where, 2)
    span = LayerSpan(3, is_first=True)
    assert costs.update(group(), span, 2) == roofline().update(group(), span, 2)
    assert costs.memory(group(), span, 2) == roofline().memory(group(), span, 2)


def test_measured_sizes_and_updates_count():
    sizes = tuple(UnitSize(unit, 4, 2048, 1000, 70, 5) for unit in UNITS)
    found = profile(0.1, 0.02, sizes=sizes)
    found = replace(found, units=tuple(unit._replace(update=0.25) for unit in found.units))
    constants = RuntimeConstants(reserved_bytes={"H800": 5e9}, workspace=0.5)
    costs = profiled(found, constants=constants)
    memory = costs.memory(group(), LayerSpan(3), 2)
    assert (memory.parameters, memory.gradients) == (3000, 3000)
    assert memory.optimizer == 3000 / 2 * 12
    assert memory.activation == 3 * 70 * 2 * 4096 / 2048
    plain = roofline().memory(group(), LayerSpan(3), 2)
    states = 3000 + 3000 + 18000
    wanted = plain.buffers - roofline().reserved_bytes + 5e9 + 0.5 * states
    assert memory.buffers == pytest.approx(wanted)
    assert costs.update(group(), LayerSpan(3), 2) == pytest.approx(3 * 0.25 / 2)  # ZeRO 1


def test_messages_have_the_constant_of_the_runtime():
    costs = profiled(profile(0.1, 0.02), constants=RuntimeConstants(message=0.125))
    plain = roofline().message(group(), group(H20), NETWORK, 1)
    assert costs.message(group(), group(H20), NETWORK, 1) == plain + 0.125


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "float32"}, "precision: the profile of H800 is of float32"),
        ({"model": MODELS["llama-13B"]}, "model: the profile of H800 is of a model with hidden"),
    ],
)
def test_profiles_of_something_else_are_refused(change, message):
    with pytest.raises(PlannerError, match=message):
        profiled(replace(profile(0.1, 0.02), **change))


@given(fixed=st.floats(0, 1), slope=st.floats(1e-6, 1), noise=st.floats(0, 0.1))
@settings(max_examples=60, deadline=None)
def test_lines_are_found_and_never_negative(fixed, slope, noise):
    works = [1.0, 2.0, 4.0, 8.0, 16.0]
    exact = [fixed + slope * work for work in works]
    line = fit_line(works, exact)
    assert all(
        line.at(work) == pytest.approx(truth, rel=1e-6)
        for work, truth in zip(works, exact, strict=True)
    )
    noisy = [t * (1 + noise * (-1) ** i) for i, t in enumerate(exact)]
    found = fit_line(works, noisy)
    assert found.fixed >= 0
    assert found.per_work >= 0
    assert all(abs(error) <= 4 * noise + 1e-6 for error in held_out_errors(works, noisy)[1:-1])


def test_held_out_errors_by_hand():
    """The line through the other two points is 1 s a unit; the third one is half above it."""
    errors = held_out_errors([1.0, 2.0, 3.0], [1.0, 2.0, 4.5])
    assert errors[2] == pytest.approx(3.0 / 4.5 - 1)
    assert held_out_errors([1.0, 2.0], [1.0, 2.0]) == []


def test_operations_are_of_the_whole_unit():
    assert unit_operations(LLAMA, "embedding", 4096, 4096) == 4096
    work = unit_work(LLAMA, "layer", 1, 4096, 4096)
    assert unit_operations(LLAMA, "layer", 4096, 4096) == work.matmul + work.attention


NODES = Cluster(
    nodes=(
        Node(device=H800, num_devices=8, inside=NVLINK),
        Node(device=H20, num_devices=8, inside=NVLINK),
    ),
    between=NETWORK,
)


@pytest.mark.parametrize(
    "costs", [roofline(), profiled(profile(0.01, 0.002))], ids=["roofline", "profiled"]
)
def test_one_measured_step_scales_all_computing(costs):
    plan = strategy(
        lane((range(4), 20), (range(8, 12), 12), count=40),
        lane((range(4, 8), 20), (range(12, 16), 12), count=24),
    )
    before = step_seconds(plan, NODES, costs, costs.workload)
    for measured in (0.7 * before, 3 * before):
        after = calibrate(costs, plan, NODES, measured)
        assert step_seconds(plan, NODES, after, costs.workload) == pytest.approx(measured, rel=1e-5)
        factors = set(after.slowness.values())
        assert len(factors) == 1
        assert (min(factors) > 1) == (measured > before)


@pytest.mark.parametrize("measured", [0.0, -1.0, 1e-6, float("nan")])
def test_impossible_steps_are_refused(measured):
    costs = roofline()
    plan = strategy(lane((range(8), 16), (range(8, 16), 16), count=64))
    with pytest.raises(PlannerError, match="seconds: "):
        calibrate(costs, plan, NODES, measured)
