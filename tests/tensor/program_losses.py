"""Losses, dropout and writes in place of random programs."""

import math

import torch
import torch.nn.functional as F
from hdtensor.triton_kernels import counter_random

from hdtensor.ops.special.random import draw_key
from tests.tensor.program_ops import op


def _cross_entropy(draw):
    (x,) = draw.floats(dims=2, nonempty=True)
    rows, classes = draw.shape(x)
    weight = (draw.weights(classes),) if draw.flip() else ()
    return (x, draw.ints((rows,), classes), *weight), {
        "ignore_index": draw.rng.choice([-100, 0, 1]),
        "reduction": draw.rng.choice(["mean", "mean", "sum", "none"]),
        "label_smoothing": draw.rng.choice([0.0, 0.0, 0.1]),
    }


@op(_cross_entropy, weight=4)
def cross_entropy(x, target, weight=None, **options):
    return F.cross_entropy(x, target, weight, **options)


def _loss(draw):
    (x,) = draw.floats(nonempty=True)
    return (x, draw.with_shape(draw.shape(x))), {
        "kind": draw.rng.choice(
            ["mse", "l1", "huber", "smooth_l1", "bce_logits", "bce", "soft_margin", "kl"]
        ),
        "reduction": draw.rng.choice(["mean", "mean", "sum", "none"]),
    }


@op(_loss, weight=4)
def loss(x, y, kind, reduction):
    match kind:
        case "mse":
            return F.mse_loss(x, y, reduction=reduction)
        case "l1":
            return F.l1_loss(x, y, reduction=reduction)
        case "huber":
            return F.huber_loss(x, y, reduction=reduction, delta=0.7)
        case "smooth_l1":
            return F.smooth_l1_loss(x, y, reduction=reduction, beta=0.7)
        case "bce_logits":
            return F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction)
        case "bce":
            return F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction)
        case "soft_margin":
            return F.soft_margin_loss(x, y.sign(), reduction=reduction)
        case "kl":
            return F.kl_div(x, y.sigmoid(), reduction=reduction)


def _dropout(draw):
    return draw.floats(), {"seed": draw.rng.randint(0, 9), "p": draw.rng.choice([0.3, 0.5])}


@op(_dropout)
def dropout(x, seed, p):
    torch.manual_seed(seed)
    if type(x) is not torch.Tensor:
        return F.dropout(x, p)

    mask = torch.empty(x.shape, dtype=torch.bool)
    strides = [math.prod(x.shape[d + 1 :]) for d in range(x.ndim)]
    counter_random.keep_mask(mask, draw_key(), (0,) * x.ndim, strides, 1 - p)
    return x * mask / (1 - p)


def _in_place(draw):
    (x,) = draw.floats()
    return (x, draw.broadcastable(x, grows=False)), {
        "how": draw.rng.choice(
            ["add", "mul", "sub", "copy", "relu", "zero", "fill", "clamp", "masked"]
        )
    }


@op(_in_place, weight=3)
def in_place(x, y, how):
    x = x.clone()
    return write(x, y, how)


def write(x, y, how):
    match how:
        case "add":
            return x.add_(y, alpha=2)
        case "mul":
            return x.mul_(y)
        case "sub":
            return x.sub_(y)
        case "copy":
            return x.copy_(y)
        case "relu":
            return x.relu_()
        case "zero":
            return x.zero_()
        case "fill":
            return x.fill_(0.5)
        case "clamp":
            return x.clamp_(-1, 1)
        case "masked":
            return x.masked_fill_(y > 0, 0.25)


def _assign(draw):
    (x,) = draw.floats(min_dims=1)
    return (x,), {
        "index": draw.index(x),
        "how": draw.rng.choice(["set", "mul", "view", "transpose"]),
    }


@op(_assign, weight=2)
def assign(x, index, how):
    x = x.clone()
    at = tuple(slice(*i) if isinstance(i, tuple) else i for i in index)
    match how:
        case "set":
            x[at] = 0.5
        case "mul":
            x[at].mul_(3)
        case "view":
            x.view(-1).mul_(2)
        case "transpose":
            x.transpose(0, -1)[0:1].add_(1)
    return x
