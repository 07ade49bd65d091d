"""Attention over a cut sequence: right rows see right keys, at both tiers."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hdtensor as hd
from hdtensor.debug import count_communication
from tests.support.world import run_world


# Queries, then keys and values; dims are batch, heads, sequence, size.
BOTTOM = "R / 0,1:S2"
SPECS = [
    pytest.param(BOTTOM, BOTTOM, id="bottom"),
    pytest.param(BOTTOM, "R / 0,1:R", id="bottom_keys_whole"),
    pytest.param("R / 0-3(2x2):S2,S1", "R / 0-3(2x2):S2,S1", id="bottom_heads_too"),
    pytest.param("R / 0-3(2x2):S2,S2", "R / 0-3(2x2):S2,S2", id="two_axes"),
    pytest.param("R / 0-3:S2", "R / 0-3:S2", id="four_ranks"),
    pytest.param("S2[2:1] / 0,1:R 2:R", "R / 0,1:R 2:R", id="top"),
    pytest.param("S2[2:1] / 0,1:S1 2:R", "R / 0,1:S1 2:R", id="top_heads_below"),
    pytest.param("S2[2:1] / 0,1:S2 2:R", "R / 0,1:S2 2:R", id="both_tiers"),
    pytest.param("S2[1:0:2] / 0,1:S2 2:R 3:R", "R / 0,1:R 2:R 3:R", id="empty_block"),
    pytest.param("S0[2:1] / 0,1:S2 2:R", "S0[2:1] / 0,1:S2 2:R", id="batch_above"),
    pytest.param("R / 0,1:S0x2", "R / 0,1:S2", id="strided_batch"),
]


def operands(length, heads=(4, 2), batch=3, keys=None, dtype=torch.float64):
    torch.manual_seed(1)
    shapes = [(batch, heads[0], length, 8)] + [(batch, heads[1], keys or length, 8)] * 2
    return [torch.randn(*shape, dtype=dtype) for shape in shapes]


def compare(result, expected, cut, plain):
    """Compare outputs and, with the same random weights, all gradients."""
    torch.testing.assert_close(result.detach().full_tensor(), expected.detach())
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    with hd.implicit_replication():
        (result * weights).sum().backward()
    for name, t, p in zip("qkv", cut, plain, strict=True):
        torch.testing.assert_close(t.grad.full_tensor(), p.grad, msg=lambda m, n=name: f"{n}: {m}")


def distributed(tensors, q_spec, kv_spec):
    specs = [hd.HDSpec.from_text(text) for text in (q_spec, kv_spec, kv_spec)]
    return [
        hd.distribute_tensor(t.clone().requires_grad_(), spec, src_data_rank=None)
        for t, spec in zip(tensors, specs, strict=True)
    ]


def _check_specs(rank, q_spec, kv_spec):
    for length, is_causal, keys in ((13, True, None), (3, True, None), (7, False, 10), (6, True, 9)):
        tensors = operands(length, keys=keys)
        plain = [t.clone().requires_grad_() for t in tensors]
        cut = distributed(tensors, q_spec, kv_spec)
        options = {"is_causal": is_causal, "enable_gqa": True, "scale": 0.3}
        expected = F.scaled_dot_product_attention(*plain, **options)
        result = F.scaled_dot_product_attention(*cut, **options)
        compare(result, expected, cut, plain)


@pytest.mark.dist(4)
@pytest.mark.parametrize(("q_spec", "kv_spec"), SPECS)
def test_output_and_gradients(q_spec, kv_spec):
    run_world(_check_specs, 4, q_spec, kv_spec)


RING = [
    pytest.param(BOTTOM, BOTTOM, id="bottom"),
    pytest.param("R / 0-3:S2", "R / 0-3:S2", id="four_ranks"),
    pytest.param("R / 0-3(2x2):S2,S1", "R / 0-3(2x2):S2,S1", id="heads_too"),
    pytest.param("R / 0-3(2x2):S2,S2", "R / 0-3(2x2):S2,S2", id="one_axis_gathers"),
    pytest.param("S0[2:1] / 0,1:S2 2:R", "S0[2:1] / 0,1:S2 2:R", id="batch_above"),
    pytest.param("S2[2:1] / 0,1:S2 2:R", "S2[2:1] / 0,1:S2 2:R", id="both_tiers"),
    pytest.param("S2[2:1] / 0,1:S1 2:R", "S2[2:1] / 0,1:S1 2:R", id="top"),
]


def _check_context(rank, q_spec, kv_spec, method):
    for length, is_causal, is_masked in ((13, True, False), (3, True, False), (7, False, True)):
        tensors = operands(length)
        plain = [t.clone().requires_grad_() for t in tensors]
        cut = distributed(tensors, q_spec, kv_spec)
        mask = torch.rand(3, 1, length, length) > 0.4 if is_masked else None
        options = {"is_causal": is_causal, "enable_gqa": True, "attn_mask": mask}
        expected = F.scaled_dot_product_attention(*plain, **options)
        with hd.context_parallel(method), hd.implicit_replication():
            result = F.scaled_dot_product_attention(*cut, **options)
        compare(result, expected, cut, plain)


@pytest.mark.dist(4)
@pytest.mark.parametrize("method", ["all_gather", "ring"])
@pytest.mark.parametrize(("q_spec", "kv_spec"), RING)
def test_context_parallel(q_spec, kv_spec, method):
    run_world(_check_context, 4, q_spec, kv_spec, method)
