"""Compiled programs give the values and gradients of one device, in one graph, compiled once."""

import functools
import time

import pytest
import torch

import hdtensor as hd
from tests.compile.programs import BATCH, DRAWING, PROGRAMS, arguments, distributed, to
from tests.support.world import run_world


ALL = sorted(PROGRAMS)
#: Inductor takes seconds a program.
FOR_INDUCTOR = ["attention", "other_cuts"]


def _compiled(function, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._inductor.config.compile_threads = 1  # each rank would start a pool of processes
    return torch.compile(function, fullgraph=True, backend=backend)


def _sum(outs):
    """Return one number of all results; each is weighted, so that none may stand for another."""
    outs = outs if isinstance(outs, tuple) else (outs,)
    total = 0.0
    for i, out in enumerate(outs):
        whole = out.full_tensor() if isinstance(out, hd.HDTensor) else out
        total = total + (i + 1) * whole.sum()
    return total


def _run(function, make, times):
    """Run a program some times on new arguments; return the last results."""
    for _ in range(times):
        args = make()
        total = _sum(function(*args))
        total.backward()
    return total.detach(), [a.grad for a in args]


def _check(rank, names, backend):
    for name in names:
        function, described = PROGRAMS[name]
        plain = arguments(described)
        cut = functools.partial(distributed, plain, described)
        total, found = _run(_compiled(function, backend), cut, 3)
        expected, gradients = _run(function, lambda plain=plain: plain, 1)
        rounding = (
            {"rtol": 0.02, "atol": 0.1} if name == "autocast" else {"rtol": 1e-6, "atol": 1e-8}
        )
        torch.testing.assert_close(total, expected, **rounding, msg=lambda m, n=name: f"{n}: {m}")
        for i, (grad, one) in enumerate(zip(found, gradients, strict=True)):
            if one is None:
                assert grad is None, name
                continue
            assert isinstance(grad, hd.HDTensor), name
            torch.testing.assert_close(
                grad.full_tensor(),
                one,
                **rounding,
                msg=lambda m, n=name, i=i: f"{n} gradient {i}: {m}",
            )
        _check_compiled_once(name)


def _check_compiled_once(name):
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1, name
    assert not counters["graph_break"], (name, counters["graph_break"])
    assert not counters["recompiles"], (name, counters["recompiles"])


@pytest.mark.dist(4)
@pytest.mark.parametrize("names", [ALL[::2], ALL[1::2]], ids=["first_half", "second_half"])
def test_values_and_gradients(names):
    run_world(_check, 4, names, "aot_eager", timeout=180)


@pytest.mark.dist(4)
def test_backend_eager():
    run_world(_check, 4, ["mlp", "other_cuts"], "eager", timeout=180)


@pytest.mark.dist(4)
@pytest.mark.timeout(300)
def test_inductor():
    run_world(_check, 4, FOR_INDUCTOR, "inductor", timeout=300)


def _check_drawn(rank, name, backend):
    function, described = DRAWING[name]
    results = []
    for run in (function, _compiled(function, backend)):
        cut = functools.partial(distributed, arguments(described), described)
        torch.manual_seed(3)
        total, gradients = _run(run, cut, 2)
        results.append((total, *[g.full_tensor() for g in gradients], torch.rand(())))
    for mine, one in zip(*results, strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-12)
    _check_compiled_once(name)


@pytest.mark.dist(4)
@pytest.mark.parametrize("name", sorted(DRAWING))
def test_random_numbers_are_those_of_eager_programs(name):
    run_world(_check_drawn, 4, name, "aot_eager", timeout=180)


def _new_groups(x):
    """Go through specs whose groups nobody has made."""
    return to(to(x.exp(), "S1[1:3] / 0,2:S0 1:R").pow(2), "R / 3,1:S1 2:R").sum()


def _check_apart(rank):
    plain = torch.arange(48.0, dtype=torch.float64).view(6, 8).div(48).requires_grad_()
    expected, (gradient,) = _run(_new_groups, lambda: [plain], 1)
    compiled = _compiled(_new_groups, "aot_eager")
    cut = functools.partial(distributed, [plain], [((6, 8), BATCH)])
    for wait in (rank, 3 - rank):
        time.sleep(0.3 * wait)
        total, (found,) = _run(compiled, cut, 1)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(found.full_tensor(), gradient)
        torch._dynamo.reset()  # all compile again, with groups that exist


@pytest.mark.dist(4)
def test_ranks_compile_at_different_moments():
    run_world(_check_apart, 4, timeout=180)
