"""Attention over a cut sequence: right rows see right keys, at both tiers."""

import weakref

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


def _check_masks(rank, q_spec, kv_spec, mask_spec):
    tensors = operands(9, heads=(4, 4))
    shape = {"row": (9, 9), "batch": (3, 1, 9, 9), "head": (1, 4, 1, 9), "broadcast": (3, 1, 1, 9)}
    for size in shape.values():
        mask = torch.randn(size, dtype=torch.float64)
        mask[mask > 0.8] = -torch.inf
        plain = [t.clone().requires_grad_() for t in tensors]
        cut = distributed(tensors, q_spec, kv_spec)
        expected = F.scaled_dot_product_attention(*plain, attn_mask=mask)
        with hd.implicit_replication():
            result = F.scaled_dot_product_attention(*cut, attn_mask=mask)
        compare(result, expected, cut, plain)
    rows = torch.rand(9, 9) > 0.5
    rows[2] = False  # a row that sees nothing
    plain = [t.clone().requires_grad_() for t in tensors]
    cut = distributed(tensors, q_spec, kv_spec)
    expected = F.scaled_dot_product_attention(*plain, attn_mask=rows)
    with hd.context_parallel("ring"):
        held = hd.distribute_tensor(rows, hd.HDSpec.from_text(mask_spec), src_data_rank=None)
        result = F.scaled_dot_product_attention(*cut, attn_mask=held)
    compare(result, expected, cut, plain)


MASKED = [
    pytest.param(BOTTOM, BOTTOM, "R / 0,1:S0", id="bottom"),
    pytest.param("S2[2:1] / 0,1:S1 2:R", "R / 0,1:S1 2:R", "S0[2:1] / 0,1:R 2:R", id="top"),
]


@pytest.mark.dist(4)
@pytest.mark.parametrize(("q_spec", "kv_spec", "mask_spec"), MASKED)
def test_masks(q_spec, kv_spec, mask_spec):
    run_world(_check_masks, 4, q_spec, kv_spec, mask_spec)


def _check_math(rank, q_spec, kv_spec):
    tensors = operands(9)
    plain = [t.clone().requires_grad_() for t in tensors]
    cut = distributed(tensors, q_spec, kv_spec)
    options = {"is_causal": True, "enable_gqa": True}
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*plain, **options)
        with hd.implicit_replication():
            result = F.scaled_dot_product_attention(*cut, **options)
    compare(result, expected, cut, plain)


@pytest.mark.dist(4)
def test_the_math_path_masks_by_position_too():
    run_world(_check_math, 4, BOTTOM, BOTTOM)
    run_world(_check_math, 4, "S2[2:1] / 0,1:R 2:R", "R / 0,1:R 2:R")


def _check_low_precision(rank, dtype):
    tensors = operands(13, dtype=dtype)
    wide = [t.double().requires_grad_() for t in tensors]
    cut = distributed(tensors, "R / 0-3:S2", "R / 0-3:S2")
    options = {"is_causal": True, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(*wide, **options)
    with hd.context_parallel("ring"):
        result = F.scaled_dot_product_attention(*cut, **options)
    assert result.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(result.detach().full_tensor().double(), expected.detach(), **close)
    expected.sum().backward()
    result.sum().backward()
    for t, p in zip(cut, wide, strict=True):
        assert t.grad.dtype == dtype
        torch.testing.assert_close(t.grad.full_tensor().double(), p.grad, **close)


@pytest.mark.dist(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_a_ring_are_summed_in_high_precision(dtype):
    run_world(_check_low_precision, 4, dtype)


def _check_autocast(rank):
    q, k, v = distributed(operands(8, dtype=torch.float32), BOTTOM, BOTTOM)
    with hd.context_parallel("ring"), torch.autocast("cpu", torch.bfloat16):
        result = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert result.dtype == torch.bfloat16
    result.sum().backward()
    assert k.grad.dtype == torch.float32


@pytest.mark.dist(4)
def test_autocast():
    run_world(_check_autocast, 4)


def _check_refusals(rank):
    top = "S2[2:1] / 0,1:R 2:R"
    q, k, v = distributed(operands(6, heads=(4, 4)), top, top)
    with pytest.raises(hd.DeductionError, match=r"operand 'key' .* must be R at the top .*redistribute"):
        F.scaled_dot_product_attention(q, k, v)
    q, k, v = distributed(operands(6, heads=(4, 4)), BOTTOM, BOTTOM)
    with (
        hd.context_parallel("ring"),
        pytest.raises(hd.DeductionError, match=r"dropout_p=0.1.*use context_parallel='all_gather'"),
    ):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(hd.PlanError, match="one of all_gather, ring, got 'rings'"):
        hd.context_parallel("rings")


@pytest.mark.dist(4)
def test_refusals():
    run_world(_check_refusals, 4)


def _count_messages(rank, method):
    q, k, v = distributed(operands(16), "R / 0-3:S2", "R / 0-3:S2")
    with count_communication() as count, hd.context_parallel(method):
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return count.by_kind(), count.num_bytes


@pytest.mark.dist(4)
def test_queries_are_never_sent():
    block = 3 * 2 * 4 * 8 * 8  # batch, heads, rows, size, bytes: of keys, and as much of values
    kinds, num_bytes = run_world(_count_messages, 4, "ring")[0]
    assert (set(kinds), num_bytes) == ({"send_recv"}, 6 * block)
    kinds, num_bytes = run_world(_count_messages, 4, "all_gather")[0]
    assert (kinds, num_bytes) == ({"all_gather": 2}, 2 * block)


def _check_memory(rank):
    """Keys and values that live at once while blocks go around: the own block and the one that arrives."""
    q, k, v = distributed(operands(4096, heads=(1, 1), batch=1), "R / 0-3:S2", "R / 0-3:S2")
    block, sizes = k.to_local().nbytes, []
    own = torch.Tensor.new_empty

    def noted(like, *shape, **options):
        found = own(like, *shape, **options)
        if found.shape == k.to_local().shape:
            alive.append(weakref.ref(found))
            sizes.append(sum(ref() is not None for ref in alive))
        return found

    alive: list[weakref.ref] = []
    with pytest.MonkeyPatch.context() as patch, hd.context_parallel("ring"):
        patch.setattr(torch.Tensor, "new_empty", noted)
        F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), is_causal=True)
    assert block == 1024 * 8 * 8
    return max(sizes)


@pytest.mark.dist(4)
def test_a_ring_holds_two_blocks_of_keys():
    assert max(run_world(_check_memory, 4)) == 4, "what is computed with and what arrives, keys and values"


def _check_other_size(rank, method):
    """Values of another size than keys, which the fused kernel does not take."""
    q, k, v = operands(11)
    tensors = [q, k, v[..., :5].contiguous()]
    for mask in (None, torch.randn(11, 11, dtype=torch.float64)):
        plain = [t.clone().requires_grad_() for t in tensors]
        cut = distributed(tensors, BOTTOM, BOTTOM)
        options = {"is_causal": mask is None, "attn_mask": mask, "enable_gqa": True}
        expected = F.scaled_dot_product_attention(*plain, **options)
        with hd.context_parallel(method), hd.implicit_replication():
            result = F.scaled_dot_product_attention(*cut, **options)
        compare(result, expected, cut, plain)


@pytest.mark.dist(4)
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_values_of_another_size(method):
    run_world(_check_other_size, 4, method)
