"""Users' cases C: tensors of several subgroups, and plain ones, in one operator, optimizer or norm."""

import itertools

import pytest
import torch
from torch import nn, optim

import hdtensor
from hdtensor import DeductionError, NonLocalError, distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
X = torch.arange(32.0).reshape(8, 4)


def cut(full, spec):
    return distribute_tensor(full, spec, src_data_rank=None)


def _check_total_norm(rank):
    parameters = [nn.Parameter(cut(X, spec)) for spec in ("R / 0,1:S0", "R / 0-3:S0")]
    for p in parameters:
        p.grad = cut(X, p.spec)
    total = sum(hdtensor.item(p.grad.square().sum()) for p in parameters) ** 0.5
    assert total == pytest.approx(
        144.3329, rel=1e-5
    )  # on every rank, also where a part lives elsewhere
    torch._foreach_mul_([p.grad for p in parameters], 1 / total)
    for p in parameters:
        assert torch.allclose(p.grad.full_tensor(), X / total)
    # Torch's own function stacks the norms: that would be an operator across subgroups.
    for p in parameters:
        p.grad = cut(X, p.spec)
    with pytest.raises(DeductionError, match=r"\[0, 1\].*\[0, 1, 2, 3\].*hdtensor.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(parameters, 1.0)
    assert hdtensor.clip_grad_norm_(parameters, 1.0).item() == pytest.approx(144.3329, rel=1e-6)
    for p in parameters:
        assert torch.allclose(p.grad.full_tensor(), X / (total + 1e-6))


@pytest.mark.dist(WORLD_SIZE)
def test_case_19_norm_over_two_meshes():
    run_world(_check_total_norm, WORLD_SIZE)


def _check_mixed_optimizer(rank):
    specs = [
        "R / 0-3:S0",
        "R / 0-3(2x2):S0,S1",
        "R / 0-3(2x2):R,S0",
        "S0[3:1] / 0,1:S1 3:R",
        "R / 2:R",
    ]
    for kind, options in itertools.product(
        (optim.AdamW, optim.SGD),
        ({}, {"foreach": True}, {"foreach": False}, {"fused": True}),
    ):
        ours = [nn.Parameter(cut(X, spec)) for spec in specs]
        plain = nn.Parameter(X.clone())
        optimizer, reference = kind(ours, lr=0.1, **options), kind([plain], lr=0.1)
        for step in range(2):
            plain.grad = X.cos() + step
            for p in ours:
                p.grad = cut(plain.grad, p.spec)
            optimizer.step()
            reference.step()
        for p in ours:
            torch.testing.assert_close(p.detach().full_tensor(), plain.detach())


@pytest.mark.dist(WORLD_SIZE)
def test_case_22_one_optimizer_over_meshes_of_all_kinds():
    run_world(_check_mixed_optimizer, WORLD_SIZE)


SPEC = "S0[3:1] / 0,1:S1 2:R"

#: (call with an HDTensor and a plain tensor, the operator and operand that the message must name)
MIXES = [
    (lambda x, t: x + t, "aten.add.Tensor", "'other'", (8, 4)),
    (lambda x, t: t - x, "aten.sub.Tensor", "'self'", (8, 4)),
    (lambda x, t: torch.cat([x, t]), "aten.cat.default", "'tensors[1]'", (8, 4)),
    (lambda x, t: x @ t.t(), "aten.mm.default", "'mat2'", (4, 8)),
    (lambda x, t: torch.where(t > 0, x, x), "aten.where.self", "'condition'", (8, 4)),
    (lambda x, t: t.add_(x), "aten.add_.Tensor", "'self'", (8, 4)),
    (lambda x, t: x.copy_(t), "aten.copy_.default", "'src'", (8, 4)),
    (
        lambda x, t: torch._foreach_add([x, x], [t, t]),
        "aten._foreach_add.List",
        "'other[0]'",
        (8, 4),
    ),
    (lambda x, t: torch.stack([t, x]), "aten.stack.default", "'tensors[0]'", (8, 4)),
    (lambda x, t: x * t[:1, :1], "aten.mul.Tensor", "'other'", (1, 1)),
]


def _check_plain_operands(rank):
    for call, op, operand, shape in MIXES:
        x = cut(X, SPEC).clone()
        with pytest.raises(DeductionError) as caught:
            call(x, X.clone())
        message = str(caught.value)
        for part in (op, operand, str(shape), SPEC, "implicit_replication", "distribute_tensor"):
            assert part in message, message
    # Where the user says that plain tensors are the same everywhere, they are taken as replicated.
    with hdtensor.implicit_replication():
        for call, want in [
            (lambda x: x + X, 2 * X),
            (lambda x: X.sin() * x, X.sin() * X),
            (lambda x: torch.cat([X, x], 1), torch.cat([X, X], 1)),
            (lambda x: torch.where(X > 5, x, X[0]), torch.where(X > 5, X, X[0])),
            (lambda x: x.masked_fill(X > 3, 0), X.masked_fill(X > 3, 0)),
        ]:
            assert torch.equal(call(cut(X, SPEC)).full_tensor(), want)
        with pytest.raises(DeductionError, match="writes to a plain tensor"):
            X.clone().add_(cut(X, "R / 0,1:S1 2:R"))
    with pytest.raises(DeductionError):  # and the context ends
        cut(X, SPEC) + X
    # Scalars need no context.
    assert torch.equal((cut(X, SPEC) + torch.tensor(2.0)).full_tensor(), X + 2)


@pytest.mark.dist(WORLD_SIZE)
def test_case_23_the_message_names_the_plain_operand():
    run_world(_check_plain_operands, WORLD_SIZE)


def _messages(rank):
    messages = []
    for a, b in [
        ("R / 0,1:S0", "R / 2,3:S0"),
        ("R / 0,1:S0", "R / 1,0:S0"),
        ("R / 0-3:S0", "R / 0-3(2x2):S0,R"),
        ("S0 / 0:R 1:R", "S0 / 0:R 2:R"),
        ("R / 0,1:R 2:R", "R / 0,1:R"),
    ]:
        with pytest.raises(DeductionError) as caught:
            cut(X, a) + cut(X, b)
        messages.append((a, b, str(caught.value)))
    return messages


@pytest.mark.dist(WORLD_SIZE)
def test_case_24_the_message_prints_unlike_subgroups_apart():
    ranks = run_world(_messages, WORLD_SIZE)
    assert all(messages == ranks[0] for messages in ranks)
    for a, b, message in ranks[0]:
        for part in (a, b, "redistribute", "'self'", "'other'"):
            assert part in message, message
    assert "[0, 1]" in ranks[0][0][2]
    assert "[2, 3]" in ranks[0][0][2]


def _check_outside(rank):
    # A rank outside gets the value or an error, never an empty tensor's default.
    for spec in ("R / 0,1:S0", "R / 2:S1", "S0[1:3] / 1,2:R 0:S1"):
        x = cut(X, spec)
        is_outside = rank not in x.spec.ranks
        for read, value in [
            (lambda t: t.sum(), 496.0),
            (lambda t: t.mean(), 15.5),
            (lambda t: t.amax(), 31.0),
            (lambda t: (t > 100).any(), False),
            (lambda t: (t >= 0).all(), True),
        ]:
            result = read(x)
            assert result.full_tensor().item() == value
            assert hdtensor.item(result) == value
            if is_outside:
                for convert in (torch.Tensor.item, bool, float, int):
                    with pytest.raises(NonLocalError, match=r"holds no part.*full_tensor"):
                        convert(result)
        assert torch.equal(x.full_tensor(), X)


@pytest.mark.dist(WORLD_SIZE)
def test_case_25_ranks_outside():
    run_world(_check_outside, WORLD_SIZE)
