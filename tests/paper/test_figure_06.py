"""Figures 4 and 6: the annotations of W, X and Y, symmetric and asymmetric.

The paper tells in words what the asymmetric example does (Fig. 4, right): "TP between GPU 0,3 and GPU
5,6; PP between GPU 1 and GPU 5,6; CP between GPU 2,4; and DP across them", with three sharding
subgroups, HDim 0 for X and -1 for W. X is ``[batch, sequence, hidden]`` and W ``[hidden, out]``.
"""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor.debug import visualize
from hdtensor.placements import HDSpec, check_top_sizes, local_shape, owned_boxes
from tests.placements.strategies import expected_local, numbered


R = Replicate()
TENSOR, PIPELINE, CONTEXT = (0, 3), (1,), (2, 4)  # the three device groups of the union

X = HDSpec.from_meshes([(TENSOR, [Shard(2)]), (PIPELINE, [R]), (CONTEXT, [Shard(1)])], hdim=0)
W = HDSpec.from_meshes([(TENSOR, [Shard(0)]), (PIPELINE, [R]), (CONTEXT, [R])], hdim=-1)
Y = HDSpec.from_meshes([(TENSOR, [Partial()]), (PIPELINE, [R]), (CONTEXT, [Shard(1)])], hdim=0)
X_SHAPE, W_SHAPE, Y_SHAPE = (9, 4, 6), (6, 5), (9, 4, 5)


def local(full, spec, rank):
    """What a GPU holds of a tensor, from its boxes."""
    sizes = check_top_sizes(spec, full.shape, None)
    out = full.new_zeros(local_shape(spec, tuple(full.shape), sizes, rank))
    for owned in owned_boxes(spec, tuple(full.shape), sizes, rank):
        out[owned.local_slices] = full[owned.box.slices_from((0,) * full.dim())]
    return out


@pytest.mark.paper("Fig. 6")
def test_both_tensors_have_three_sharding_subgroups():
    assert X.hsize == W.hsize == 3
    assert (X.hdim, W.hdim) == (0, -1)
    assert [group.ranks for group in X.subgroups] == [group.ranks for group in W.subgroups]
    assert (str(X), str(W)) == ("S0 / 0,3:S2 1:R 2,4:S1", "R / 0,3:S0 1:R 2,4:R")


@pytest.mark.paper("Fig. 6")
@pytest.mark.parametrize(
    ("rank", "x_box", "w_box"),
    [
        (0, ((0, 0, 0), (3, 4, 3)), ((0, 0), (3, 5))),
        (3, ((0, 0, 3), (3, 4, 6)), ((3, 0), (6, 5))),
        (1, ((3, 0, 0), (6, 4, 6)), ((0, 0), (6, 5))),
        (2, ((6, 0, 0), (9, 2, 6)), ((0, 0), (6, 5))),
        (4, ((6, 2, 0), (9, 4, 6)), ((0, 0), (6, 5))),
    ],
)
def test_each_gpu_owns_its_part_of_x_and_w(rank, x_box, w_box):
    sizes = check_top_sizes(X, X_SHAPE, None)
    assert sizes == (3, 3, 3)
    assert [owned.box for owned in owned_boxes(X, X_SHAPE, sizes, rank)] == [x_box]
    assert [owned.box for owned in owned_boxes(W, W_SHAPE, None, rank)] == [w_box]


@pytest.mark.paper("Fig. 4")
def test_the_dot_of_what_each_gpu_holds_is_its_part_of_y():
    """Sec. 4.1, 6.1: Y keeps the device groups and X's HDim; the split of the sum becomes Partial."""
    x, w = numbered(X_SHAPE), numbered(W_SHAPE)
    y = x @ w
    held = {rank: local(x, X, rank) @ local(w, W, rank) for rank in X.ranks}

    sizes = check_top_sizes(Y, Y_SHAPE, None)
    for rank in (1, 2, 4):
        assert torch.equal(held[rank], expected_local(y, Y, rank, sizes))
    assert torch.equal(held[0] + held[3], expected_local(y, Y, 0, sizes))
    assert not torch.equal(held[0], held[3])


@pytest.mark.paper("Fig. 12")
@pytest.mark.parametrize("rank", [5, 6])
def test_the_next_stage_holds_nothing_of_the_first(rank):
    """Sec. 6.2: "no tensors prior to Y' are placed on GPU 6"."""
    for spec, shape in ((X, X_SHAPE), (W, W_SHAPE), (Y, Y_SHAPE)):
        assert spec.index_of(rank) is None
        assert owned_boxes(spec, shape, check_top_sizes(spec, shape, None), rank) == ()


@pytest.mark.paper("Fig. 4")
def test_the_symmetric_example_is_one_subgroup():
    """Fig. 4 left: data parallel over (0,1) and (2,3), tensor parallel inside; HSize 1."""
    grid = torch.arange(4).reshape(2, 2)
    symmetric = {
        "X": (HDSpec.from_text("R / 0-3(2x2):S0,S2"), (4, 3, 6)),
        "W": (HDSpec.from_text("R / 0-3(2x2):R,S0"), (6, 5)),
    }
    x, w = (numbered(shape) for _, shape in symmetric.values())
    held = {
        rank: local(x, symmetric["X"][0], rank) @ local(w, symmetric["W"][0], rank)
        for rank in range(4)
    }
    rows = [held[a] + held[b] for a, b in grid.tolist()]  # Y is Partial over the second axis
    assert torch.equal(torch.cat(rows), x @ w)
    assert all(spec.hsize == 1 and spec.hdim == -1 for spec, _ in symmetric.values())


@pytest.mark.paper("Fig. 6")
def test_the_picture_of_w():
    assert visualize(W, W_SHAPE).splitlines() == [
        "R / 0,3:S0 1:R 2,4:R",
        "shape [6, 5], dim 0 down, dim 1 across",
        "  0       5",
        "0 +-------+",
        "  | 0-2,4 |",
        "3 +-------+",
        "  |  1-4  |",
        "6 +-------+",
    ]
