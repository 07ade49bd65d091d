"""Small programs that are compiled: each runs on ``HDTensor``s and, with the same text, on one device's plain tensors.

Four ranks: 0 and 1 share a subgroup (TP 2), 2 is one of its own, 3 is outside. The batch of 6 is cut 2:1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hdtensor as hd


BATCH = "S0[2:1] / 0,1:R 2:R"
OTHER_BATCH = "S0[1:2] / 0,1:R 2:R"
FEATURES = "S1 / 0,1:R 2:R"
WHOLE = "R / 0,1:R 2:R"
COLUMNS = "R / 0,1:S1 2:R"
ROWS = "R / 0,1:S0 2:R"
ELSEWHERE = "R / 3:R"

#: Name -> (program, its arguments): each argument is (shape, spec), or (shape, spec, number of classes) for labels.
PROGRAMS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {}

X = ((6, 8), BATCH)
MLP = [X, ((8, 12), COLUMNS), ((12, 8), ROWS)]


def _program(*arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        PROGRAMS[function.__name__.strip("_")] = (function, list(arguments))
        return function

    return register


def to(x: torch.Tensor, spec: Any) -> torch.Tensor:
    """Redistribute; on one device there is nothing to do."""
    return x.redistribute(spec) if isinstance(x, hd.HDTensor) else x


@_program(*MLP)
def mlp(x, w1, w2):
    return (F.gelu(x @ w1) @ w2).sum()


@_program(X, ((8, 12), WHOLE), ((6,), BATCH, 12))
def cross_entropy(x, w, labels):
    return F.cross_entropy(x @ w, labels) + (x * x).mean()


@_program(X, ((8,), WHOLE), ((8,), WHOLE))
def norms(x, w, b):
    return (F.layer_norm(x, (8,), w, b) * F.rms_norm(x, (8,), w)).sum()


@_program(((6, 4, 8), BATCH))
def views(x):
    halves = torch.cat([x, x * 2], -1).chunk(2, -1)
    y = halves[1].view(6, 4, 2, 4).transpose(1, 2).reshape(6, 2, 16)
    return y.sum() + x[:, 1:3].pow(2).sum() + x[..., 0].unsqueeze(0).squeeze(0).exp().sum()


@_program(((6, 4, 8), BATCH), *[((8, 8), COLUMNS)] * 3)
def attention(x, wq, wk, wv):
    q, k, v = ((x @ w).view(6, 4, -1, 4).transpose(1, 2) for w in (wq, wk, wv))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(6, 4, 8).pow(2).sum()


@_program(((10, 8), ROWS), ((6, 3), BATCH, 10))
def embedding(w, ids):
    return F.embedding(ids, w).pow(2).sum()


@_program(X)
def elementwise(x):
    y = torch.where(x > 0, x, x * 0.1) + x.clamp(min=0) + F.softmax(x, -1) + x.cumsum(-1)
    return y.pow(2).sum() + x.topk(2, -1).values.sum() + (x * torch.ones_like(x)).sum()


@_program(((6, 3, 8, 8), BATCH), ((4, 3, 3, 3), WHOLE))
def convolution(x, w):
    return F.conv2d(x, w, padding=1).relu().sum()


@_program(X)
def in_place(x):
    y = x * 2
    y.add_(1)
    y.mul_(x)
    return y.sum()


@_program(X, ((6, 8), BATCH, 5))
def written_argument(x, y):
    y.add_(1).mul_(2)
    return (x * y).sum()


@_program(X)
def all_gather(x):
    return to(x * 2, WHOLE).pow(2).sum()


@_program(X, ((8, 12), WHOLE))
def all_reduce(x, w):
    return (to(x.t() @ x, WHOLE).pow(2) @ w).sum()


@_program(X)
def other_cuts(x):
    return to(to(x * 2, FEATURES).pow(2), OTHER_BATCH).exp().sum()


@_program(X)
def elsewhere(x):
    return to(to(x * 2, ELSEWHERE).pow(2), WHOLE).sum()


@_program(*MLP)
def several_outputs(x, w1, w2):
    h = x @ w1
    return h.view(6, 3, 4).exp(), (h @ w2).t(), x * x.detach()


@_program(*MLP)
def autocast(x, w1, w2):
    with torch.autocast("cpu", torch.bfloat16):
        h = F.gelu(x @ w1) @ w2
    return h.float().sum()


@_program(*MLP)
def checkpoints(x, w1, w2):
    def block(h):
        return to(F.gelu(to(h, BATCH) @ w1) @ w2, OTHER_BATCH)

    h = checkpoint(block, x, use_reentrant=False)
    return checkpoint(block, h, use_reentrant=False).exp().sum()


@_program(X)
def locals_and_wholes(x):
    weights = torch.arange(48.0, dtype=torch.float64).view(6, 8)
    if not isinstance(x, hd.HDTensor):
        return (x * 2 * x * weights).sum(), x.exp().sum()
    y = hd.HDTensor.from_local(x.to_local() * 2, x.spec, shape=(6, 8), check=False)
    return (y * x * hd.distribute_tensor(weights, BATCH)).sum(), x.full_tensor().exp().sum()


#: Programs that draw: their oracle is the same program that is not compiled.
DRAWING: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {}


def dropout(x, w1, w2):
    """Drop out, also inside of a checkpoint, whose keys must not be drawn again."""

    def block(h):
        return F.dropout(F.gelu(h @ w1), 0.5) @ w2

    h = checkpoint(block, F.dropout(x, 0.2), use_reentrant=False)
    return (h * torch.rand_like(x)).pow(2).sum() + torch.randn_like(x).sum()


def attention_dropout(x):
    """Drop out in attention."""
    q = x.view(6, 4, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).pow(2).sum()


DRAWING["dropout"] = (dropout, MLP)
DRAWING["attention_dropout"] = (attention_dropout, [((6, 4, 8), BATCH)])


def arguments(described: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Return plain arguments, the same on every rank; those that are no labels need gradients."""
    generator = torch.Generator().manual_seed(len(described))
    made = []
    for shape, _, *classes in described:
        if classes:
            made.append(torch.randint(0, classes[0], shape, generator=generator))
        else:
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
            made.append(drawn.requires_grad_())
    return made


def distributed(plain: list[torch.Tensor], described: list[tuple[Any, ...]]) -> list[Any]:
    """Cut the arguments."""
    return [
        hd.distribute_tensor(t.detach(), spec[1], src_data_rank=None).requires_grad_(
            t.requires_grad
        )
        for t, spec in zip(plain, described, strict=True)
    ]
