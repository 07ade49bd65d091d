"""Unmodified Hugging Face models whose sequences are shared by ranks train as on one device."""

import pytest

import hdtensor as hd
from tests.models.hf import compare_training
from tests.support.world import run_world


def plan(*stages, **options):
    """Return a plan of one-stage pipelines, each ``(ranks, cp, share)``."""
    pipelines = [
        {"stages": [{"ranks": ranks, "layers": [0, 1], "cp": cp}], "share": share}
        for ranks, cp, share in stages
    ]
    return hd.AnnotationPlan.from_dict({"version": 1, "pipelines": pipelines, **options})


CP2 = [([0, 1], 2, 1)]
CP2_TP2 = [([0, 1, 2, 3], 2, 1)]
CP2_BESIDE_TP1 = [([0, 1], 2, 2), ([2], 1, 1)]
SPLIT = [([0, 1], 1, 2), ([2], 1, 1)]
SPLIT_AND_CP = [([0, 1], 2, 2), ([2], 1, 1)]
SEQUENCE = {"split": "sequence"}
ZIGZAG = {"sequence_order": "zigzag"}
RING = {"context_parallel": "ring"}

CASES = [
    pytest.param("llama", CP2, {}, {}, id="cp2"),
    pytest.param("qwen3", CP2_TP2, {}, {}, id="cp2_tp2"),
    pytest.param("llama", CP2_TP2, RING | ZIGZAG, {}, id="cp2_tp2_ring_zigzag"),
    pytest.param("llama", CP2_BESIDE_TP1, {}, {}, id="cp2_beside_tp1"),
    pytest.param(
        "llama", CP2_BESIDE_TP1, ZIGZAG, {"masked": True}, id="cp2_beside_tp1_zigzag_masked"
    ),
    pytest.param("llama", CP2_BESIDE_TP1, RING, {"masked": True}, id="cp2_beside_tp1_ring_masked"),
    pytest.param("llama", SPLIT, SEQUENCE, {}, id="split"),
    pytest.param("qwen3", SPLIT, SEQUENCE | ZIGZAG, {}, id="split_zigzag"),
    pytest.param("llama", SPLIT_AND_CP, SEQUENCE | ZIGZAG | RING, {}, id="split_and_cp"),
]


def _train(rank, family, plan, options):
    compare_training(family, plan, steps=3, lengths=(12, 13, 5), size=3, **options)


@pytest.mark.dist(4)
@pytest.mark.parametrize(("family", "stages", "keys", "options"), CASES)
def test_training_equals_one_device(family, stages, keys, options):
    run_world(_train, 4, family, plan(*stages, **keys), options)
