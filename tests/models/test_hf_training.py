"""Unmodified Hugging Face models train under unlike plans as on one device."""

import pytest

from tests.models.hf import compare_training, strategy
from tests.support.world import run_world


UNLIKE = strategy(([0, 1], 5), ([2], 3))
THREE = strategy(([0, 1], 2), ([2], 1), ([3], 1))
TP3 = strategy(([0, 1, 2], 3), ([3], 1))


def _train(rank, family, plan, options):
    compare_training(family, plan, **options)


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("use_regions", [False, True], ids=["op_by_op", "regions"])
@pytest.mark.parametrize("plan", [UNLIKE, THREE], ids=["TP2_TP1_outside", "TP2_TP1_TP1"])
def test_training_equals_one_device(family, plan, use_regions):
    run_world(_train, 4, family, plan, {"use_regions": use_regions})


@pytest.mark.dist(4)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_kv_heads_that_tp_does_not_divide_are_replicated(kv_heads):
    model = {"num_attention_heads": 6, "num_key_value_heads": kv_heads, "hidden_size": 48}
    run_world(_train, 4, "llama", TP3, {"model": model})


@pytest.mark.dist(4)
def test_uneven_mlp_cut():
    run_world(_train, 4, "llama", UNLIKE, {"model": {"intermediate_size": 45}})


@pytest.mark.dist(4)
@pytest.mark.parametrize("use_regions", [False, True], ids=["op_by_op", "regions"])
def test_padding_masks_may_be_plain(use_regions):
    run_world(_train, 4, "llama", UNLIKE, {"masked": True, "use_regions": use_regions})


@pytest.mark.dist(4)
def test_lengths_change_every_step():
    run_world(_train, 4, "llama", UNLIKE, {"lengths": (12, 7, 9, 10, 11), "steps": 10})


@pytest.mark.dist(4)
def test_tied_embeddings():
    run_world(_train, 4, "qwen3", UNLIKE, {"model": {"tie_word_embeddings": True}})


@pytest.mark.dist(4)
@pytest.mark.parametrize("optimizer", [{"foreach": True}, {"fused": True}], ids=str)
def test_optimizer_implementations(optimizer):
    run_world(_train, 4, "llama", UNLIKE, {"optimizer": optimizer})


def _train_one_row(rank):
    compare_training("llama", UNLIKE, steps=2, size=1)


@pytest.mark.dist(4)
def test_a_batch_of_one_row_leaves_a_subgroup_without_rows():
    run_world(_train_one_row, 4)
