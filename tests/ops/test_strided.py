"""Average pooling of tensors that lie channels last, and strided views that name all elements in order, beside plain torch."""

import pytest
import torch
import torch.nn.functional as F

import hdtensor
from tests.support.world import run_world


LAYOUTS = [
    "S0[3:1] / 0,1:R 2:R",
    "S0[3:1] / 0,1:S0 2:R",
    "S0[1:0] / 0,1:S1 2,3:S0",
    "S1[1:2] / 0,1:S0 2:R",
    "R / 0,1:S1 2:R",
    "R / 1,2,3:S0",
]


def _draw(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.double)


def _pool_images(x):
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


def _pool_tokens(x):
    return F.adaptive_avg_pool1d(x.transpose(1, 2), 1).flatten(1)


def _regroup(x):
    return x.as_strided((7, 12), (12, 1)) * 2


def _check(rank):
    images = _draw(7, 6, 3, 2).to(memory_format=torch.channels_last)
    cases = [(_pool_images, images), (_pool_tokens, _draw(7, 6, 4)), (_regroup, _draw(7, 3, 4))]
    for layout in LAYOUTS:
        for function, x in cases:
            if function is not _pool_images and layout.startswith("S1"):
                continue  # the top tier would cut what is averaged, or inside of what becomes one dim
            expected = x.clone().requires_grad_()
            value = function(expected)
            value.square().sum().backward()
            placed = hdtensor.distribute_tensor(x, layout, src_data_rank=None).requires_grad_()
            out = function(placed)
            out.square().sum().backward()
            where = f"{function.__name__} {layout}"
            torch.testing.assert_close(out.detach().full_tensor(), value.detach(), msg=where)
            torch.testing.assert_close(placed.grad.full_tensor(), expected.grad, msg=where)


@pytest.mark.dist(4)
def test_equals_one_device():
    run_world(_check, 4)


def _refuse(rank):
    x = hdtensor.distribute_tensor(_draw(7, 6, 1, 1), "S0[3:1] / 0,1:R 2:R", src_data_rank=None)
    with pytest.raises(hdtensor.DeductionError, match=r"as_strided_.*shape or memory in place"):
        x.as_strided_((6, 7, 1, 1), (7, 1, 1, 1))
    with pytest.raises(hdtensor.DeductionError, match="as_strided"):
        x.as_strided((6, 7), (1, 6))
    return tuple(x.shape)


@pytest.mark.dist(4)
def test_other_strides_are_refused():
    assert run_world(_refuse, 4) == [(7, 6, 1, 1)] * 4
