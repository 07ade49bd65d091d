"""What a plan loses with its devices and nodes: as ``plan_switch`` and the cut of ZeRO's states say it."""

import itertools
import json
import random

import pytest

import hdtensor as hd
from hdtensor.pipeline.zero_specs import Parameter, zero_specs
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.copies import Lost, find_copies, find_lost
from hdtensor.planner.description import description_of
from hdtensor.planner.emit import Planned, emit
from hdtensor.planner.models import shape_of_config
from hdtensor.planner.page import page_html
from hdtensor.planner.planning import make_costs, predict
from hdtensor.planner.replan_command import replan_text
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.text_report import step_text
from hdtensor.planner.workload import Workload
from tests.planner.test_commands import run


CLUSTER = cluster_of_text("16x H800/4")
NUM_LAYERS = 6


def model(is_tied=False):
    config = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": NUM_LAYERS,
              "num_attention_heads": 8, "intermediate_size": 128, "tie_word_embeddings": is_tied}  # fmt: skip
    return shape_of_config(config, name="small")


def planned(lanes, zero=0, is_tied=False, cluster=CLUSTER):
    strategy = Strategy(tuple(LaneChoice(tuple(stages), 2, 1) for stages in lanes))
    return Planned(
        strategy, model(is_tied), cluster, Workload(batch=2 * len(lanes), context=32, zero=zero)
    )


def random_lanes(rng):
    """Return lanes of random stages on the first ranks of a random order of blocks of 4."""
    sizes = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
    ranks, lanes = list(range(16)), []
    if rng.random() < 0.5:
        rng.shuffle(ranks)
    for _ in range(rng.choice((1, 2, 2, 3))):
        num_stages = rng.choice((1, 2, 2, 3))
        cuts = [0, *sorted(rng.sample(range(1, NUM_LAYERS), num_stages - 1)), NUM_LAYERS]
        stages = []
        for first, end in itertools.pairwise(cuts):
            tp, cp = rng.choice(sizes)
            if tp * cp > len(ranks):
                return lanes or random_lanes(rng)
            mine, ranks = tuple(ranks[: tp * cp]), ranks[tp * cp :]
            stages.append(StageChoice(mine, end - first, tp, cp))
        lanes.append(stages)
    return lanes


def specs_of(plan):
    description = description_of(plan.model)
    return emit(plan).expand(description).tensors, description.shapes


def lost_tensors(specs, shapes, dead):
    """Return the tensors that ``plan_switch`` cannot bring to a rank that is left."""
    alive = next(rank for rank in range(17) if rank not in dead)
    lost = set()
    for name, spec in specs.items():
        try:
            hd.plan_switch({name: spec}, {name: f"R / {alive}:R"}, {name: shapes[name]}, exclude_ranks=sorted(dead))  # fmt: skip
        except hd.RedistributeError:
            lost.add(name)
    return lost


def tensors_of(lost, names):
    """Return the tensors that a value says are lost."""
    layers = {n for first, last in lost.layers for n in range(first, last + 1)}
    found = {name for name in names if any(f"layers.{n}." in name for n in layers)}
    if lost.embedding:
        found.add("model.embed_tokens.weight")
    if lost.head:  # a tied head is no tensor of its own
        found |= {"model.norm.weight", "lm_head.weight"} & set(names)
    return found


def one_of_each(names):
    """Return the tensors that stand for all: of a layer only a matrix, as norms have a copy on every rank."""
    return {name for name in names if "layers." not in name or name.endswith("up_proj.weight")}


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_is_lost_with_any_ranks_is_what_a_switch_cannot_restore(is_tied):
    rng = random.Random(int(is_tied))
    seen = set()
    for _ in range(40):
        plan = planned(random_lanes(rng), is_tied=is_tied)
        specs, shapes = specs_of(plan)
        specs = {name: specs[name] for name in one_of_each(specs)}
        deads = [{rng.randrange(16)}, set(CLUSTER.ranks_of(rng.randrange(4)))]
        deads.append(set(rng.sample(range(16), rng.choice((2, 6, 10, 14)))))
        for dead in deads:
            lost = find_lost(plan, dead)
            expected = lost_tensors(specs, shapes, dead)
            assert tensors_of(lost, specs) == expected
            assert lost.states == lost.has_weights == bool(expected)
            seen.add((bool(lost.layers), lost.embedding, lost.head))
    assert len(seen) >= 4


def test_single_devices_and_nodes_are_those_whose_loss_loses_something():
    rng = random.Random(3)
    num_found = 0
    for _ in range(40):
        plan = planned(random_lanes(rng))
        copies = find_copies(plan)
        devices = {rank: find_lost(plan, {rank}) for rank in range(16)}
        nodes = {node: find_lost(plan, CLUSTER.ranks_of(node)) for node in range(4)}
        assert copies.devices == {r: lost for r, lost in devices.items() if lost.has_weights}
        assert copies.nodes == {n: lost for n, lost in nodes.items() if lost.has_weights}
        num_found += bool(copies.nodes) + bool(copies.devices)
    assert 10 < num_found < 80


