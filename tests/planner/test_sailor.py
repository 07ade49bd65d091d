"""Sailor's files: what is read, plans written and read back, and malformed values."""

import copy
import json
import random
from pathlib import Path

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Link
from hdtensor.planner.costs import LayerSpan, StageGroup
from hdtensor.planner.library import DEVICES
from hdtensor.planner.profiles import Profile
from hdtensor.planner.sailor import read_fit, read_node, read_profile, read_training
from hdtensor.planner.sailor_files import SailorFolder
from hdtensor.planner.sailor_plans import plan_cluster, plan_strategy, read_plan, write_plan
from hdtensor.planner.workload import Workload
from tests.planner.costs import FAST, cluster, lane, strategy


FOLDER = SailorFolder(Path(__file__).parents[2] / "benchmarks" / "data" / "sailor")


def raw(name):
    return json.loads((FOLDER.path / name).read_text())


TIMES, SIZES = raw("profiles_all.json"), raw("llm_info.json")
PLANS = {path.stem: json.loads(path.read_text()) for path in (FOLDER.path / "measured").iterdir()}
MIXED = PLANS["mit_N4_plan_config_N4_D2"]


def test_a_profile_has_the_means_of_its_layers():
    found = read_profile("OPT-350", "RTX-2080", TIMES["OPT-350"]["RTX-2080"], SIZES["OPT-350"])
    assert (found.device, found.precision, found.has_collectives) == ("RTX-2080", "float32", True)
    layer = next(u for u in found.units if (u.unit, u.tp, u.mbs) == ("layer", 8, 16))
    rows = TIMES["OPT-350"]["RTX-2080"]["16"]["8"]
    assert layer.forward == pytest.approx(sum(rows[str(i)][0] for i in range(1, 25)) / 24)
    head = next(u for u in found.units if (u.unit, u.tp, u.mbs) == ("head", 8, 16))
    assert [head.forward, head.backward, head.update] == rows["25"]
    size = next(s for s in found.sizes if (s.unit, s.tp) == ("layer", 8))
    assert size.parameter_bytes == SIZES["OPT-350"]["8"]["1"]["params_bytes"]
    assert Profile.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_updates_of_zero_were_not_measured():
    found = read_profile("GPT-Neo-2.7", "A100-80", TIMES["GPT-Neo-2.7"]["A100-80"])
    assert all(unit.update is None for unit in found.units)
    work = Workload(batch=8, context=2048, precision="float32", zero=0)
    costs = FOLDER.costs("GPT-Neo-2.7", work)
    group = StageGroup(DEVICES["A100-80"], Link(1e11, 0.0), 2)
    span = LayerSpan(4)
    assert costs.update(group, span, 1) == costs.roofline.update(group, span, 1) > 0


def test_profiles_predict_what_was_left_out_of_them():
    for model, most in (("OPT-350", 0.12), ("GPT-Neo-2.7", 0.13)):
        work = Workload(batch=8, context=2048, precision="float32", zero=0)
        errors = FOLDER.costs(model, work).held_out()
        assert set(errors) == set(FOLDER.profiles(model))
        assert max(errors.values()) < most


def test_a_fit_of_bandwidth_becomes_bandwidth_and_latency():
    """Its seconds, from 2 to 256 MB, are met within a quarter."""
    for kind in ("inter", "intra"):
        for device, fits in raw("network_coeffs_all_homo.json")[kind].items():
            for fit in fits.values():
                (a, b, c), _ = fit
                link = read_fit(device, fit)
                for x in range(1, 9):
                    rate = (a * x + b) * x + c
                    seconds = 2**x * 1e6 / (rate * 1e9)
                    found = 2**x * 1e6 / link.bandwidth + link.latency
                    assert found == pytest.approx(seconds, rel=0.25), (device, x)


def test_devices_of_a_node_share_what_they_reach_together():
    node, alone = read_node("RTX-3090", 8, FOLDER.network)
    assert node.uplink == pytest.approx(115e6, rel=0.02)
    assert alone.bandwidth == pytest.approx(node.uplink, rel=0.02)
    node, alone = read_node("GH-96", 4, FOLDER.network)
    assert node.device.name == "GH200"
    assert node.uplink == pytest.approx(4 * alone.bandwidth, rel=0.02)


def test_training_configurations_are_workloads():
    model, work = read_training(raw("training_config_opt_350.json"))
    assert (model.num_layers, work.batch, work.context, work.optimizer) == (24, 1024, 2048, "adam")
    assert (work.precision, work.zero) == ("float32", 0)


def test_whole_nodes_make_a_cluster():
    nodes = FOLDER.cluster({"A100-40": 32, "V100-16": 96})
    assert nodes.num_ranks == 128
    assert [node.num_devices for node in nodes.nodes] == [4] * 32
    slow = nodes.link_between(nodes.nodes[0], nodes.nodes[-1])
    assert slow == nodes.link_between(nodes.nodes[-1], nodes.nodes[-2])
    with pytest.raises(PlannerError, match="nodes: 30 A100-40 are no whole number of nodes of 4"):
        FOLDER.cluster({"A100-40": 30})


