"""Running a program on real ranks, and comparing with one device.

A call that hdtensor refuses is tried again with its operands replicated everywhere, which must work. Every rank notes
what happened; the outcomes must be alike, and all values those of one device.
"""

import torch
from torch.distributed.tensor import Replicate

from hdtensor import HDTensor, distribute_tensor
from hdtensor.errors import DeductionError, HDTensorError, RedistributeError, SpecError
from tests.redistribute.oracle import cut, layout_of
from tests.tensor.programs import coefficients, reference


ALLOWED = (DeductionError, SpecError, RedistributeError)


def whole(spec):
    return spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())


def place(x, rank):
    full = x.value()
    if x.from_local:
        layout = layout_of(x.spec, x.shape, x.top_sizes)
        local = cut(full, layout).get(rank, full.new_empty(0))
        out = HDTensor.from_local(local, x.spec, shape=x.shape, top_sizes=x.top_sizes)
    else:
        out = distribute_tensor(full, x.spec, top_sizes=x.top_sizes)
    return out.requires_grad_(x.grad)


def run_program(rank, program):
    """Return this rank's notes; raise on the first difference from one device."""
    notes = []
    want, want_grads = reference(program)
    values = {i: place(x, rank) for i, x in program.inputs.items()}
    for number, value in values.items():
        compare(program, number, "input", value, want[number])
    for step in program.steps:
        outs = _attempt(step, values, notes, program)
        for number, out in zip(step.results, outs, strict=True):
            values[number] = out
            compare(program, number, step, out, want[number])
    if program.losses:
        _backward(program, values, want_grads, notes)
    return notes


def _attempt(step, values, notes, program):
    try:
        return step.run(values)
    except ALLOWED as error:
        notes.append((step.name, type(error).__name__, _first(error)))
    replicated = dict(values)
    for i in step.operands:
        replicated[i] = values[i].redistribute(whole(values[i].spec))
    try:
        return step.run(replicated)
    except HDTensorError as error:
        raise AssertionError(
            f"{step} is refused on replicated operands: {error}\n{program}"
        ) from error


def _first(error):
    return str(error).split(":")[0]


def _backward(program, values, want, notes):
    total = None
    for i in program.losses:
        x = values[i]
        if x.spec.has_partial():
            x = x.redistribute(whole(x.spec))
        factor = distribute_tensor(coefficients(x.shape, i), whole(x.spec), src_data_rank=None)
        try:
            term = (x * factor).sum()
        except ALLOWED:
            x = x.redistribute(whole(x.spec))
            term = (x * factor).sum()
        term = term.redistribute(whole(term.spec))
        total = term if total is None else total + term
    try:
        total.backward()
    except ALLOWED as error:
        notes.append(("backward", type(error).__name__, _first(error), str(error)))
        return
    for i, grad in want.items():
        got = values[i].grad
        assert (got is None) == (grad is None), f"gradient of v{i} is {got}, want {grad}\n{program}"
        if grad is not None:
            compare(program, i, "gradient", got, grad)


def compare(program, number, step, got, want):
    assert isinstance(got, HDTensor), f"{step} gave {type(got)}"
    where = f"v{number} after {step}: {got!r}\n{program}"
    assert got.shape == want.shape, f"shape {tuple(want.shape)} wanted: {where}"
    assert got.dtype == want.dtype, f"dtype {want.dtype} wanted: {where}"
    assert tuple(got._local_tensor.shape) == got._spec.local_shape(), (
        f"local shape {tuple(got._local_tensor.shape)}, wanted {got._spec.local_shape()}: {where}"
    )
    full = got.detach().full_tensor()
    if not torch.allclose(full, want, rtol=1e-8, atol=1e-9, equal_nan=True):
        raise AssertionError(f"values differ, {where}\ngot {full}\nwant {want}")
