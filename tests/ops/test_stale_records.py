"""A second call must not remember what the first one's key left out: device, default dtype, kind of number, modes."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hdtensor import HDTensor, as_rank, distribute_tensor
from hdtensor.ops import generate
from hdtensor.ops.dispatch import clear_caches


SPEC = "R / 0,1:R 2:R"
#: In the first subgroup, in the second, and outside of both.
RANKS = (0, 2, 3)

#: Kinds of records: one result of the operand's dtype, of another, several, by special rules, by foreach, by keyword.
CALLS = {
    "add int": lambda t: t + 1,
    "add float": lambda t: t + 1.0,
    "add bool": lambda t: t + True,
    "mul complex": lambda t: t * 1j,
    "div": lambda t: t / 2,
    "rsub": lambda t: 1.0 - t,
    "power": lambda t: t**2,
    "power float": lambda t: t**2.0,
    "sin": lambda t: t.sin(),
    "compare": lambda t: t > 0,
    "where": lambda t: torch.where(t > 0, t, 0.5),
    "sum": lambda t: t.sum(1),
    "mean": lambda t: t.float().mean(),
    "view": lambda t: t.view(4, 2, 6),
    "transposed": lambda t: t.t(),
    "matmul": lambda t: t.float() @ t.float().t(),
    "cat": lambda t: torch.cat([t, t], 1),
    "split": lambda t: t.split(3, 1)[1],
    "max": lambda t: t.max(1)[1],
    "softmax": lambda t: t.float().softmax(1),
    "layer norm": lambda t: F.layer_norm(t.float(), (6,)),
    "zeros_like": torch.zeros_like,
    "full_like": lambda t: torch.full_like(t, 1),
    "new_full": lambda t: t.new_full((8, 6), 2),
    "fill": lambda t: t.clone().fill_(1),
    "foreach": lambda t: torch._foreach_add([t, t], 1.5)[1],
    "foreach sqrt": lambda t: torch._foreach_sqrt([t * t, t * t])[0],
    "number": lambda t: t * torch.tensor(2.0, device=t.device),
    "dropout": lambda t: F.dropout(t.float(), 0.5)[:0],
}

FLOATS = torch.linspace(-2.0, 3.0, 48).reshape(8, 6)
WHOLE = torch.arange(48).reshape(8, 6)


def _compare(tensor, names=CALLS):
    """Call on plain tensors and on each rank's part; all is alike but what a rank outside does not hold."""
    for name in names:
        try:
            want = CALLS[name](tensor)
        except (RuntimeError, NotImplementedError):  # no such operator of this dtype
            continue
        for rank in RANKS:
            with as_rank(rank):
                x = distribute_tensor(tensor, SPEC, src_data_rank=None)
                got = CALLS[name](x)
            local, where = got.to_local(), f"{name} of {tensor.dtype} on {tensor.device}: {got!r}"
            assert isinstance(got, HDTensor), where
            assert got.shape == want.shape, where
            assert {got.dtype, local.dtype, got._spec.dtype} == {want.dtype}, where
            assert {got.device, local.device} == {want.device}, where
            assert got.requires_grad == want.requires_grad, where
            if rank != 3 and not want.is_meta:
                torch.testing.assert_close(local, want)


@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "cpu")], ids="-".join)
def test_of_another_device(devices):
    clear_caches()
    for device in devices:
        for tensor in (FLOATS, WHOLE):
            _compare(tensor.to(device))


def test_under_another_default_dtype():
    clear_caches()
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for tensor in (WHOLE, WHOLE > 5, FLOATS):
                _compare(tensor)
    finally:
        torch.set_default_dtype(before)


def test_of_numbers_of_one_value_and_other_kinds():
    for names in (("add int", "add float", "add bool"), ("power", "power float")):
        for order in itertools.permutations(names):
            clear_caches()
            for tensor in (WHOLE, FLOATS, WHOLE > 5):
                _compare(tensor, order)


def test_in_another_mode():
    clear_caches()
    leaf = FLOATS.clone().requires_grad_()
    for _ in range(2):
        _compare(FLOATS)
        _compare(leaf)
        with torch.no_grad():
            _compare(leaf)
        with torch.inference_mode():
            _compare(FLOATS.clone())
        with torch.autocast("cpu", torch.bfloat16):
            _compare(FLOATS)
    with torch.device("meta"):
        _compare(FLOATS)


def test_an_empty_part_of_inference_serves_autograd_later(monkeypatch):
    monkeypatch.setattr(generate, "_empties", {})
    with as_rank(3), torch.inference_mode():
        assert (distribute_tensor(FLOATS, SPEC, src_data_rank=None) > 0).is_inference()
    with as_rank(3):
        found = distribute_tensor(FLOATS, SPEC, src_data_rank=None) > 0
        assert not found.to_local().is_inference()


def test_the_gradient_of_a_pending_maximum_asks_for_nan():
    """Its formula calls ``isnan`` in backward, as ``detect_anomaly`` does, which is off here."""
    with as_rank(3):
        x = distribute_tensor(FLOATS, "R / 0,1:P 2:R", src_data_rank=None).requires_grad_()
        x.max().backward()
        assert x.grad.shape == FLOATS.shape


def test_a_longer_tensor_has_more_pieces():
    with as_rank(0):
        for length in (8, 12, 5, 9, 7):
            whole = torch.arange(6.0 * length).view(6, length)
            x = distribute_tensor(whole, "S0 / 0,1:R 2:R", src_data_rank=None)
            for found, expected in (
                (x.unbind(1), whole[:3].unbind(1)),
                (x.split(2, 1), whole[:3].split(2, 1)),
                (x.split([2, length - 2], 1), whole[:3].split([2, length - 2], 1)),
            ):
                for piece, one in zip(found, expected, strict=True):
                    assert torch.equal(piece.to_local(), one)
