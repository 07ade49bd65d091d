"""What torch does with any tensor: print, copy, save, load, convert, initialise, read, hook into modules."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdtensor
from hdtensor import DeductionError, HDTensor, NonLocalError, SpecError, distribute_tensor
from hdtensor._torch_compat import ExplicitRedistributionContext
from tests.support.world import run_world


WORLD_SIZE = 4
SPEC = "S0[3:1] / 0,1:S1 2:R"
X = torch.arange(24.0).reshape(4, 6)


def make(full=X, spec=SPEC):
    return distribute_tensor(full, spec, src_data_rank=None)


def linear(weight=X, spec=SPEC):
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(make(weight, spec))
    return module


def _check_attributes(rank):
    x = make()
    local = "not local" if rank == 3 else f"local={tuple(x.to_local().shape)}"
    text = f"HDTensor((4, 6), float32, 'S0[3:1] / 0,1:S1 2:R', top_sizes=(3, 1), {local}"
    assert repr(x) == str(x) == f"{x}" == text + ")"
    assert repr(nn.Parameter(x)) == text + ", requires_grad=True)"
    assert "\n" not in repr(make(torch.ones(3, 3, 3), "R / 0-3(2x2):S0,P(max)"))
    assert (x.hdim, x.hsize, x.top_sizes, x.is_local) == (0, 2, (3, 1), rank < 3)
    assert make(X, "P / 0,1:R 2:R").hdim == -2
    assert make(X, "R / 0,1:R 2:R").hdim == -1
    (pair, pair_placements), (single, _) = x.subgroups
    assert (pair.mesh.tolist(), single.mesh.tolist()) == ([0, 1], [2])
    assert pair_placements == x.spec.subgroups[0].placements
    assert pair.get_coordinate() == ((rank,) if rank < 2 else None)
    assert isinstance(x, torch.Tensor)
    assert x.is_contiguous()
    assert (x.stride(), x.numel(), len(x), x.device.type) == ((6, 1), 24, 4, "cpu")


@pytest.mark.dist(WORLD_SIZE)
def test_attributes_and_repr():
    run_world(_check_attributes, WORLD_SIZE)


def _check_copies(rank):
    parameter = nn.Parameter(make())
    (parameter * 2).sum().backward()
    twin = copy.deepcopy(parameter)
    assert isinstance(twin, nn.Parameter)
    assert isinstance(twin, HDTensor)
    assert twin.requires_grad
    assert twin.grad is None, "a copy of a parameter of torch's has no gradient"
    leaf = make().requires_grad_()
    (leaf * 2).sum().backward()
    assert torch.equal(copy.deepcopy(leaf).grad.full_tensor(), torch.full_like(X, 2))
    with torch.no_grad():
        parameter.zero_()
    assert torch.equal(twin.detach().full_tensor(), X)
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(parameter * 2)
    module = linear()
    module.tied = module.weight
    other = copy.deepcopy(module)
    assert other.tied is other.weight
    assert other.weight is not module.weight
    assert copy.copy(make()).spec is make().spec


@pytest.mark.dist(WORLD_SIZE)
def test_deepcopy():
    run_world(_check_copies, WORLD_SIZE)


def _check_data(rank):
    # Assigning data brings the layout too: a wrapper that kept its old shard would go on with old values.
    parameter = nn.Parameter(make())
    parameter.data = make(torch.zeros(3, 6).double(), "R / 0,1:S0 2:R")
    assert str(parameter.spec) == "R / 0,1:S0 2:R"
    assert (parameter.shape, parameter.dtype) == ((3, 6), torch.float64)
    assert torch.equal(parameter.detach().full_tensor(), torch.zeros(3, 6).double())
    assert torch.equal((parameter + 1).detach().full_tensor(), torch.ones(3, 6).double())
    assert type(parameter.data) is HDTensor
    assert not parameter.data.requires_grad
    parameter.data.add_(2)
    assert torch.equal(parameter.detach().full_tensor(), torch.full((3, 6), 2.0).double())
    with pytest.raises(SpecError, match="distribute_tensor"):
        parameter.data = torch.ones(3, 6)


@pytest.mark.dist(WORLD_SIZE)
def test_data_replaces_values_and_layout():
    run_world(_check_data, WORLD_SIZE)


def _check_state_dict(rank):
    source, target = linear(), linear(torch.zeros(4, 6))
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight.detach().full_tensor(), X)
    with torch.device("meta"):
        empty = nn.Linear(6, 4)
    empty.load_state_dict(source.state_dict(), assign=True)
    assert isinstance(empty.weight, nn.Parameter)
    assert empty.weight.spec is source.weight.spec
    # Another layout is refused with the call to insert; whole plain weights are accepted where the user says so.
    with pytest.raises(RuntimeError, match="redistribute"):
        linear(X, "R / 0,1:S1 2:R").load_state_dict(source.state_dict())
    plain = nn.Linear(6, 4)
    with pytest.raises(RuntimeError, match="implicit_replication"):
        target.load_state_dict(plain.state_dict())
    with hdtensor.implicit_replication():
        target.load_state_dict({"weight": X + 1, "bias": torch.ones(4)})
    assert torch.equal(target.weight.detach().full_tensor(), X + 1)


@pytest.mark.dist(WORLD_SIZE)
def test_state_dict():
    run_world(_check_state_dict, WORLD_SIZE)


def saved(value, weights_only):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def _check_files(rank):
    parameter = nn.Parameter(make())
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = make(torch.ones_like(X))
    optimizer.step()
    value = {"p": parameter, "plain": make().requires_grad_(), "opt": optimizer.state_dict()}
    for weights_only in (True, False):
        got = saved(value, weights_only)
        assert isinstance(got["p"], nn.Parameter)
        assert got["plain"].requires_grad
        assert got["plain"].spec is value["plain"].spec
        assert torch.equal(got["plain"].detach().full_tensor(), X)
        mean = got["opt"]["state"][0]["exp_avg"]
        torch.testing.assert_close(mean.full_tensor(), torch.full_like(X, 0.1))
        fresh = torch.optim.AdamW([parameter])
        fresh.load_state_dict(got["opt"])
        fresh.step()
    assert pickle.loads(pickle.dumps(make())).spec is make().spec


@pytest.mark.dist(WORLD_SIZE)
def test_save_and_load():
    run_world(_check_files, WORLD_SIZE)


def _check_other_rank(rank):
    # Shards of one shape, so that only the rank tells them apart; and terms, which have no place at all.
    for spec, is_alike in [("R / 0-3:S0", False), ("R / 0-3:P", False), ("R / 0-3:R", True)]:
        files = [None] * WORLD_SIZE
        dist.all_gather_object(files, pickle.dumps(make(X, spec)))
        neighbour = files[(rank + 1) % WORLD_SIZE]
        if is_alike:
            assert torch.equal(pickle.loads(neighbour).full_tensor(), X)
        else:
            with pytest.raises(SpecError, match="saved by rank"):
                pickle.loads(neighbour)


@pytest.mark.dist(WORLD_SIZE)
def test_another_ranks_file_is_refused():
    run_world(_check_other_rank, WORLD_SIZE)


def _check_conversions(rank):
    x = make()
    for y, dtype in [
        (x.to(torch.bfloat16), torch.bfloat16),
        (x.half(), torch.float16),
        (x.double(), torch.float64),
        (x.to("cpu"), torch.float32),
        (x.type(torch.int32), torch.int32),
        (torch.zeros_like(x, dtype=torch.bool), torch.bool),
        (torch.empty_like(x), torch.float32),
        (x.detach(), torch.float32),
        (x.contiguous(), torch.float32),
    ]:
        assert type(y) is HDTensor
        assert (y.dtype, y.spec, y.top_sizes) == (dtype, x.spec, x.top_sizes)
        assert y.to_local().shape == x.to_local().shape
    module = linear().to(torch.bfloat16)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(module.weight.detach().full_tensor(), X.bfloat16())
    out = torch.empty_like(x)
    assert torch.add(x, x, out=out) is out
    assert torch.equal(out.full_tensor(), 2 * X)


@pytest.mark.dist(WORLD_SIZE)
def test_conversions():
    run_world(_check_conversions, WORLD_SIZE)


def _check_reads(rank):
    pending = make(torch.tensor(3.0), "P / 0,1:R 2:P")
    assert hdtensor.item(pending) == 3.0
    inside = make(torch.tensor(3.0), "R / 0-2:P")
    ready = make(torch.tensor(True), "R / 0,1:R 2:R")
    assert hdtensor.item(ready) is True
    with pytest.raises(RuntimeError, match="24 elements"):
        hdtensor.item(make())
    reads = (torch.Tensor.item, bool, float)
    if rank == 3:  # a default would be a silent wrong answer
        for read in reads:
            with pytest.raises(NonLocalError, match=r"\[\[0, 1\], \[2\]\]"):
                read(ready)
    else:
        assert [read(ready) for read in reads] == [True, True, 1.0]
        with pytest.raises(DeductionError, match="pending"):
            pending.item()
        with ExplicitRedistributionContext(), pytest.raises(RuntimeError, match="implicit"):
            inside.item()
        assert [read(inside) for read in reads] == [3.0, True, 3.0]
    for compare in (torch.equal, torch.allclose):
        assert compare(make(), make())
        with pytest.raises(DeductionError, match="full_tensor"):
            compare(make(), torch.ones(make().shape))
    for convert in (torch.Tensor.tolist, torch.Tensor.numpy):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            convert(make())


@pytest.mark.dist(WORLD_SIZE)
def test_reading_values():
    run_world(_check_reads, WORLD_SIZE)


def _check_squeeze(rank):
    # A block of one row is not a dim of length 1.
    for shape, spec in [
        ((1, 4, 1), "S1[3:3:2] / 0:P 1:S1 2:S1"),
        ((2, 4, 1), "S0 / 0,1:S1 2:R"),
        ((3, 4, 1), "S0[2:1] / 0-2:S0 3:S1"),
        ((4, 4), "R / 0-3:S0"),
    ]:
        full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for squeeze in (
            torch.squeeze,
            lambda t: t.squeeze(0),
            lambda t: t.squeeze(1),
            lambda t: t.squeeze(-1),
            lambda t: t.squeeze((0, -1)),
            lambda t: t.clone().squeeze_(),
            lambda t: t.clone().squeeze_(-1),
        ):
            got, want = squeeze(make(full, spec)), squeeze(full)
            assert got.shape == want.shape
            assert got.to_local().shape == got._spec.local_shape()
            assert torch.equal(got.full_tensor(), want), (shape, spec)


@pytest.mark.dist(WORLD_SIZE)
def test_squeeze_looks_at_the_whole_tensor():
    run_world(_check_squeeze, WORLD_SIZE)


def _check_memory(rank):
    x = make()
    assert f"{make(torch.tensor(2.0), 'R / 0-3:R'):.3f}" == "2.000"
    assert f"{x}" == repr(x)
    assert x.share_memory_() is x
    assert x.to_local().is_shared()
    for reach in (lambda: x.apply_(abs), lambda: torch.from_dlpack(x)):  # torch itself would crash
        with pytest.raises(DeductionError, match="to_local"):
            reach()
    assert x.is_same_size(x + 1)
    assert not x.is_same_size(x.t())
    assert not x.is_pinned()


@pytest.mark.dist(WORLD_SIZE)
def test_memory():
    run_world(_check_memory, WORLD_SIZE)


def _check_assignment(rank):
    for spec in (SPEC, "R / 0,1:S1 2:R", "S0[0:1] / 0:R 1-3:S1"):
        x, plain = make(X, spec).clone(), X.clone()
        for assign in (
            lambda t: t.__setitem__(slice(None), 2.0),
            lambda t: t.__setitem__(t > 5, -1.0),
            lambda t: t.__setitem__(t > 5, torch.tensor(-1.0)),
            lambda t: t.fill_(torch.tensor(3.0)),
            lambda t: t.__setitem__(..., t * 2),
        ):
            assign(x)
            assign(plain)
            assert torch.equal(x.full_tensor(), plain), spec
    x = make(X, "R / 0,1:S1 2:R").clone()
    x[1] = 7.0
    x[2:, :] = make(torch.zeros(2, 6), "R / 0,1:S1 2:R")
    want = X.clone()
    want[1] = 7
    want[2:] = 0
    assert torch.equal(x.full_tensor(), want)
    # Integers choose a shape that is known; a mask's count is data.
    rows = make(torch.tensor([3, 0, 0]), "R / 0,1:R 2:R")
    assert torch.equal(x[rows].full_tensor(), want[[3, 0, 0]])
    assert torch.equal(x[:, rows].full_tensor(), want[:, [3, 0, 0]])
    with pytest.raises(DeductionError, match="depends on the data"):
        x[x > 3]


@pytest.mark.dist(WORLD_SIZE)
def test_assignment_and_indexing():
    run_world(_check_assignment, WORLD_SIZE)


def _check_shape_in_place(rank):
    for change in (
        lambda x: x.unsqueeze_(0),
        lambda x: x.unsqueeze_(-1).squeeze_(),
        lambda x: x.unsqueeze_(1).squeeze_(1),
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
    ):
        x, plain = make().clone(), X.clone()
        assert change(x) is x
        change(plain)
        assert x.shape == plain.shape
        assert x.stride() == plain.stride()
        assert torch.equal((x * 2).full_tensor(), plain * 2)


@pytest.mark.dist(WORLD_SIZE)
def test_changing_shape_in_place():
    run_world(_check_shape_in_place, WORLD_SIZE)


def _check_writes_into_views(rank):
    # A view of a cut dim moves data. What is written there would be lost, so it is refused.
    x = make(X, "R / 0,1:S1 2:S0").clone()
    uneven = make(X[:, :5], "R / 0,1:S1 2:S0").clone()
    for write in (
        lambda: uneven.view(-1).mul_(2),
        lambda: x[:, 1:3].zero_(),
        lambda: x[0].normal_(),
        lambda: x[:, :2][:1].add_(1),
        lambda: torch._foreach_add_([x[:, 0]], 1.0),
    ):
        with pytest.raises(DeductionError, match="shares no memory"):
            write()
    assert torch.equal(x.full_tensor(), X)
    assert torch.equal(uneven.full_tensor(), X[:, :5])
    assert torch.equal(x[:, 1:3].clone().zero_().full_tensor(), torch.zeros(4, 2))
    # Where the view is a view on every rank, the write arrives.
    y = make(X, "R / 0,1:S1 2:R").clone()
    y[1].zero_()
    y.t()[:, 2].add_(1)
    y.view(-1).mul_(2)  # (4, 6) cut on columns is a strided shard of 24
    plain = X.clone()
    plain[1] = 0
    plain[2] += 1
    plain *= 2
    assert torch.equal(y.full_tensor(), plain)


@pytest.mark.dist(WORLD_SIZE)
def test_writes_into_views_arrive_or_are_refused():
    run_world(_check_writes_into_views, WORLD_SIZE)


def _check_modules(rank):
    seen = []
    module = nn.Linear(6, 4, bias=False)
    module.weight = nn.Parameter(make(torch.ones(4, 6), "R / 0,1:R 2:R"))
    module.register_forward_pre_hook(lambda m, args: seen.append(type(args[0])))
    module.register_forward_hook(lambda m, args, out: seen.append(type(out)))
    module.register_full_backward_hook(lambda m, gi, go: seen.append((type(gi[0]), type(go[0]))))
    x = make(X, "S0[3:1] / 0,1:R 2:R").requires_grad_()
    module(x).sum().backward()
    assert seen == [HDTensor, HDTensor, (HDTensor, HDTensor)]
    for fill in (nn.init.zeros_, nn.init.ones_, nn.init.normal_, nn.init.kaiming_uniform_):
        fill(module.weight)
        assert type(module.weight.detach()) is HDTensor


@pytest.mark.dist(WORLD_SIZE)
def test_module_hooks_and_init():
    run_world(_check_modules, WORLD_SIZE)
