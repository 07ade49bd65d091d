"""What the search takes for granted of cost models, and that its bound holds where models have unlike layers."""

import dataclasses
import itertools

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.bounds import lower_bound
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.costs import LayerSpan, StageGroup
from hdtensor.planner.library import DEVICES
from hdtensor.planner.models import shape_of_config
from hdtensor.planner.planning import make_costs
from hdtensor.planner.profile import ProfileOptions, profile
from hdtensor.planner.search import search
from hdtensor.planner.space import SearchOptions, make_space
from hdtensor.planner.workload import Workload
from tests.planner.test_inputs import EXPERTS, MLA, SMALL
from tests.planner.test_search import best_by_force


SIZES = {**SMALL, "num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 4096}
MODELS = {
    "plain": {"model_type": "llama", **SIZES, "intermediate_size": 1024},
    "tied": {"model_type": "llama", **SIZES, "intermediate_size": 1024, "tie_word_embeddings": True},
    "dense first": {"model_type": "deepseek_v3", **SIZES, **MLA, **EXPERTS, "n_shared_experts": 1,
                    "first_k_dense_replace": 1, "intermediate_size": 4096},
}  # fmt: skip
GROUPS = [
    StageGroup(DEVICES[name], Link(1e11, 5e-6), tp) for name in ("A100-40", "V100-16") for tp in (1, 2, 4)
]  # fmt: skip
LINKS = [Link(1e11, 5e-6), Link(1e10, 1e-5)]


def costs_of(name, **fields):
    work = Workload(batch=4, context=256, precision="float16", **fields)
    return make_costs(
        shape_of_config(MODELS[name], name=name), work, Cluster(nodes=NODES, between=LINKS[1])
    )


NODES = (
    Node(device=DEVICES["A100-40"], num_devices=2, inside=LINKS[0]),
    Node(device=DEVICES["V100-16"], num_devices=2, inside=LINKS[0]),
)


def profiled():
    model = shape_of_config({**MODELS["plain"], "hidden_size": 64, "vocab_size": 96}, name="small")
    few = ProfileOptions(
        tps=(1, 2, 4), batch_sizes=(1, 2), contexts=(16,), precision="fp32", num_ranks=()
    )
    measured = profile(model, few)
    work = Workload(batch=4, context=16, precision="float32", zero=1)
    node = Node(device=DEVICES["CPU"], num_devices=4, inside=LINKS[0])
    return make_costs(model, work, Cluster(nodes=(node,), between=LINKS[1]), [measured])


CASES = [
    (name, {"zero": zero, "recompute": again})
    for name in MODELS
    for zero in (0, 1)
    for again in ("none", "full")
]


@pytest.mark.parametrize(("name", "fields"), [*CASES, ("profiled", {})])
def test_cost_models_keep_their_contract(name, fields):
    costs = profiled() if name == "profiled" else costs_of(name, **fields)
    groups = (
        [StageGroup(DEVICES["CPU"], LINKS[0], tp) for tp in (1, 2, 4)]
        if name == "profiled"
        else GROUPS
    )
    for group in groups:
        for mbs in (1, 2):
            one, two, five, first, last, both, more = (
                costs.memory(group, span, mbs)
                for span in (
                    LayerSpan(1), LayerSpan(2), LayerSpan(5), LayerSpan(1, is_first=True),
                    LayerSpan(1, is_last=True), LayerSpan(1, is_first=True, is_last=True),
                    LayerSpan(5, is_first=True),
                )
            )  # fmt: skip
            for field in one._fields:
                a, b, c, f, h, fh, g = (
                    getattr(x, field) for x in (one, two, five, first, last, both, more)
                )
                assert a >= 0, field
                assert c == pytest.approx(a + 4 * (b - a)), field
                assert g == pytest.approx(c + f - a), field
                assert max(f, h) <= fh * (1 + 1e-9), field
                assert fh <= (f + h - a) * (1 + 1e-9), field
            for unit in ("embedding", "layer", "head"):
                seconds = costs.seconds(unit, group, mbs)
                assert min(seconds) >= 0
                parts = costs.terms(unit, group, mbs).values()
                assert sum(map(sum, parts)) == pytest.approx(sum(seconds))
        assert costs.update(group, LayerSpan(3), 2) > costs.update(group, LayerSpan(1), 2) > 0
    slack = 1 + 1e-9
    for one, other in itertools.product(groups, repeat=2):
        for link in LINKS:
            whole = costs.synchronize((one, other), LayerSpan(4, is_first=True), link)
            cut = [LayerSpan(3), LayerSpan(1, is_first=True)]
            parts = [costs.synchronize((one, other), span, link) for span in cut]
            assert sum(parts) * slack >= whole >= max(parts)
            for like in (one, other):
                assert whole * slack >= costs.synchronize(
                    (like, like), LayerSpan(4, is_first=True), LINKS[0]
                )
            assert costs.synchronize((one, other, one), LayerSpan(4, is_first=True), link) >= whole


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("room", [1.0, 0.55, 0.4])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "GPipe"])
def test_the_bound_holds_for_tied_heads_and_unlike_layers(name, room, schedule):
    """Devices hold all of the model, or about half of it; or less, with which few strategies or none fit."""
    costs = costs_of(name, schedule=schedule)
    need = (
        sum(costs.memory(GROUPS[0], LayerSpan(4, is_first=True, is_last=True), 1))
        - costs.reserved_bytes
    )
    nodes = [
        Node(
            device=dataclasses.replace(
                each.device, memory_bytes=int(need * room + costs.reserved_bytes)
            ),
            num_devices=num,
            inside=each.inside,
        )
        for each, num in zip(NODES, (2, 1), strict=True)
    ]  # fmt: skip
    space = make_space(
        Cluster(nodes=tuple(nodes), between=LINKS[1]),
        costs,
        costs.workload,
        4,
        SearchOptions(tp_degrees=(1, 2), mbs=(1, 2), max_stages=3),
    )
    best = best_by_force(space)
    if best is None:
        assert room == 0.4
        with pytest.raises(PlannerError, match=r"^memory: no strategy fits"):
            search(space)
        return
    found = search(space)
    assert lower_bound(space).seconds <= best * (1 + 1e-9)
    assert best <= found.seconds * (1 + 1e-9)
    assert found.seconds <= best * 1.1
