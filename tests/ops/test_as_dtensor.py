"""A tensor of one subgroup in the place of a DTensor: the families of programs that PyTorch tests DTensor with.

A family takes ``place(tensor, *placements)``, which distributes over a mesh of four ranks, or of two by two for two placements;
the oracle is the tensor itself. It yields results, or ``(result, placements)`` where the layout is promised too.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import hdtensor
from hdtensor import HDTensor, SpecError
from tests.support.world import run_world


WORLD_SIZE = 4
R, P = Replicate(), Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)


def _draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def _index(*shape, below):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


def reductions(place):
    x = place(_draw(12, 8, 8), S0)
    for name, dim in itertools.product(("sum", "prod", "mean", "amax", "std"), range(3)):
        yield getattr(x, name)(dim, keepdim=dim == 1)
    for name in ("sum", "max", "min", "mean", "norm"):
        yield getattr(x, name)()
    yield (x > 9).all(1)
    yield x.max(2).values
    yield place(_draw(2, 4), S0, S1).std(1), (S0, R)


def softmax_on_a_dim_that_is_cut_or_not(place):
    for dim, cut in itertools.product((-1, 0, 1, 2), range(3)):
        x = place(_draw(8, 4, 6).requires_grad_(), Shard(cut))
        is_cut = dim % 3 == cut
        y = x.softmax(dim)
        yield y, (R if is_cut else Shard(cut),)
        (y * y.detach()).sum().backward()
        yield x.grad, (R if is_cut else Shard(cut),)


def losses_of_classes(place):
    target = place(_index(8, below=16), R)
    for cut, reduction in itertools.product((0, 1), ("none", "mean", "sum")):
        x = place(_draw(8, 16).requires_grad_(), Shard(cut))
        loss = F.cross_entropy(x, target, reduction=reduction)
        yield loss, (R if cut else S0 if reduction == "none" else P,)
        loss.sum().backward()
        yield x.grad, (R if cut else S0,)


def norms_of_layers(place):
    for kind, cut, start in itertools.product((nn.LayerNorm, nn.RMSNorm), range(3), range(3)):
        x = place(_draw(8, 5, 10).requires_grad_(), Shard(cut))
        norm = kind((8, 5, 10)[start:])
        for name, parameter in list(norm.named_parameters()):
            norm.register_parameter(name, nn.Parameter(place(parameter.detach() + 0.5, R)))
        y = norm(x)
        (y * y.detach()).sum().backward()
        yield y
        yield x.grad
        yield (norm.weight.grad, (P,)) if cut < start else norm.weight.grad


def scans_and_orders(place):
    for cut in (S0, S1, R):
        x = place(_draw(4, 8), cut)
        yield x.cumsum(0), (R if cut == S0 else cut,)
        yield x.logsumexp(0)
        yield x.topk(3, 0).values
        yield x.histc(min=-3, max=3)
    yield torch.linalg.svd(place(_draw(8, 8), S0)).S, (R,)
    yield torch.dist(place(_draw(4, 8), S0), place(_draw(4, 8) * 2, S0))


def products_of_matrices(place):
    for p, q in itertools.product((S0, S1, R), repeat=2):
        a, b = place(_draw(12, 8).requires_grad_(), p), place(_draw(8, 16).requires_grad_(), q)
        y = a @ b
        y.backward(place(torch.ones(12, 16), R))
        yield y
        yield a.grad
        yield b.grad
    for p, q in itertools.product((S0, S1, S2, R), repeat=2):
        yield torch.bmm(place(_draw(4, 8, 4), p), place(_draw(4, 4, 8), q))
    a, b = place(_draw(12, 8), S1), place(_draw(8, 4), S0)
    for bias in ((4,), (12, 4), (), (1, 4), (12, 1)):
        yield torch.addmm(place(_draw(*bias), R), a, b), (P,)
    yield (a @ b).t(), (P,)
    yield place(_draw(3, 4), S0) @ place(_draw(4, 4), R)  # a rank without rows
    yield torch.addmm(place(_draw(4), R), place(_draw(12, 0), S0), place(_draw(0, 4), R))


def views_on_two_axes(place):
    for p, q in itertools.product((R, S0, S1), repeat=2):
        x = place(_draw(4, 4, 6), p, q)
        yield x.permute(2, 0, 1)
        yield x.movedim(1, -1).unsqueeze(0)
        yield x.expand(2, 4, 4, 6)
        yield x.flatten()
        yield x.view(16, 6)
        yield x.repeat(1, 2, 1)
        yield torch.atleast_3d(x[0])
    yield place(_draw(12, 1, 6), S0).squeeze(1), (S0,)
    yield place(_draw(8, 16), S1)[:, 8:]


def indexing(place):
    y, z = place(_index(4, 8, below=4), R), place(_index(8, below=4), R)
    for cut in (R, S0, S1, S2):
        x = place(_draw(4, 8, 6), cut)
        yield from (x[y], x[:, y], x[..., y], x[z, :, y], x.index_select(0, z))
    x, index = place(_draw(12, 8, 4), R), place(_index(4, 4, 4, below=4), S1)
    yield x.gather(1, index), (S1,)
    yield place(_draw(12, 8), S1).gather(1, place(_index(4, 1, below=8), R))
    one = [place(torch.tensor(1), R)]
    yield torch.index_put(place(_draw(4, 8), S1), one, place(_draw(8), R))


def embeddings(place):
    for cut, padding in itertools.product((S0, S1), (None, 5)):
        weight = place(_draw(15, 14).requires_grad_(), cut)
        y = F.embedding(place(_index(6, 7, below=15), R), weight, padding_idx=padding)
        yield y, (P if cut == S0 else S2,)
        (y * y.detach()).sum().backward()
        yield weight.grad


def convolutions(place):
    def draw(*shape, cut):
        return place(_draw(*shape, dtype=torch.float64).requires_grad_(), cut)

    for cut, kernel, options in ((Shard(3), 4, {"stride": 4}), (S0, 3, {"padding": 1})):
        x = draw(4, 3, 8, 32, cut=cut)
        w, b = (draw(*s, cut=R) for s in ((6, 3, kernel, kernel), (6,)))
        y = F.conv2d(x, w, b, **options)
        (y * y.detach()).sum().backward()
        yield from (y, x.grad, w.grad, b.grad)


def writes_and_likes(place):
    x = place(_draw(12, 4), S0)
    out = place(_draw(12, 4), R)
    yield torch.add(x, 3, out=out), (R,)
    y = x.clone()
    y.add_(place(_draw(12, 4), P)).mul_(2)
    yield y, (S0,)
    yield x.masked_fill(x > 0, -1.0)
    yield torch.where(x > 0, 1, 0)
    yield torch.ones_like(place(_draw(4, 8), P))
    yield x.new_full((12, 4), 3.0), (S0,)
    yield x.new_zeros((2, 3)), (R,)
    yield x.new_full((12, 4), 3.0), (S0,)  # whatever was asked before
    yield torch.tensor([2.0]) * x, (S0,)
    yield torch.stack([x, y], 1), (S0,)
    yield x.bfloat16().float()
    yield F.gelu(x).sigmoid()
    yield place(_draw(4, 8), P) * 2.0, (P,)
    yield place(_draw(4, 8), P) * place(_draw(4, 8), P)


FAMILIES = [
    reductions,
    softmax_on_a_dim_that_is_cut_or_not,
    losses_of_classes,
    norms_of_layers,
    scans_and_orders,
    products_of_matrices,
    views_on_two_axes,
    indexing,
    embeddings,
    convolutions,
    writes_and_likes,
]


def _mesh(*shape):
    return DeviceMesh("cpu", torch.arange(4).view(shape))


def _check_families(rank):
    meshes = {1: _mesh(4), 2: _mesh(2, 2)}

    def place(tensor, *placements):
        mesh = meshes[len(placements)]
        return hdtensor.distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    for family in FAMILIES:
        whole = list(family(lambda tensor, *_: tensor))
        for i, (got, want) in enumerate(zip(family(place), whole, strict=True)):
            where = f"{family.__name__}, result {i}"
            if isinstance(got, tuple):
                (got, placements), (want, _) = got, want
                assert got.placements == placements, (where, got)
            assert isinstance(got, HDTensor)
            torch.testing.assert_close(got.full_tensor(), want, msg=lambda m, w=where: f"{w}: {m}")


@pytest.mark.dist(WORLD_SIZE)
def test_families():
    run_world(_check_families, WORLD_SIZE, timeout=120)


OPTIMIZERS = [
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.05, "maximize": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.1, "nesterov": True, "foreach": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.02, "initial_accumulator_value": 0.03}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "foreach": True}),
    (torch.optim.Adadelta, {"weight_decay": 0.05}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.05}),
    (torch.optim.RAdam, {"foreach": True}),
    (torch.optim.Adamax, {"betas": (0.6, 0.66)}),
    (torch.optim.ASGD, {"t0": 1e5, "weight_decay": 0.05}),
]


def _check_optimizers(rank):
    mesh = _mesh(4)

    def partition(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            part = nn.Parameter(hdtensor.distribute_tensor(parameter.detach(), mesh, [S0]))
            part.register_hook(lambda grad: grad.redistribute(placements=[S0]))
            module.register_parameter(key, part)

    def cut(module, inputs, mesh):
        return hdtensor.distribute_tensor(inputs[0], device_mesh=mesh, placements=[S0])

    def whole(module, outputs, mesh):
        return outputs.redistribute(placements=[R]).to_local()

    for kind, options in OPTIMIZERS:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        model = hdtensor.distribute_module(copy.deepcopy(plain), mesh, partition, cut, whole)
        steps = [(m, kind(m.parameters(), lr=0.1, **options)) for m in (plain, model)]
        for (m, optimizer), _ in itertools.product(steps, range(2)):
            m(torch.ones(8, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in plain.named_parameters():
            got = model.get_parameter(name).full_tensor()
            torch.testing.assert_close(got, parameter, msg=lambda m, k=kind: f"{k}: {m}")


@pytest.mark.dist(WORLD_SIZE)
def test_optimizers_of_a_distributed_module():
    run_world(_check_optimizers, WORLD_SIZE)


def _check_distribute_module(rank):
    mesh = _mesh(2, 2)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    whole = copy.deepcopy(model.state_dict())

    def partition(name, module, mesh):
        if name == "1":
            module.weight = nn.Parameter(hdtensor.distribute_tensor(module.weight, mesh, [S0, R]))

    assert hdtensor.distribute_module(model, device_mesh=mesh, partition_fn=partition) is model
    assert model[0].weight is model[2].weight
    assert not model[0].bias.requires_grad
    for name, tensor in model.state_dict().items():
        assert tensor.placements == ((S0, R) if name == "1.weight" else (R, R)), name
        assert torch.equal(tensor.full_tensor(), whole[name])
    plain = nn.Linear(2, 2)
    hdtensor.distribute_module(plain, "S0[3:1] / 0,1:S1 2:R")
    assert str(plain.weight.spec) == "R / 0,1:R 2:R"
    with pytest.raises(SpecError, match=r"takes a torch\.nn\.Module, got HDTensor"):
        hdtensor.distribute_module(plain.weight, mesh)


@pytest.mark.dist(WORLD_SIZE)
def test_distribute_module():
    run_world(_check_distribute_module, WORLD_SIZE)


def _check_factories(rank):
    mesh = _mesh(4)
    x = hdtensor.zeros([31, 3], device_mesh=mesh, placements=[S0])
    assert (x.placements, tuple(x.to_local().shape)) == ((S0,), (7 if rank == 3 else 8, 3))
    specs = ("S0[3:1] / 0,1:S1 2:R", "R / 0-3:R", "P / 0,1:P 2:R", "R / 0,1:P(avg)")
    for spec in specs:
        options = {"dtype": torch.float64, "requires_grad": True}
        for got, want in [
            (hdtensor.zeros((4, 6), spec), torch.zeros(4, 6)),
            (hdtensor.ones((4, 6), spec, **options), torch.ones(4, 6, **options)),
            (hdtensor.full((4, 6), 2.5, spec), torch.full((4, 6), 2.5)),
        ]:
            assert (got.dtype, got.requires_grad) == (want.dtype, want.requires_grad)
            assert str(got.spec) == spec
            torch.testing.assert_close(got.full_tensor(), want)
    assert hdtensor.full((), 7, "R / 0-3:R").full_tensor().dtype == torch.int64
    assert hdtensor.ones(5, "R / 0-3:S0").shape == (5,)
    assert hdtensor.empty((4, 6), specs[0], device="meta").is_meta
    for draw in (hdtensor.rand, hdtensor.randn):
        found = []
        for spec in specs[:2]:
            torch.manual_seed(3)
            found.append(draw((64, 6), spec).full_tensor())
            found.append(
                draw((64, 6), spec, generator=torch.Generator().manual_seed(3)).full_tensor()
            )
        assert all(torch.equal(x, found[0]) for x in found)
        assert abs(found[0].mean() - (0.5 if draw is hdtensor.rand else 0.0)) < 0.2
        with pytest.raises(hdtensor.DeductionError, match="would be summed"):
            draw((4, 6), specs[2])
    with pytest.raises(hdtensor.RedistributeError, match="avg"):
        hdtensor.ones((4, 6), specs[3], dtype=torch.int64)
    with pytest.raises(SpecError, match="no spec: pass an HDSpec"):
        hdtensor.zeros((4, 6))


@pytest.mark.dist(WORLD_SIZE)
def test_factories():
    run_world(_check_factories, WORLD_SIZE)
