"""Figure 13 and Table 2: which annotations operators change, at both tiers.

Deduction needs no processes: every rank's view is had with ``as_rank``.
"""

import pytest
import torch
import torch.nn.functional as F

import hdtensor as hd


GROUPS = "0,3:{a} 1:{b} 2,4:{c}"


def spec_of(top, a, b, c):
    return hd.HDSpec.from_text(f"{top} / {GROUPS.format(a=a, b=b, c=c)}")


def tensor(shape, spec, top_sizes=None):
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return hd.distribute_tensor(full, spec, top_sizes=top_sizes, src_data_rank=None)


# Y = Dot(X, W) with X [a, b, c] and W [c, d]; rows of the figure's right half.
TOP = [
    ("R", "R", "R"),
    ("S0", "R", "S0"),
    ("S1", "R", "S1"),
    ("S2", "S0", "P"),
    ("R", "S1", "S2"),
    ("P", "R", "P"),
    ("R", "P", "P"),
]


@pytest.mark.paper("Fig. 13")
@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize(("x", "w", "y"), TOP)
def test_hdim_of_dot(x, w, y, rank):
    with hd.as_rank(rank):
        result = torch.einsum(
            "ijk,kl->ijl",
            tensor((6, 6, 6), spec_of(x, "R", "R", "R")),
            tensor((6, 6), spec_of(w, "R", "R", "R")),
        )
    assert result.spec is spec_of(y, "R", "R", "R")


# The figure's left half, subgroup by subgroup: DS of X, of W, and of Y.
BOTTOM = [("S0", "R", "S0"), ("S2", "S0", "P"), ("R", "S1", "S2"), ("R", "R", "R"), ("P", "R", "P")]


@pytest.mark.paper("Fig. 13")
@pytest.mark.parametrize("first", BOTTOM)
@pytest.mark.parametrize("second", BOTTOM)
def test_ds_union_of_dot_is_deduced_subgroup_by_subgroup(first, second):
    (x0, w0, y0), (x2, w2, y2) = first, second
    with hd.as_rank(5):
        result = torch.einsum(
            "ijk,kl->ijl",
            tensor((4, 4, 4), spec_of("R", x0, "R", x2)),
            tensor((4, 4), spec_of("R", w0, "R", w2)),
        )
    assert result.spec is spec_of("R", y0, "R", y2)


@pytest.mark.paper("Table 2")
@pytest.mark.parametrize("operator", [F.gelu, F.relu, torch.neg, torch.exp, lambda x: x * 2])
@pytest.mark.parametrize("top", ["R", "S0", "S1"])
def test_most_operators_keep_the_annotation(operator, top):
    spec = spec_of(top, "S1" if top != "S1" else "S0", "R", "R")
    with hd.as_rank(0):
        assert operator(tensor((6, 6), spec)).spec is spec


@pytest.mark.paper("Table 2")
@pytest.mark.parametrize(
    ("operator", "top", "expected"),
    [
        (lambda x: x.sum(0), "S0", "P"),
        (lambda x: x.sum(1), "S0", "S0"),
        (lambda x: x.reshape(-1), "S0", "S0"),
        (lambda x: x.t(), "S0", "S1"),
        (lambda x: x.unsqueeze(0), "S0", "S1"),
    ],
)
def test_sum_and_reshape_change_hdim(operator, top, expected):
    with hd.as_rank(1):
        result = operator(tensor((7, 4), spec_of(top, "R", "R", "R"), top_sizes=(4, 1, 2)))
    assert result.spec is spec_of(expected, "R", "R", "R")


@pytest.mark.paper("6.1")
def test_unlike_subgroups_need_a_reshard():
    with hd.as_rank(0):
        x = hd.distribute_tensor(torch.ones(4, 4), "R / 0,1:R", src_data_rank=None)
        w = hd.distribute_tensor(torch.ones(4, 4), "R / 2,3:R", src_data_rank=None)
        with pytest.raises(hd.DeductionError, match=r"\[0, 1\].*\[2, 3\].*redistribute"):
            x @ w


@pytest.mark.paper("6.2")
def test_a_rank_outside_runs_nothing():
    spec = spec_of("S0", "R", "R", "R")
    with hd.as_rank(5):
        result = F.gelu(tensor((6, 6), spec)) @ tensor((6, 6), spec.replace(top=hd.Replicate()))
    assert not result.is_local
    assert result.to_local().shape == (0,)
    assert result.spec is spec