def test_with_zero_any_device_in_use_has_the_only_copy_of_some_states():
    rng = random.Random(4)
    for _ in range(5):
        plan = planned(random_lanes(rng), zero=1)
        specs, shapes = specs_of(plan)
        states = zero_specs([Parameter(name, spec, shapes[name]) for name, spec in specs.items()])
        used = {rank for lane in plan.strategy.lanes for s in lane.stages for rank in s.ranks}
        for rank in (min(used), max(used), *set(range(16)) - used):
            assert find_lost(plan, {rank}).states == bool(lost_tensors(states, shapes, {rank}))
        assert not find_copies(plan).to_dict()["any_device_may_die"]


#: Two lanes whose first stages share node 0 and whose last ones have a node each.
LANES = (
    (StageChoice((0, 1), 2, 2), StageChoice((4, 5, 6, 7), 4, 4)),
    (StageChoice((2, 3), 2, 2), StageChoice((8, 9, 10, 11), 4, 4)),
)


def summary_of(plan):
    return predict(plan, make_costs(plan.model, plan.workload, plan.cluster))


def test_a_summary_says_it_in_json_text_and_page():
    summary = summary_of(planned(LANES))
    value = json.loads(json.dumps(summary.to_dict()))["copies"]
    assert value == {
        "any_device_may_die": True,
        "any_node_may_die": False,
        "optimizer_states_have_copies": True,
        "only_on_device": [],
        "only_on_node": [{"node": 0, "embedding": True, "layers": [[0, 1]], "head": False}],
    }
    words = "weights and optimizer states have copies when any device dies; node 0 alone has the embedding, layers 0-1"
    assert f"\nafter a loss   {words}\n" in step_text(summary)
    assert words in page_html(summary)


def test_zero_and_single_lanes_are_said_not_to_survive_a_device():
    text = step_text(summary_of(planned(LANES, zero=1)))
    assert (
        "after a loss   optimizer states have no copies (ZeRO 1 keeps each part on one device): whichever dies"
        in text
    )
    assert "\n               weights have copies when any device dies; node 0 alone has" in text
    text = step_text(summary_of(planned(LANES[:1])))
    assert (
        "after a loss   there is one copy: whichever device dies, a checkpoint is needed\n" in text
    )
    # A copy by context parallelism on one stage, none of the other.
    lanes = [(StageChoice((0, 4), 2, 1, 2), StageChoice((8,), 4, 1))]
    text = step_text(summary_of(planned(lanes)))
    assert "rank 8 alone has layers 2-5, the head; node 2 alone has layers 2-5, the head\n" in text
    spread = [(StageChoice((0, 1), 6, 2),), (StageChoice((4, 5), 6, 2),)]
    text = step_text(summary_of(planned(spread)))
    assert "have copies when any device or any node dies\n" in text


def test_words():
    assert Lost(True, ((0, 5),), True, True).words(6) == "the embedding, all layers, the head"
    assert Lost(False, ((5, 5),), False, True).words(6) == "layer 5"


def test_a_replan_says_whether_a_checkpoint_is_needed(tmp_path, capsys):
    arguments = ["--model", "llama-7b", "--cluster", "4x 4x H800", "--batch", "16", "--context", "2048", "--tp", "4",
                 "--max-stages", "2", "--min-lanes", "2", "--max-lanes", "2"]  # fmt: skip
    for zero in ("0", "1"):
        path = str(tmp_path / f"{zero}.json")
        code, out, _ = run(capsys, "plan", *arguments, "--zero", zero, "--json", "-o", path)
        assert code == 0
        stages = json.loads(out)["stages"]
        assert len(stages) == 4
        firsts = [stage["ranks"] for stage in stages if stage["layers"][0] == 0]
        for some, lost_layers in ((firsts[0], []), (firsts[0] + firsts[1], [[0, 15]])):
            without = ",".join(map(str, some))
            replan = ("plan", "--replan", path, "--without", without, "--min-lanes", "1")
            code, out, _ = run(capsys, *replan, "--json")
            facts = json.loads(out)["replan"]
            assert facts["only_on_lost_ranks"] == {
                "embedding": bool(lost_layers),
                "layers": lost_layers,
                "head": False,
                "optimizer_states": bool(lost_layers) or zero == "1",
            }
            last = replan_text(facts).splitlines()[-1]
            if lost_layers:
                assert last == (
                    "the running job cannot switch to this plan without a checkpoint: only lost ranks had the embedding, "
                    "layers 0-15 and their optimizer states"
                )
            elif zero == "1":
                assert last == (
                    "the running job cannot switch to this plan without a checkpoint: only lost ranks had their parts of "
                    "the optimizer's states (ZeRO 1)"
                )
            else:
                assert (
                    last
                    == "no checkpoint is needed: ranks that are left hold all that the lost ones held"
                )
