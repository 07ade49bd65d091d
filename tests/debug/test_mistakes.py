"""Kinds of mistakes: the message names the operator, the operand, its shape, both lists of ranks, and what to call."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from hdtensor import DeductionError, NonLocalError, SpecError, as_rank, distribute_tensor
from hdtensor._torch_compat import abstract_mesh


X = torch.arange(32.0).reshape(8, 4)
SPEC = "S0[3:1] / 0,1:S1 2:R"
PARTS = "(8, 4) float32 S0[3:1] / 0,1:S1 2:R"


def _cut(spec, **options):
    return distribute_tensor(X, spec, src_data_rank=None, **options)


def _dtensor():
    return DTensor.from_local(X, abstract_mesh((1,), 0), [Replicate()], run_check=False)


#: name -> (call, what the message has).
OPERATORS = {
    "a plain tensor": (
        lambda: _cut(SPEC) + X,
        [
            "aten.add.Tensor",
            "'other'",
            "plain torch.Tensor of shape (8, 4)",
            PARTS,
            "[[0, 1], [2]]",
            "implicit_replication()",
            "distribute_tensor(t, spec)",
        ],
    ),
    "a plain tensor first": (
        lambda: torch.where(X > 0, _cut(SPEC), _cut(SPEC)),
        ["aten.where.self", "'condition'", "(8, 4)", "[[0, 1], [2]]", "distribute_tensor(t, spec)"],
    ),
    "a DTensor": (
        lambda: torch.cat([_cut(SPEC), _dtensor()]),
        ["aten.cat.default", "'tensors[1]'", "DTensor of shape (8, 4)", PARTS, "from_dtensor"],
    ),
    "other subgroups (cases 23, 24)": (
        lambda: _cut("R / 0,1:S0") + _cut("R / 2,3:S0"),
        [
            "aten.add.Tensor",
            "'self' lives on [0, 1]",
            "'other' on [2, 3]",
            "(8, 4) float32",
            "other.redistribute('R / 0,1:S0')",
        ],
    ),
    "other subgroups in a list": (
        lambda: torch._foreach_add([_cut(SPEC)], [_cut("R / 2,3:S0")]),
        [
            "aten._foreach_add.List",
            "'self[0]' lives on [0, 1] + [2]",
            "'other[0]' on [2, 3]",
            f"other[0].redistribute('{SPEC}')",
        ],
    ),
    "another mesh of the same ranks (case 24)": (
        lambda: _cut("R / 0-3:S0") + _cut("R / 0-3(2x2):S0,R"),
        ["'self' lives on [0, 1, 2, 3],", "'other' on [0, 1, 2, 3] as 2x2"],
    ),
    "another top cut": (
        lambda: _cut("S0 / 0:R 1:R") + _cut("S1 / 0:R 1:R"),
        [
            "aten.add.Tensor",
            "'other'",
            "(8, 4) float32 S1 / 0:R 1:R",
            "must be S0",
            "other = other.redistribute('S0 / 0:R 1:R')",
        ],
    ),
    "another top cut with other extents": (
        lambda: _cut("S0[3:1] / 0,1:S1 2:R") + _cut("S1 / 0,1:S0 2:R"),
        [
            "'self' is cut (6, 2)",
            "'other' (2, 2)",
            "other.redistribute('S0[3:1] / 0,1:S1 2:R', top_sizes=(6, 2))",
        ],
    ),
    "a collective of torch's own": (
        lambda: torch.ops._c10d_functional.all_reduce(_cut("R / 0-3:S0"), "sum", "0"),
        ["all_reduce", "how a tensor is cut", "hdtensor.item(t)", "t.to_local()"],
    ),
    "other extents": (
        lambda: _cut("S0[3:1] / 0:R 1:R") + _cut("S0[1:3] / 0:R 1:R"),
        [
            "aten.add.Tensor",
            "'self' is cut (6, 2)",
            "'other' (2, 6)",
            "(8, 4) float32 S0[1:3]",
            "other.redistribute('S0[3:1] / 0:R 1:R', top_sizes=(6, 2))",
        ],
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_what_operators_do_not_mix(name):
    call, parts = OPERATORS[name]
    texts = set()
    for rank in range(4):
        with as_rank(rank), pytest.raises(DeductionError) as caught:
            call()
        texts.add(str(caught.value))
    (text,) = texts  # the same on every rank
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, float, int], ids=str)
def test_reading_a_value_where_there_is_none(read):
    with as_rank(0):
        assert read(_cut("R / 0,1:R").sum() > 0) == 1
    with as_rank(3), pytest.raises(NonLocalError) as caught:
        read(_cut("R / 0,1:R").sum() > 0)
    for part in ("rank 3", "[[0, 1]]", "hdtensor.item(t)", "full_tensor()"):
        assert part in str(caught.value)


def test_a_spec_of_something_else():
    with as_rank(0):
        x = _cut(SPEC)
        with pytest.raises(SpecError, match=r"needs dim 3, but the tensor has 2 dims"):
            x.redistribute("S3 / 0:R 1:R")
        with pytest.raises(SpecError, match=r"'Q' is no placement\. Write S<dim>, R, P"):
            x.redistribute("Q / 0:R")


def test_an_out_variant_that_has_no_operand_of_ours():
    with as_rank(0):
        out = distribute_tensor(torch.ones(4, 6), "S0[3:1] / 0,1:S1 2:R", src_data_rank=None)
        with pytest.raises(
            DeductionError, match=r"aten\.add\..*no operand is one.*distribute_tensor"
        ):
            torch.add(torch.ones(4, 6), 1, out=out)
