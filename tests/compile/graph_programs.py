"""Programs for ranks 0 and 1 with TP 2 beside rank 2 alone; rank 3 is outside."""

import torch
import torch.nn.functional as F

import hdtensor as hd


ROWS = "S0[2:1] / 0,1:R 2:R"
WHOLE = "R / 0,1:R 2:R"
COLUMNS = "R / 0,1:S1 2:R"
INNER = "R / 0,1:S0 2:R"


def tensor(shape, spec, *, below=None):
    """Return the same tensor on every rank, cut; whole numbers below ``below``, else floats that require grad."""
    generator = torch.Generator().manual_seed(sum(shape))
    if below is not None:
        return hd.distribute_tensor(
            torch.randint(below, shape, generator=generator), spec, src_data_rank=None
        )
    values = torch.randn(shape, generator=generator)
    return hd.distribute_tensor(values, spec, src_data_rank=None).requires_grad_()


def mlp(x, w1, w2):
    return F.gelu(x @ w1) @ w2


def moves(x):
    return (x.redistribute("S1 / 0,1:R 2:R") ** 2).redistribute(WHOLE).sum()


def elsewhere(x):
    return (x * 2).redistribute("R / 3:R").pow(2).sum()


def loss(x, w, labels):
    return F.cross_entropy(x @ w, labels)


def tokens(table, ids):
    return F.embedding(ids, table).pow(2).sum()


def attention(x, w):
    q, k, v = (x @ w).view(6, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).pow(2).sum()


def several(x):
    return x * 2, x.sum()


def writes(x):
    y = x * 2
    y.add_(1)
    return (y.mul_(x)).sum()


def drops(x):
    return F.dropout(x, 0.5).sum()


PROGRAMS = {
    mlp: lambda: (tensor((6, 8), ROWS), tensor((8, 12), COLUMNS), tensor((12, 8), INNER)),
    moves: lambda: (tensor((6, 8), ROWS),),
    elsewhere: lambda: (tensor((6, 8), ROWS),),
    loss: lambda: (tensor((6, 8), ROWS), tensor((8, 12), WHOLE), tensor((6,), ROWS, below=12)),
    tokens: lambda: (tensor((10, 8), INNER), tensor((6,), ROWS, below=10)),
    attention: lambda: (tensor((6, 4, 8), ROWS), tensor((8, 24), COLUMNS)),
    several: lambda: (tensor((6, 8), ROWS),),
    writes: lambda: (tensor((6, 8), ROWS),),
    drops: lambda: (tensor((6, 8), ROWS),),
}
