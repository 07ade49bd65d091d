"""Models built on the meta device are made shard by shard, with the same values under every plan."""

import pytest
import torch
import transformers
from torch import nn

import hdtensor as hd
from tests.models.hf import SIZES, batch, strategy
from tests.support.world import run_world


PLANS = {
    "one": strategy(([0], 1)),
    "unlike": strategy(([0, 1], 5), ([2], 3)),
    "three": strategy(([3], 1), ([0, 2], 2), ([1], 1)),
}


def _meta_llama(plan, **changes):
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    torch.manual_seed(7)
    return hd.parallelize(model, plan)


def _weights(rank, plan):
    model = _meta_llama(PLANS[plan])
    loss = model(**hd.distribute_batch(model, batch(0))).loss
    weights = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    return weights, hd.item(loss)


@pytest.mark.dist(4)
def test_weights_and_loss_do_not_depend_on_the_plan():
    results = {plan: run_world(_weights, 4, plan) for plan in PLANS}
    expected, expected_loss = results["one"][0]
    for ranks in results.values():
        for weights, loss in ranks:
            torch.testing.assert_close(weights, expected, rtol=0, atol=0)
            torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    stds = [w.std().item() for name, w in expected.items() if "proj" in name]
    assert all(0.015 < std < 0.025 for std in stds), f"Llama starts with std 0.02, got {stds}"


def _largest_allocation(rank):
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if type(out) is torch.Tensor and out.device.type == "cpu":
                Watch.largest = max(Watch.largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        model = _meta_llama(PLANS["unlike"], intermediate_size=16384)
    held = [p.to_local().nbytes for p in model.parameters()]
    return Watch.largest, max(held), max(p.nbytes for p in model.parameters())


@pytest.mark.dist(4)
def test_no_rank_holds_a_whole_model():
    (two_bytes, two, whole), _, _, (outside_bytes, outside, _) = run_world(_largest_allocation, 4)
    assert (whole, two, outside) == (2 << 20, 1 << 20, 0)
    assert two_bytes < whole, "a rank with half of a weight allocated the whole one"
    assert outside_bytes < whole // 16, "a rank outside allocated weights"


class _Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        return self.layers[1](torch.relu(self.layers[0](x)))


def _reset_parameters(rank, plan):
    with torch.device("meta"):
        model = _Plain()
    torch.manual_seed(3)
    model = hd.parallelize(model, PLANS[plan], patterns=[("layers.0.weight", "column")])
    return [p.detach().full_tensor() for p in model.parameters()]


@pytest.mark.dist(4)
def test_plain_modules_use_reset_parameters():
    one, unlike = run_world(_reset_parameters, 4, "one"), run_world(_reset_parameters, 4, "unlike")
    torch.testing.assert_close(one, unlike, rtol=0, atol=0)
    bound = 8**-0.5
    assert all(p.abs().max() <= bound and p.std() > bound / 4 for p in one[0])
