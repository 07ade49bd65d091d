"""Metadata by formula equals what torch's own meta functions answer, over many lengths and arguments."""

import itertools

import pytest
import torch

from hdtensor import HDSpec
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.calls import Call, as_list
from hdtensor.ops.exact_metas import _FORMULAS, exact_metas


aten = torch.ops.aten
WHOLE = HDSpec.from_text("R / 0:R")
LENGTHS = (0, 1, 2, 3, 5, 6, 9)
PLACES = (None, -7, -2, -1, 0, 1, 4, 5, 6, 99)


def _tensor(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def _slices():
    for length, start, end, step in itertools.product(LENGTHS, PLACES, PLACES, (1, 2, 4)):
        yield aten.slice.Tensor, (_tensor(2, length).t(), 0, start, end, step)
        yield aten.slice.Tensor, (_tensor(2, length, 3), -2, start, end, step)
    yield aten.slice.Tensor, (_tensor(4),)


def _views():
    shapes = ((-1,), (2, -1), (-1, 3), (4, 3), (12,), (3, 2, 2), (0,), (1, 12, 1), (-1, -1), (5,))
    for func, shape in itertools.product((aten.view.default, aten._unsafe_view.default), shapes):
        yield from ((func, (x, list(shape))) for x in (_tensor(4, 3), _tensor(3, 4).t()))
        yield func, (_tensor(0, 3), list(shape))
    for a, b in itertools.product(range(-4, 4), repeat=2):
        yield aten.transpose.int, (_tensor(2, 3, 4)[:, 1:], a, b)
    yield from ((aten.t.default, (_tensor(*shape),)) for shape in ((), (3,), (3, 4), (2, 3, 4)))
    for dims in (0, 1, -1, [0, 2], [1], [], [3], [-2, 0]):
        func = aten.squeeze.dim if isinstance(dims, int) else aten.squeeze.dims
        yield from ((func, (_tensor(n, 3, 1).transpose(0, 1), dims)) for n in (1, 2))


def _expansions():
    sizes = (
        (3,),
        (2, 3),
        (-1, 3),
        (4, -1, 3),
        (4, 2, -1),
        (1, 1, 3),
        (1, 5, 1, 3),
        (0, 3),
        (-1, -1, -1),
    )
    for size, shape in itertools.product(sizes, ((3,), (1, 3), (2, 1), (1,), ())):
        yield aten.expand.default, (_tensor(*shape), list(size))
        yield aten.expand.default, (_tensor(*shape, 2)[..., 0], list(size))


def _products():
    for m, k, n in itertools.product((0, 1, 4), (0, 3), (1, 5)):
        yield aten.mm.default, (_tensor(m, k), _tensor(n, k).t())
        yield aten.bmm.default, (_tensor(2, k, m).transpose(1, 2), _tensor(2, k, n))
    yield aten.mm.default, (_tensor(2, 3), _tensor(4, 5))
    yield aten.bmm.default, (_tensor(2, 3, 4), _tensor(3, 4, 5))


def _joins_and_pads():
    for a, b, dim in itertools.product(LENGTHS, LENGTHS, (0, 1, -1)):
        yield aten.cat.default, ([_tensor(a, 2), _tensor(b, 2)], dim)
        yield aten.cat.default, ([_tensor(2, a), _tensor(2, b), _tensor(2, 1)], dim)
    yield aten.cat.default, ([_tensor(0), _tensor(2, 3)],)
    yield aten.cat.default, ([_tensor(2), _tensor(3, dtype=torch.int64)],)
    for pad in ([1, 2], [-1, 0], [0, 1, 2, 3], [-3, 1], [1], [1] * 6, [-9, 2], []):
        yield from (
            (aten.constant_pad_nd.default, (x, pad)) for x in (_tensor(3, 4), _tensor(4, 3).t())
        )


def _losses():
    for n, reduction in itertools.product((0, 1, 5), (0, 1, 2)):
        scores, target = _tensor(n, 7), _tensor(n, dtype=torch.int64)
        yield aten.nll_loss_forward.default, (scores, target, None, reduction, -100)
        image, at = _tensor(n, 7, 2, 3), _tensor(n, 2, 3, dtype=torch.int64)
        yield aten.nll_loss2d_forward.default, (image, at, None, reduction, -100)
        grad, weight = _tensor(*([n] if not reduction else [])), _tensor()
        args = (grad, scores, target, None, reduction, -100, weight)
        yield aten.nll_loss_backward.default, args
    one = (_tensor(7), _tensor(dtype=torch.int64), None, 1, -100)
    yield aten.nll_loss_forward.default, one


def _copies():
    for x in (_tensor(3, 4), _tensor(3, 4).t(), _tensor(3, 4)[:, ::2], _tensor(1, 4).expand(3, 4)):
        yield aten.clone.default, (x,)
        yield aten.clone.default, (x, torch.contiguous_format)
    for n in LENGTHS:
        yield aten.slice_backward.default, (_tensor(2, min(n, 3)), [2, n], 1, 0, 3, 1)
        yield aten.select_backward.default, (_tensor(2), [2, n + 1], 1, 0)


CASES = {
    f.__name__[1:]: f
    for f in (_slices, _views, _expansions, _products, _joins_and_pads, _losses, _copies)
}


def _bound(value):
    if isinstance(value, list):
        return [_bound(v) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    return BoundSpec.of(WHOLE, value.shape, value.stride(), value.dtype, None)


def _run(func, args):
    """Return torch's answer, with a memory format by name."""
    *given, last = args
    if isinstance(last, torch.memory_format):
        return func(*given, memory_format=last)
    return func(*args)


@pytest.mark.parametrize("kind", CASES)
def test_a_formula_says_what_torch_says(kind):
    answered = set()
    for func, args in CASES[kind]():
        form = {"memory_format": args[-1]} if isinstance(args[-1], torch.memory_format) else {}
        call = Call(func, tuple(_bound(a) for a in args[: len(args) - len(form)]), form)
        metas = exact_metas(call)
        if metas is None:
            continue
        wanted = _run(func, args)  # what torch refuses has no metadata: this raises then
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        said = [tuple(m) for m in as_list(metas)]
        assert said == [(w.shape, w.stride(), w.dtype) for w in wanted], (func, args)
        answered.add(func)
    assert answered == {func for func, _ in CASES[kind]()}  # no formula that never answers


def test_every_formula_is_tried():
    tried = {func for cases in CASES.values() for func, _ in cases()}

    assert tried == set(_FORMULAS)
