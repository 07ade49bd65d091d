"""PyTorch's OpInfo database on ``HDTensor``s: every operator, sample and layout against plain torch.

``run_ops`` is a job for four gloo ranks. It runs each *case* (operator, layout, sample) forward and backward and
returns one ``Outcome`` for it. Ranks agree on every step, so that a rank that refuses alone is found and does not hang
the others. Samples, layouts and gradients are drawn from seeds named after the case: all ranks and all runs draw alike.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor as dtensor_distribute
from torch.distributed.tensor.experimental import (
    implicit_replication as dtensor_implicit_replication,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import hdtensor
from hdtensor import HDTensor
from tests.ops.agreement import CaseEndedError, agreed
from tests.ops.layouts import (
    DTENSOR,
    LAYOUTS,
    applies,
    dtensor_mesh_and_placements,
    layout_of,
    really_cuts,
)
from tests.ops.outcomes import IN_PLACE, OUT, RIGHT, WRONG, Case, Outcome


WORLD_SIZE = 4
RTOL, ATOL = 1e-3, 1e-4

#: Operators whose values are whatever the memory held.
SHAPE_ONLY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
SHAPE_ONLY |= {"new_empty_strided"}

#: Reads a value: raises by contract on a rank that holds none.
LEFT_OUT = {"item"}


@functools.cache
def ops() -> dict[str, Any]:
    """Return the operators that take float32 on CPU, by name and variant."""
    named = {o.full_name: o for o in op_db if torch.float32 in o.supported_dtypes("cpu")}
    return {name: op for name, op in sorted(named.items()) if name not in LEFT_OUT}


def run_ops(
    rank: int,
    names: list[str],
    layouts: list[str],
    max_samples: int,
    variants: tuple[str, ...] = ("",),
    skip: frozenset[Case] = frozenset(),
    journal: str | None = None,
) -> list[Outcome]:
    """Run all cases of the named operators; a job for ``run_world``.

    Args:
        rank: This rank.
        names: Operators, keys of ``ops()``.
        layouts: Keys of ``LAYOUTS``.
        max_samples: Most samples of an operator; they are taken evenly from its list.
        variants: Forms of the operators: "", ``IN_PLACE``, ``OUT``.
        skip: Cases that are known to end the processes.
        journal: File to which rank 0 writes every case before it runs and every outcome.
    """
    warnings.simplefilter("ignore")
    write = _journal(journal) if rank == 0 else lambda _: None
    outcomes = []
    for name in names:
        for number in _sample_numbers(name, max_samples):
            for layout, variant in itertools.product(layouts, variants):
                case = Case(name, layout, number, variant)
                if case in skip:
                    continue
                write({"start": dataclasses.asdict(case)})
                outcome = run_case(rank, case)
                if outcome is not None:
                    outcomes.append(outcome)
                    write({"outcome": dataclasses.asdict(outcome)})
    return outcomes


def _journal(path: str | None) -> Callable[[Any], None]:
    if path is None:
        return lambda _: None

    def write(entry: Any) -> None:
        with Path(path).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    return write


# -- samples ------------------------------------------------------------------------------------------


def seed(*words: Any) -> random.Random:
    """Seed every generator that samples draw from by what the words say."""
    number = zlib.crc32(repr(words).encode())
    torch.default_generator.manual_seed(number)  # torch.manual_seed formats a stack trace for CUDA
    np.random.seed(number)
    random.seed(number)
    return random.Random(number)


@functools.lru_cache(maxsize=2)
def _samples(name: str) -> list[Any]:
    op = ops()[name]
    seed(name)
    return list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))


def _sample_numbers(name: str, most: int) -> list[int]:
    try:
        num = len(_samples(name))
    except Exception:  # a sample function of the database that does not run on this machine
        return []
    return sorted({i * num // most for i in range(min(num, most))} if num > most else range(num))


def _fresh(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# -- one case -------------------------------------------------------------------------------------------


def run_case(rank: int, case: Case) -> Outcome | None:
    """Run one case; None if plain torch does not run the sample, or it has no tensor."""
    op, sample = ops()[case.op], _samples(case.op)[case.sample]
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    function = _function(op, case.variant)
    if function is None or not any(map(_is_tensor, leaves)) or any(map(_is_unusable, leaves)):
        return None
    if not applies(case.layout, next(filter(_is_cuttable, leaves), None)):
        return None

    def call(values: list[Any]) -> list[Any]:
        first, args, kwargs = tree_unflatten(values, structure)
        return tree_leaves(sample.output_process_fn_grad(function(first, *args, **kwargs)))

    plain = list(map(_fresh, leaves))
    try:
        seed(case, "oracle")
        wanted = call(plain)
        with _other_seeds():
            again = call(list(map(_fresh, leaves)))
    except Exception:
        return None
    is_random = case.op not in SHAPE_ONLY and any(map(_differ, wanted, again))
    if is_random and case.layout.startswith(DTENSOR):
        return None
    place = functools.partial(_distribute, case, leaves)
    is_cut = _cuts(case, leaves)
    phase = "forward"
    try:
        if is_random:
            plain = agreed(lambda: place(layout=LAYOUTS["whole"]))
            wanted = agreed(lambda: _seeded(case, call, plain))
            wanted = agreed(lambda: [_full(w) for w in wanted])
        operands = agreed(lambda: place(layout=layout_of(case.layout)))
        got = agreed(lambda: _seeded(case, call, operands))
        agreed(lambda: _compare(case, got, wanted))
        phase = "backward"
        if op.supports_autograd and not is_random and case.op not in SHAPE_ONLY:
            _check_backward(case, plain, wanted, operands, got)
    except CaseEndedError as stop:
        return Outcome(case, stop.kind, phase, stop.text, is_cut)
    return Outcome(case, RIGHT, phase, is_cut=is_cut)


def _function(op: Any, variant: str) -> Callable[..., Any] | None:
    """Return a form of the operator, None if it has none."""
    if variant == IN_PLACE:
        inplace = op.get_inplace()
        return inplace and (lambda first, *args, **kw: inplace(first.clone(), *args, **kw))
    if variant == OUT:
        return functools.partial(_with_out, op) if op.supports_out else None
    return op


def _with_out(op: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        out = tree_map(torch.empty_like, op(first, *args, **kwargs))
        return op(first, *args, **kwargs, out=out)


def _is_unusable(value: Any) -> bool:
    """Sparse, quantized and such tensors are no subject here."""
    return _is_tensor(value) and (value.layout != torch.strided or value.is_quantized)


@contextlib.contextmanager
def _other_seeds() -> Iterator[None]:
    """Draw other random numbers, also in operators of the database that seed by themselves."""
    manual_seed = torch.manual_seed
    torch.manual_seed(1)
    with mock.patch("torch.manual_seed", lambda number: manual_seed(number + 1)):
        yield


def _seeded(case: Case, call: Callable[[list[Any]], list[Any]], values: list[Any]) -> list[Any]:
    """Call with plain tensors that an operator makes for itself taken as replicated."""
    seed(case, "oracle")
    with hdtensor.implicit_replication(), dtensor_implicit_replication():
        return call(values)


def _differ(a: Any, b: Any) -> bool:
    if not _is_tensor(a) or a.layout != torch.strided:
        return False
    return a.shape != b.shape or not torch.allclose(a, b, equal_nan=True)


def _distribute(case: Case, leaves: list[Any], *, layout: Any) -> list[Any]:
    draw = seed(case.op, case.sample, "layout")
    first = next((v for v in leaves if _is_cuttable(v)), None)
    out = []
    for value in leaves:
        if not _is_tensor(value):
            out.append(value)
            continue
        value = _fresh(value)
        spec = layout(value, first, draw)
        if case.layout.startswith(DTENSOR):
            mesh, placements = dtensor_mesh_and_placements(spec)
            member = (
                dist.get_rank() in spec.ranks
            )  # the others compute the plain result, which is right
            out.append(
                dtensor_distribute(value, mesh, placements, src_data_rank=None) if member else value
            )
        else:
            out.append(hdtensor.distribute_tensor(value, spec, src_data_rank=None))
    return [_leaf(value) for value in out]


def _cuts(case: Case, leaves: list[Any]) -> bool:
    """Whether the layout cuts a tensor of the sample; draws as ``_distribute`` does."""
    draw, layout = seed(case.op, case.sample, "layout"), layout_of(case.layout)
    first = next((v for v in leaves if _is_cuttable(v)), None)
    return any(really_cuts(layout(v, first, draw), v) for v in leaves if _is_tensor(v))


def _leaf(value: Any) -> Any:
    if not _is_tensor(value) or value.is_leaf:
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _is_cuttable(value: Any) -> bool:
    return _is_tensor(value) and value.is_floating_point() and value.ndim > 0


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, HDTensor | DTensor) else value


def _check_backward(
    case: Case, plain: list[Any], wanted: list[Any], operands: list[Any], got: list[Any]
) -> None:
    pairs = [(w, g) for w, g in zip(wanted, got, strict=True) if _is_tensor(w) and w.requires_grad]
    inputs = [
        (p, o) for p, o in zip(plain, operands, strict=True) if _is_tensor(p) and p.requires_grad
    ]
    if not pairs or not inputs:
        return
    seed(case.op, case.sample, "gradients")
    weights = [torch.randn_like(w) for w, _ in pairs]
    try:
        sum((w * k).sum().abs() for (w, _), k in zip(pairs, weights, strict=True)).backward()
    except Exception:
        return  # plain torch has no gradient here

    def backward() -> None:
        loss = sum((_full(g) * k).sum().abs() for (_, g), k in zip(pairs, weights, strict=True))
        loss.backward()

    def compare() -> None:
        # All ranks collect everything before one of them may stop at a difference.
        grads = [None if o.grad is None else _full(o.grad) for _, o in inputs]
        for (p, o), grad in zip(inputs, grads, strict=True):
            if p.grad is not None and grad is not None:
                _close(grad, p.grad, f"gradient of {o!r}")
            elif (p.grad is None) != (grad is None):
                zero = p.grad if grad is None else grad
                if torch.count_nonzero(zero):
                    raise CaseEndedError(WRONG, f"gradient is {o.grad}, not {p.grad}")

    agreed(backward)
    agreed(compare)


def _compare(case: Case, got: list[Any], wanted: list[Any]) -> None:
    if len(got) != len(wanted):
        raise CaseEndedError(WRONG, f"{len(got)} results, not {len(wanted)}")
    shown, got = list(map(repr, got)), list(map(_full, got))
    for number, (g, w) in enumerate(zip(got, wanted, strict=True)):
        if not _is_tensor(w):
            if g != w and not (g != g and w != w):
                raise CaseEndedError(WRONG, f"result {number} is {g!r}, not {w!r}")
            continue
        if w.layout != torch.strided:
            continue
        shape_only = case.op in SHAPE_ONLY
        _close(g, w, f"result {number}, {shown[number]}", shape_only=shape_only)


def _close(got: torch.Tensor, want: torch.Tensor, what: str, shape_only: bool = False) -> None:
    got, want = got.detach(), want.detach()
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        raise CaseEndedError(
            WRONG, f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
        )
    if shape_only:
        return
    finite = want.nan_to_num(posinf=0.0, neginf=0.0) if want.dtype.is_floating_point else want
    scale = finite.abs().max().item() if want.numel() and want.dtype.is_floating_point else 1.0
    try:
        torch.testing.assert_close(
            got, want, rtol=RTOL, atol=ATOL * max(1.0, scale), equal_nan=True
        )
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line][:3]
        raise CaseEndedError(WRONG, f"{what}: {' '.join(lines)}") from error
