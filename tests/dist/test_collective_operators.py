"""``hdtensor::`` operators on plain tensors: values, gradients, fakes, and what compilers keep of them."""

import pytest
import torch
import torch.distributed as dist

from hdtensor import RedistributeError
from hdtensor._torch_compat import FakeTensorMode
from hdtensor.collectives import operators  # noqa: F401 - defines the operators
from hdtensor.collectives.groups import ensure_channels, ensure_groups
from tests.support.world import run_world


OPS = torch.ops.hdtensor
RANKS = [0, 1, 2]
SIZES = [2, 0, 3]
#: What rank i sends rank j.
TABLE = [[1, 0, 2], [2, 2, 0], [0, 1, 3]]


def column(rank):
    return [row[rank] for row in TABLE]


def _programs(rank):
    """Name -> (this rank's input size, function)."""
    sent, received = TABLE[rank], column(rank)
    peers = [peer for peer in RANKS if peer != rank]
    return {
        "all_reduce": (5, lambda x: OPS.split_all_reduce(x, "sum", 3, RANKS)),
        "average": (5, lambda x: OPS.split_all_reduce(x, "avg", 3, RANKS)),
        "reduce_scatter": (5, lambda x: OPS.split_reduce_scatter(x, SIZES, rank, "avg", 3, RANKS)),
        "all_gather": (SIZES[rank], lambda x: OPS.split_all_gather(x, SIZES, rank, RANKS)),
        "all_to_all": (sum(sent), lambda x: OPS.split_all_to_all(x, sent, received, RANKS)),
        "send_recv": (
            sum(sent[p] for p in peers),
            lambda x: OPS.send_recv(
                x,
                [p for p in peers if sent[p]],
                [sent[p] for p in peers if sent[p]],
                [p for p in peers if received[p]],
                [received[p] for p in peers if received[p]],
                False,
            ),
        ),
    }


def _everyone(tensor):
    """Return every rank's tensor."""
    said = [None] * 3
    dist.all_gather_object(said, tensor)
    return said


def _reference(name, inputs, rank):
    """What a rank gets, by plain tensor operations on all ranks' inputs."""
    match name:
        case "all_reduce":
            return sum(inputs)
        case "average":
            return sum(inputs) / 3
        case "reduce_scatter":
            return (sum(inputs) / 3).split(SIZES)[rank]
        case "all_gather":
            return torch.cat(inputs)
        case "all_to_all":
            return torch.cat([inputs[p].split(TABLE[p])[rank] for p in RANKS])
        case "send_recv":
            parts = []
            for p in [p for p in RANKS if p != rank]:
                sizes = [TABLE[p][q] for q in RANKS if q != p]
                parts.append(inputs[p].split(sizes)[[q for q in RANKS if q != p].index(rank)])
            return torch.cat(parts)


def _check(rank, how):
    ensure_groups([tuple(RANKS)])
    ensure_channels()
    compiled = {
        "eager": lambda f: f,
        "aot_eager": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
        "inductor": lambda f: torch.compile(f, fullgraph=True),
    }[how]
    for name, (size, run) in _programs(rank).items():
        torch.manual_seed(rank)
        x = torch.randn(size, dtype=torch.float64, requires_grad=True)
        everyone = [t.requires_grad_() for t in _everyone(x.detach())]
        wanted = [_reference(name, everyone, r) for r in RANKS]

        got = compiled(run)(x)

        torch.testing.assert_close(got.detach(), wanted[rank].detach(), msg=f"{name}: {{}}".format)
        sum((i + 1) * (w**2).sum() for i, w in enumerate(wanted)).backward()
        ((rank + 1) * (got**2).sum()).backward()
        torch.testing.assert_close(x.grad, everyone[rank].grad, msg=f"{name}: {{}}".format)
        plain = x.detach()
        with FakeTensorMode() as mode:
            fake = run(mode.from_tensor(plain))
        assert (fake.shape, fake.dtype) == (got.shape, got.dtype)


@pytest.mark.dist(3)
@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
def test_values_gradients_and_fakes(how):
    run_world(_check, 3, how)


def _check_kept(rank):
    ensure_channels()

    def give(x):  # nobody uses the result here
        OPS.send_recv.default(x * 2, [1], [4], [], [], False)
        return x + 1

    def take(x):
        return x[:4] + OPS.send_recv.default(x[:0], [], [], [0], [4], False)

    for backend in ("aot_eager", "inductor"):
        torch.compiler.reset()
        run = torch.compile(give if rank == 0 else take, fullgraph=True, backend=backend)
        for _ in range(2):
            out = run(torch.arange(4.0))
        assert torch.equal(out, torch.arange(4.0) + 1 if rank == 0 else torch.arange(4.0) * 3)


@pytest.mark.dist(2)
def test_a_message_whose_result_is_not_used_is_sent():
    run_world(_check_kept, 2)


def _check_maximum(rank):
    ensure_groups([(0, 1)])
    x = torch.tensor([float(rank), 5.0], requires_grad=True)
    y = OPS.split_all_reduce(x, "max", 2, [0, 1])
    assert torch.equal(y, torch.tensor([1.0, 5.0]))
    with pytest.raises(RedistributeError, match="autograd through a pending max is not defined"):
        y.sum().backward()


@pytest.mark.dist(2)
def test_a_maximum_has_no_gradient():
    run_world(_check_maximum, 2)
