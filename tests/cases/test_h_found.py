"""Users' cases H: silent wrong gradients of losses, and attention on CPU."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

from hdtensor import DeductionError, distribute_tensor, item
from tests.support.world import run_world


WORLD_SIZE = 4

#: Loss -> how the target is made from any numbers.
LOSSES = {
    F.mse_loss: lambda t: t,
    F.l1_loss: lambda t: t,
    F.smooth_l1_loss: lambda t: t,
    F.huber_loss: lambda t: t,
    F.soft_margin_loss: torch.sign,
    F.binary_cross_entropy_with_logits: torch.sigmoid,
    F.kl_div: torch.sigmoid,
    F.poisson_nll_loss: torch.abs,
    F.hinge_embedding_loss: torch.sign,
}
CUTS = [
    "R / 0-3:S0",
    "R / 0-3(2x2):S1,S0",
    "S0[3:1] / 0,1:S1 2:R",
    "S0[0:1:2] / 0:R 3:R 1:S0",
    "S1 / 0,1:S0 2:S1",
]
SHAPES = [(8, 4), (7, 3)]


def cut(full, spec):
    return distribute_tensor(full, spec, src_data_rank=None)


def _check_losses(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kl_div's mean announces a change
        _compare_losses()


def _compare_losses():
    ways = [((8, 4), CUTS[:1]), ((7, 3), CUTS[1:])]  # divided by the mesh, and not
    for (shape, cuts), (loss, to_target) in itertools.product(ways, LOSSES.items()):
        x, y = torch.randn(2, *shape, dtype=torch.float64)
        y = to_target(y)
        plain = x.clone().requires_grad_()
        want = loss(plain, y)
        want.backward()
        for spec in cuts:
            case = f"{loss.__name__} {shape} {spec}"
            ours = cut(x, spec).requires_grad_()
            got = loss(ours, cut(y, spec))
            assert torch.allclose(got.detach().full_tensor(), want.detach()), case
            got.backward()
            assert torch.allclose(ours.grad.full_tensor(), plain.grad), case


@pytest.mark.dist(WORLD_SIZE)
def test_case_51_gradients_of_losses_over_a_split_batch():
    run_world(_check_losses, WORLD_SIZE)


def _check_means(rank):
    for shape in SHAPES:
        x = torch.randn(*shape, dtype=torch.float64)
        for spec in CUTS:
            for mean in (
                lambda t: t.pow(2).mean(),
                lambda t: (t.mean(0) * 2).sum(),
                lambda t: t.mean(1, keepdim=True).sum(),
                lambda t: (t - t.detach() * 0.5).mean((0, 1)),
            ):
                plain, ours = x.clone().requires_grad_(), cut(x, spec).requires_grad_()
                want, got = mean(plain), mean(ours)
                want.backward()
                got.backward()
                assert item(got) == pytest.approx(want.item())
                assert torch.allclose(ours.grad.full_tensor(), plain.grad), (shape, spec)


@pytest.mark.dist(WORLD_SIZE)
def test_case_51_gradients_of_means():
    run_world(_check_means, WORLD_SIZE)


BATCH, HEADS, LENGTH, SIZE = 6, 4, 5, 8
#: Layout of q, k and v; attention keeps what cuts batch or heads.
KEPT = [
    "R / 0-3:S1",
    "R / 0-2:S0",
    "R / 0-3(2x2):S0,S1",
    "S0[2:1] / 0,1:S1 2:R",
    "S1 / 0,1:S0 2:S1",
    "S0[1:0:2] / 3:R 0:S1 1,2:S0",
]
GATHERED = ["R / 0-3:S2", "R / 0-3:S3", "R / 0-2:S1", "S0[2:1] / 0,1:S2 2:S3"]


def _check_attention(rank):
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, SIZE, dtype=torch.float64)
    masks = {
        "none": {},
        "causal": {"is_causal": True},
        "float": {"attn_mask": torch.randn(LENGTH, LENGTH, dtype=torch.float64)},
        "batch": {"attn_mask": torch.randn(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64)},
        "bool": {"attn_mask": torch.ones(LENGTH, LENGTH).tril().bool()},
    }
    for (name, options), spec in itertools.product(masks.items(), KEPT + GATHERED):
        plain = [t.clone().requires_grad_() for t in (q, k, v)]
        want = F.scaled_dot_product_attention(*plain, **options)
        want.square().sum().backward()
        ours = [cut(t, spec).requires_grad_() for t in (q, k, v)]
        whole = "R / " + " ".join(
            f"{g.text().partition(':')[0]}:{','.join('R' for _ in g.placements)}"
            for g in ours[0].spec.subgroups
        )
        given = {n: cut(t, whole) if isinstance(t, torch.Tensor) else t for n, t in options.items()}
        got = F.scaled_dot_product_attention(*ours, **given)
        assert torch.allclose(got.detach().full_tensor(), want), (name, spec)
        assert spec not in KEPT or str(got.spec) == spec
        got.square().sum().backward()
        for a, b in zip(ours, plain, strict=True):
            assert torch.allclose(a.grad.full_tensor(), b.grad), (name, spec)


@pytest.mark.dist(WORLD_SIZE)
def test_case_52_attention_on_cpu():
    run_world(_check_attention, WORLD_SIZE)


def _check_grouped(rank):
    # Fewer heads of keys and values than of queries, as Llama has: cut alike where all divide.
    q = torch.randn(BATCH, HEADS, LENGTH, SIZE, dtype=torch.float64)
    k, v = torch.randn(2, BATCH, 2, LENGTH, SIZE, dtype=torch.float64)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for spec in ("R / 0,1:S1", "R / 0-3:S1", "S0[2:1] / 0,1:S1 2:R", "R / 0-2:S0"):
        got = F.scaled_dot_product_attention(*(cut(t, spec) for t in (q, k, v)), enable_gqa=True)
        assert torch.allclose(got.full_tensor(), want), spec
    # A sequence cut between subgroups would have to be sent: refused, with the call to insert.
    with pytest.raises(DeductionError, match="redistribute"):
        F.scaled_dot_product_attention(*(cut(q, "S2 / 0,1:R 2:R") for _ in range(3)))


@pytest.mark.dist(WORLD_SIZE)
def test_case_52_grouped_heads_and_cut_sequences():
    run_world(_check_grouped, WORLD_SIZE)
