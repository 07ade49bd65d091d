"""What programs for DTensor do, on ``HDTensor``s of one subgroup: the same calls, beside plain torch.

A program takes ``place(tensor, *placements)``, which cuts on all four ranks, and in the oracle returns the tensor itself.
It runs for every tuple of placements of the first argument that is named beside it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor import DeductionError, HDTensor, distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
R, P = Replicate(), Partial()
EACH = {1: (R, Shard(0)), 2: (R, Shard(0), Shard(1)), 3: (R, Shard(0), Shard(1), Shard(2))}


def _draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


def _index(*shape, below):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(7))


def products(place, p, q):
    a, b, bias = place(_draw(12, 8), p), place(_draw(8, 4), q), place(_draw(4), R)
    batch = place(_draw(4, 8, 4), q)
    return [
        a @ b,
        torch.addmm(bias, a, b),
        a.t().contiguous().t() @ b,
        torch.bmm(place(_draw(4, 4, 8), p), batch),
        torch.baddbmm(place(_draw(4, 4, 4), p), place(_draw(4, 4, 8), p), batch),
    ]


def reductions(place, p):
    x = place(_draw(12, 8, 8), p)
    outs = [x.sum(), x.mean(), x.amax(), x.norm(), x.abs().max(), (x > 0).any(), (x > 9).all()]
    for dim in range(3):
        outs += [x.sum(dim), x.mean(dim, keepdim=True), x.amax(dim), x.max(dim).values]
        outs += [x.var(dim), x.prod(dim), x.logsumexp(dim), x.cumsum(dim), x.argmax(dim)]
    return outs


def norms_of_vectors(place, p):
    x = place(_draw(6, 7), p)
    orders = (0, 0.5, 1, 2, 3, float("inf"), -float("inf"))
    outs = [torch.linalg.vector_norm(x, order) for order in orders]
    outs += [torch.linalg.vector_norm(x, order, dim=dim) for order in orders for dim in (0, -1)]
    return [*outs, *torch._foreach_norm([x, place(_draw(3), R)], 2)]


def softmaxes(place, p):
    x = place(_draw(8, 12, 5), p)
    return [f(x, dim) for f in (torch.softmax, torch.log_softmax) for dim in (0, 1, -1)]


def losses(place, p):
    scores, target = place(_draw(12, 6), p), place(_index(12, below=6), R)
    weight = place(_draw(6).abs(), R).detach()
    outs = [
        F.cross_entropy(scores, target, weight=weight, reduction=reduction, ignore_index=2)
        for reduction in ("none", "mean", "sum")
    ]
    return [*outs, F.nll_loss(scores.log_softmax(1), target), F.mse_loss(scores, scores.sin())]


def normalizations(place, p):
    x, w, b = place(_draw(8, 4, 6), p), place(_draw(6), R), place(_draw(6), R)
    whole = place(_draw(4, 6), R)
    return [
        F.layer_norm(x, (6,), w, b),
        F.layer_norm(x, (4, 6), whole),
        F.rms_norm(x, (6,), w),
        F.group_norm(x, 2),
        F.batch_norm(x, None, None, training=True),
    ]


def choices(place, p):
    x = place(_draw(12, 8), p)
    values, found = x.topk(3, dim=0)
    return [
        values,
        found,
        *x.topk(2, dim=1),
        *x.sort(dim=0),
        x.median(1).values,
        x.kthvalue(2).values,
    ]


def pending_sums(place, p):
    x, y = place(_draw(8, 8), P), place(_draw(8, 8), p)
    number = 3.0
    return [
        x + y,
        x * number,
        x / 2,
        x.t(),
        x.relu(),
        x.exp(),
        x - 1,
        x + number,
        x.view(64),
        x @ y,
        -x,
    ]


def views(place, p):
    x = place(_draw(8, 12, 4), p)
    return [
        x.view(96, 4),
        x.reshape(8, 3, 4, 4),
        x.flatten(),
        x.permute(2, 0, 1),
        x.transpose(0, -1).contiguous(),
        x.unsqueeze(1).squeeze(1),
        x.expand(2, 8, 12, 4),
        x.movedim(0, 1),
        x.unflatten(1, (3, -1)),
        x[:, None, 2:5, ::2],
        *x.split(4),
        *x.chunk(3, 1),
        *x.unbind(2),
    ]


def indices(place, p):
    x, rows, pair = place(_draw(12, 8, 6), p), _index(5, below=6), _index(2, 3, below=8)
    rows, pair = place(rows, R), place(pair, R)
    return [
        x[rows],
        x[:, rows],
        x[:, pair],
        x[rows, rows],
        x[:, rows, rows],
        x[rows, :, rows],
        x[0],
        x[..., -1],
        x.index_select(1, rows),
        x.gather(2, place(_index(12, 8, 2, below=6), R)),
        torch.take_along_dim(x, x.argsort(1), 1),
        x.scatter(0, place(_index(3, 8, 6, below=12), R), place(_draw(3, 8, 6), R)),
    ]


def joins(place, p):
    a, b = place(_draw(8, 4), p), place(_draw(8, 4).sin(), R)
    outs = [torch.stack([a, b], dim) for dim in (0, 1, 2, -1)]
    outs += [torch.cat([a, b], dim) for dim in (0, 1)]
    mask = place(_draw(8, 4) > 0, p)
    return [*outs, torch.where(mask, a, b), torch.where(mask, a, 2.5), a.masked_fill(mask, 1)]


def constructors(place, p):
    x = place(_draw(8, 4), p)
    made = [torch.full_like(x, 4.0), torch.zeros_like(x), torch.ones_like(x, dtype=torch.float64)]
    made += [x.new_full((3, 2), 1.5), x.new_zeros(4), x.new_ones(2, 3)]
    strided = x.new_empty_strided((6, 4), (4, 1)).fill_(2)
    return [
        *made,
        strided,
        torch.empty_like(x).fill_(7.0),
        x.to(torch.float64),
        x.bfloat16().float(),
    ]


def writes(place, p):
    x, y = place(_draw(8, 4), p), place(_draw(8, 4).sin(), p)
    out = torch.empty_like(x)
    torch.add(x.detach(), y.detach(), out=out)
    made = x.clone()
    made.add_(y).mul_(2).sub_(place(torch.tensor(1.0), R))
    return [out, made, x.clone().zero_(), x.clone().copy_(y), x.detach().clone().clamp_(min=0)]


def tables(place, p):
    table = place(_draw(12, 8), p)
    outs = [F.embedding(place(_index(*shape, below=12), R), table) for shape in ((5,), (2, 3), ())]
    return [*outs, F.embedding(place(_index(4, 3, below=12), R), table, padding_idx=2)]


def linear_algebra(place, p):
    x = place(_draw(4, 3, 3) + 3 * torch.eye(3), p)
    symmetric = x @ x.mT
    return [
        torch.linalg.inv(x),
        torch.linalg.cholesky(symmetric),
        torch.linalg.eigvalsh(symmetric),
        torch.linalg.svdvals(x),
        torch.linalg.det(x),
        torch.linalg.solve(x, x.sin()),
        x.tril(),
        x.triu(1),
        x.diagonal(dim1=1, dim2=2),
        torch.trace(x[0]),
    ]


def images(place, p):
    x, w = place(_draw(4, 4, 8), p), place(_draw(6, 4, 3), R)
    return [
        F.conv1d(x, w, padding=1),
        F.max_pool1d(x, 2),
        F.avg_pool1d(x, 2),
        F.interpolate(x, scale_factor=2),
        F.pad(x, (1, 2)),
        F.pad(x, (1, 1), mode="reflect"),
    ]


def operators_without_a_rule(place, p):
    x = place(_draw(4, 6, 6), p)
    return [
        torch.addbmm(place(_draw(6, 6), R), x, x),
        torch.cdist(x, x.sin()),
        torch.block_diag(x[0], x[1]),
        x.renorm(2, 0, 1.0),
        F.pdist(x[0]),
        F.bilinear(x, x, place(_draw(2, 6, 6), R)),
    ]


PROGRAMS = {
    products: [(p, q) for p in EACH[2] for q in EACH[2]],
    reductions: [(p,) for p in EACH[3]],
    norms_of_vectors: [(p,) for p in EACH[2]],
    softmaxes: [(p,) for p in EACH[3]],
    losses: [(p,) for p in EACH[2]],
    normalizations: [(p,) for p in EACH[3]],
    choices: [(p,) for p in EACH[2]],
    pending_sums: [(p,) for p in EACH[2]],
    views: [(p,) for p in EACH[3]],
    indices: [(p,) for p in EACH[3]],
    joins: [(p,) for p in (*EACH[2], P)],
    constructors: [(p,) for p in EACH[2]],
    writes: [(p,) for p in EACH[2]],
    tables: [(p,) for p in EACH[2]],
    linear_algebra: [(p,) for p in EACH[3]],
    images: [(p,) for p in EACH[3]],
    operators_without_a_rule: [(p,) for p in EACH[3]],
}


def _leaves(tensors):
    return [t for t in tensors if t.is_floating_point()]


def _run(program, placements, place):
    """Return results and gradients; every floating tensor that is placed is a leaf."""
    placed = []

    def leaf(tensor, *how):
        made = place(tensor.clone(), *how)
        if made.is_floating_point() and made.ndim:
            made.requires_grad_()
            placed.append(made)
        return made

    outs = program(leaf, *placements)
    whole = [o.full_tensor() if isinstance(o, HDTensor) else o for o in outs]
    loss = sum(o.double().sin().sum() for o in whole if o.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    grads = [t.grad for t in placed]
    return whole, [g.full_tensor() if isinstance(g, HDTensor) else g for g in grads], outs


def _check(rank, name):
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))

    def place(tensor, placement):
        if placement == P and not tensor.is_floating_point():
            placement = R
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    program = globals()[name]
    wanted, wanted_grads, _ = _run(program, (None,) * len(PROGRAMS[program][0]), lambda t, *_: t)
    for placements in PROGRAMS[program]:
        got, grads, outs = _run(program, placements, place)
        assert all(isinstance(out, HDTensor) for out in outs), placements
        for k, (g, w) in enumerate(zip(got, wanted, strict=True)):
            _close(g, w, f"{placements}, result {k}: {outs[k]!r}")
        for k, (g, w) in enumerate(zip(grads, wanted_grads, strict=True)):
            assert (g is None) == (w is None), f"{placements}, gradient {k}"
            if w is not None:
                _close(g, w, f"{placements}, gradient {k}")


def _close(got, want, what):
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    torch.testing.assert_close(
        got, want, rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_equals_one_device(program):
    run_world(_check, WORLD_SIZE, program.__name__)


def _check_comparisons(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    full = _draw(8, 6)
    x = distribute_tensor(full, mesh, [Shard(0), R])
    y = x.redistribute(mesh, [R, Shard(1)])
    assert torch.equal(x, y)
    assert not torch.equal(x, distribute_tensor(full + 1, mesh, [R, R]))
    assert torch.allclose(x, y + 1e-7)
    assert not torch.allclose(x, y + 0.1)
    assert torch.allclose(x, y + 0.1, atol=0.2)
    two = distribute_tensor(full, "S0 / 0,1:R 2:R")
    assert not torch.equal(two, distribute_tensor(full[:4], "S0 / 0,1:R 2:R"))
    assert torch.equal(two, distribute_tensor(full, "R / 0,1:S0 2:R"))
    other = full.clone()
    other[7] = 0  # a difference that one subgroup alone sees
    assert not torch.equal(two, distribute_tensor(other, "S0 / 0,1:R 2:R"))


@pytest.mark.dist(WORLD_SIZE)
def test_comparisons_answer_for_whole_tensors_on_every_rank():
    run_world(_check_comparisons, WORLD_SIZE)


def _check_refusals(rank):
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    whole = distribute_tensor(torch.ones(8, 8), mesh, [R])
    pending = distribute_tensor(torch.ones(8, 8), mesh, [P])
    with pytest.raises(DeductionError, match="writing in place would change the layout of 'self'"):
        pending.relu_()
    with pytest.raises(DeductionError, match=r"shape depends on the data.*local_map"):
        whole.nonzero()
    with pytest.raises(DeductionError, match=r"as_strided.*redistribute\('R / 0-3:R'\)"):
        torch.as_strided(whole.redistribute(placements=[Shard(0)]), (2, 2), (1, 2), 1)
    singular = distribute_tensor(
        torch.stack([torch.eye(2)] * 3 + [torch.zeros(2, 2)]), mesh, [Shard(0)]
    )
    with pytest.raises(torch.linalg.LinAlgError):  # one rank has the matrix, all hear of it
        torch.linalg.inv(singular)


@pytest.mark.dist(WORLD_SIZE)
def test_what_cannot_be_done_is_refused_on_every_rank():
    run_world(_check_refusals, WORLD_SIZE)
