"""What is said where nothing fits: what is said not to fit never does, and what is proposed helps."""

import random
from dataclasses import replace

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.lack_of_memory import find_lack, too_large
from hdtensor.planner.models import find_model
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.search import search
from hdtensor.planner.space import SearchOptions, make_space
from hdtensor.planner.workload import SCHEDULES, Workload


MODEL = find_model("llama-13b")


def space_of(cluster, work, options, reserved=None):
    costs = RooflineCosts(model=MODEL, workload=work)
    if reserved is not None:
        costs = replace(costs, reserved_bytes=reserved)
    return make_space(cluster_of_text(cluster), costs, work, MODEL.num_layers, options)


def fits(space):
    try:
        return bool(search(space, should_stop=lambda: True).strategy.lanes)
    except PlannerError as error:
        if not str(error).startswith("memory: no strategy fits. "):
            raise
        return False


def test_what_is_said_not_to_fit_does_not_even_without_activations():
    rng = random.Random(0)
    seen, num_fitting = [], 0
    for _ in range(30):
        cluster = rng.choice(
            (
                "2x 8x RTX-4090",
                "8x A100-40 + 2x 4x RTX-3090",
                "4x A100-80",
                "8x H800",
                "12x A100-40/4",
            )
        )
        work = Workload(batch=16, context=rng.choice((2048, 65536)), zero=rng.choice((0, 1)),
                        precision=rng.choice(("bfloat16", "float32")) if "3090" in cluster else "bfloat16",
                        schedule=rng.choice(SCHEDULES))  # fmt: skip
        options = SearchOptions(mbs=(1,), tp_degrees=rng.choice(((1,), (1, 4))), max_stages=rng.choice((1, 4, 8)),
                                max_lanes=8, min_lanes=rng.choice((1, 1, 2, 4)))  # fmt: skip
        space = space_of(cluster, work, options)
        if fits(space):
            continue
        lack = find_lack(space)
        seen.append(lack)
        small = space_of(cluster, replace(work, context=1, schedule="1F1B"), options, reserved=0)
        if lack == "activations":
            num_fitting += fits(small)
        else:
            assert not fits(small)
        if lack == "stages":
            assert fits(space_of(cluster, small.workload, replace(options, max_stages=64), 0))
    assert num_fitting >= 0.8 * seen.count("activations")  # a few are cut too finely
    assert min(seen.count(lack) for lack in ("states", "stages", "activations")) > 0


#: Cluster, step, options -> what is proposed, and whether a search finds a plan with it.
PROPOSALS = [
    ("8x H800", {"schedule": "GPipe", "batch": 64}, {}, "schedule='1F1B'", {"schedule": "1F1B"}, {}),
    ("8x H800", {"schedule": "GPipe", "batch": 64}, {}, "a smaller batch", {"batch": 8}, {}),
    ("8x H800", {"schedule": "GPipe", "batch": 64}, {}, "recompute='full'", {"recompute": "full"}, {}),
    ("8x RTX-4090 + 8x RTX-3090", {"context": 49152}, {}, "a shorter context", {"context": 4096}, {}),
    ("8x RTX-4090 + 8x RTX-3090", {"context": 49152}, {"tp_degrees": (1, 2)}, "TP up to 8 (tp_degrees)",
     {"context": 16384}, {"tp_degrees": (1, 2, 4, 8)}),
    ("8x H800", {}, {"mbs": (64,)}, "a smaller mbs", {}, {"mbs": (1,)}),
    ("16x A100-40", {}, {"max_stages": 1, "tp_degrees": (1, 2)}, "more than 1 stages (max_stages)", {}, {"max_stages": 8}),
    ("16x RTX-4090", {}, {"min_lanes": 4}, "fewer lanes (min_lanes)", {}, {"min_lanes": 1}),
    ("16x RTX-4090", {"zero": 0}, {"min_lanes": 2}, "zero=1", {"zero": 1}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("cluster", "work", "options", "words", "other_work", "other_options"), PROPOSALS)  # fmt: skip
def test_what_is_proposed_helps(cluster, work, options, words, other_work, other_options):
    work = {"batch": 64, "context": 4096, **work}
    space = space_of(cluster, Workload(**work), SearchOptions(**options))
    assert not fits(space)
    assert words in too_large(space)
    helped = space_of(
        cluster, Workload(**work | other_work), SearchOptions(**options | other_options)
    )
    assert fits(helped)


def test_what_cannot_help_is_not_proposed():
    work = Workload(batch=64, context=4096)
    for cluster, schedule in (("1x RTX-4090", "1F1B"), ("4x RTX-4090", "GPipe")):
        text = too_large(space_of(cluster, replace(work, schedule=schedule), SearchOptions()))
        assert text.endswith(" Take more devices or devices with more memory.")
    text = too_large(
        space_of("8x H800", replace(work, batch=1024, schedule="GPipe"), SearchOptions())
    )
    assert "mbs" not in text
    # Each number of the message follows from the sizes of the model: 16 bytes a parameter.
    assert f" {MODEL.layer_parameters * 16 / 1e9:.3g} GB a layer at least, " in text
    assert f" {MODEL.num_parameters * 16 / 1e9:.3g} GB in all; " in text