def test_a_measured_plan_by_hand():
    """Two lanes of two stages; 26 layers with embedding and head, 256 samples in micro-batches of 2."""
    plan = read_plan(MIXED, 24)
    assert (plan.num_lanes, plan.seconds, plan.memory_bytes) == (2, 66.06712, 6818889728)
    assert [[n for n, _ in stages] for stages in plan.lanes()] == [[11, 13], [11, 13]]
    assert [[r.device for _, r in stages] for stages in plan.lanes()] == [
        ["RTX-3090", "Titan-RTX"],
        ["RTX-2080", "RTX-2080"],
    ]
    nodes = plan_cluster(plan, FOLDER.devices_per_node, FOLDER.network)
    found = plan_strategy(plan, nodes)
    assert {(each.num_microbatches, each.mbs) for each in found.lanes} == {(64, 2)}
    assert {rank for each in found.lanes for s in each.stages for rank in s.ranks} == set(range(32))


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_written_as_they_were_read(name):
    plan = read_plan(PLANS[name], 32 if "NEO" in name else 24)
    nodes = plan_cluster(plan, FOLDER.devices_per_node, FOLDER.network)
    written = write_plan(plan_strategy(plan, nodes), nodes)
    for key in ("mbs", "gbs", "zone"):
        assert written[key] == PLANS[name][key]
    (mine,), (theirs,) = written["pipeline_list"], PLANS[name]["pipeline_list"]
    assert (mine["num_stages"], mine["dp"]) == (theirs["num_stages"], theirs["dp"])
    assert mine["tmp_per_stage"] == theirs["tmp_per_stage"]
    numbers = [n for stage in mine["layers_per_stage"] for n in stage]
    assert numbers == list(range(len(numbers)))
    assert list(map(len, mine["layers_per_stage"])) == list(map(len, theirs["layers_per_stage"]))


def test_lanes_cut_in_other_layers_are_other_pipelines():
    nodes = cluster((FAST, 4))
    plan = strategy(
        lane(([0], 2), ([1], 1), count=3),
        lane(([2], 1), ([3], 2), count=3),
    )
    written = write_plan(plan, nodes)
    assert [p["layers_per_stage"] for p in written["pipeline_list"]] == [
        [[0, 1, 2], [3, 4]],
        [[0, 1], [2, 3, 4]],
    ]
    assert read_plan(written, 3).num_lanes == 2
    uneven = strategy(lane(([0], 3), count=3), lane(([1], 3), count=2))
    with pytest.raises(PlannerError, match="lanes: Sailor's files have equal micro-batches"):
        write_plan(uneven, nodes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.pop("mbs"), "mbs: "),
        (lambda plan: plan.update(gbs=255), "gbs: 255 samples are no equal shares of 2 lanes"),
        (lambda plan: plan.update(pipeline_list=[]), "pipeline_list: "),
        (
            lambda plan: plan["pipeline_list"][0]["layers_per_stage"][0].clear(),
            r"pipeline_list\[0\].tmp_per_stage: ",
        ),
        (
            lambda plan: plan["pipeline_list"][0]["layers_per_stage"][0].extend([0] * 7),
            r"pipeline_list\[0\].layers_per_stage: there are 33 layers",
        ),
        (
            lambda plan: plan["pipeline_list"][0]["tmp_per_stage"][0].pop(),
            "every stage must have as many replicas",
        ),
        (
            lambda plan: plan["pipeline_list"][0]["tmp_per_stage"][1][0].__setitem__(1, 4),
            r"tmp_per_stage\[1\]\[0\]: tp is 4, but there are 8 devices",
        ),
    ],
)
def test_malformed_plans_name_the_field(change, message):
    plan = copy.deepcopy(MIXED)
    change(plan)
    with pytest.raises(PlannerError, match=message):
        read_plan(plan, 24)


def mutate(value, rng):
    """Return JSON values of which one place is something else."""
    odd = [None, -1, 0, 1e300, float("nan"), "", "x", [], {}, [[]], True, 10**30, "0", "-5"]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.2:
            return {**value, rng.choice(["?", "0", "1e9", "²"]): value[key]}
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.15:
            return value[:at] + value[at + 1 :]
        return [*value[:at], mutate(value[at], rng), *value[at + 1 :]]
    return rng.choice(odd)


@pytest.mark.parametrize("what", ["plan", "profile", "fit", "training"])
def test_mutated_files_are_read_or_refused(what):
    """Hundreds of each: our error, or values with which everything else goes on."""
    rng = random.Random(what)
    times = {"4": {"8": TIMES["OPT-350"]["RTX-2080"]["4"]["8"]}}
    sizes = {"8": SIZES["OPT-350"]["8"]}
    messages = []
    for _ in range(400):
        try:
            if what == "plan":
                plan = read_plan(mutate(MIXED, rng), 24)
                nodes = plan_cluster(plan, FOLDER.devices_per_node, FOLDER.network)
                write_plan(plan_strategy(plan, nodes), nodes)
            elif what == "profile":
                read_profile("OPT-350", "RTX-2080", mutate(times, rng), mutate(sizes, rng))
            elif what == "fit":
                read_node("Titan-RTX", 8, mutate(FOLDER.network, rng))
            else:
                read_training(mutate(raw("training_config_opt_350.json"), rng))
        except PlannerError as error:
            messages.append(str(error))
    assert len(messages) > 40
    assert all(": " in message for message in messages)
