"""What compiled programs met in random programs: operands that share memory, other sizes, operators under other names."""

import pytest
import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config

import hdtensor as hd
from tests.support.world import run_world


BATCH = "S0[2:1] / 0,1:R 2:R"


def _cut(seed):
    generator = torch.Generator().manual_seed(seed)
    return hd.distribute_tensor(torch.randn(6, 8, generator=generator), BATCH)


def _share(rank):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x, y: (x * y).sum(), fullgraph=True, backend="aot_eager")
    x, y = _cut(0), _cut(1)
    z = x * 2
    pairs = [(x, y), (z, z + 1), (z, z.exp()), (x.detach(), y.detach()), (x.exp(), y.tanh())]
    for _ in range(2):
        for a, b in pairs:
            torch.testing.assert_close(compiled(a, b).full_tensor(), (a * b).sum().full_tensor())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.dist(4)
def test_operands_that_share_an_empty_tensor_compile_nothing_anew():
    run_world(_share, 4)


def _batch_norm(rank):
    torch._dynamo.reset()

    def norm(x):
        return F.batch_norm(x, None, None, training=True).pow(3).sum()

    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = _cut(0).requires_grad_()
    total = compiled(x)
    total.backward()
    plain = x.detach().full_tensor().requires_grad_()
    expected = norm(plain)
    expected.backward()
    torch.testing.assert_close(total.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.dist(4)
def test_batch_norm_without_running_statistics():
    run_world(_batch_norm, 4)


def _dropout(rank):
    torch._dynamo.reset()
    compiled = torch.compile(lambda p: F.dropout(p * 1, 0.5), fullgraph=True, backend="aot_eager")
    for spec in ("R / 0,1:P 2:R", "P / 0,1:S0 2:R"):
        terms = hd.distribute_tensor(torch.rand(6, 8) + 1, spec).requires_grad_()
        out = compiled(terms)
        values, whole = out.full_tensor(), terms.detach().full_tensor()
        is_kept = values != 0
        assert 0 < is_kept.sum() < values.numel()
        torch.testing.assert_close(values, whole * 2 * is_kept)
        out.redistribute("R / 0,1:R 2:R").sum().backward()
        torch.testing.assert_close(terms.grad.full_tensor(), is_kept * 2.0)


@pytest.mark.dist(4)
def test_dropout_drops_the_terms_of_a_sum_together():
    run_world(_dropout, 4)


def _triangle(rank):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.triu(1) + x.tril(), fullgraph=True, backend="aot_eager")
    for spec in (BATCH, "R / 0,1:R 2:R", "R / 0,1:S1 2:S0"):
        for rows in (6, 9, 7):
            plain = torch.arange(8.0 * rows).view(rows, 8)
            x = hd.distribute_tensor(plain, spec).requires_grad_()
            out = compiled(x)
            torch.testing.assert_close(out.full_tensor(), plain)
            out.sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), torch.ones(rows, 8))


@pytest.mark.dist(4)
def test_triangles_of_other_sizes():
    run_world(_triangle, 4)


def _other_memory(rank):
    torch._dynamo.reset()

    def assign(x, y):
        y.data = x * 2
        return y + 1

    refused = r"another shape or memory in place is not possible\. Use .* t\.copy_\(other\)"
    with pytest.raises(RuntimeError, match=refused):
        torch.compile(assign, fullgraph=True, backend="aot_eager")(_cut(0), _cut(1))
    with pytest.raises(hd.DeductionError, match=refused):
        _cut(1).set_(_cut(0))


@pytest.mark.dist(4)
def test_other_memory_is_refused():
    run_world(_other_memory, 4)


def _written(x, y):
    x.detach().mul_(2.0)
    return (y * y).sum()


def _check_written(rank):
    torch._dynamo.reset()
    x, y = (
        hd.distribute_tensor(torch.ones(6, 4), "S0[2:1] / 0,1:S1 2,3:R").requires_grad_()
        for _ in range(2)
    )
    # torch guesses that such an input's gradient is plain zeros; this setting has it guess the input's own kind.
    setting = "disable_guess_zero_tangent_for_mutated_input_subclass"
    with functorch_config.patch({setting: True}):
        torch.compile(_written, fullgraph=True, backend="aot_eager")(x, y).backward()
    assert isinstance(x.grad, hd.HDTensor)
    assert x.grad.spec is x.spec
    assert not x.grad.full_tensor().any()
    torch.testing.assert_close(x.detach().full_tensor(), torch.full((6, 4), 2.0))
    torch.testing.assert_close(y.grad.full_tensor(), torch.full((6, 4), 2.0))


@pytest.mark.dist(4)
def test_a_gradient_of_what_is_only_written_is_as_the_tensor():
    run_world(_check_written, 4)
