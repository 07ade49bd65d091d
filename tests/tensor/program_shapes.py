"""Views, joins, look-ups and indexing of random programs."""

import torch
import torch.nn.functional as F

from tests.tensor.program_ops import op, over_dim


def _view(draw):
    (x,) = draw.floats(min_dims=1)
    return (x,), {
        "shape": draw.regrouped(draw.shape(x)),
        "how": draw.rng.choice(["view", "reshape"]),
    }


@op(_view, weight=5)
def view(x, shape, how):
    return x.contiguous().view(shape) if how == "view" else x.reshape(shape)


def _any_dims(draw):
    return draw.floats(min_dims=1), {}


@op(_any_dims)
def flatten(x):
    return x.flatten()


def _transpose(draw):
    (x,) = draw.floats(min_dims=1)
    return (x,), {"a": draw.dim(x), "b": draw.dim(x)}


@op(_transpose, weight=2)
def transpose(x, a, b):
    return x.transpose(a, b)


@op(_transpose)
def movedim(x, a, b):
    return x.movedim(a, b)


def _permute(draw):
    (x,) = draw.floats(min_dims=1)
    dims = list(range(len(draw.shape(x))))
    draw.rng.shuffle(dims)
    return (x,), {"dims": dims}


@op(_permute)
def permute(x, dims):
    return x.permute(dims)


def _unsqueeze(draw):
    (x,) = draw.floats(max_dims=3)
    return (x,), {"dim": draw.rng.randint(-len(draw.shape(x)) - 1, len(draw.shape(x)))}


@op(_unsqueeze)
def unsqueeze(x, dim):
    return x.unsqueeze(dim)


def _squeeze(draw):
    (x,) = draw.floats(min_dims=1)
    return (x,), {"dim": draw.rng.choice([None, draw.dim(x)])}


@op(_squeeze)
def squeeze(x, dim):
    return x.squeeze() if dim is None else x.squeeze(dim)


def _expand(draw):
    (x,) = draw.floats(max_dims=3)
    shape = [draw.length() if n == 1 else draw.rng.choice([n, -1]) for n in draw.shape(x)]
    return (x,), {"shape": [*([draw.length()] if draw.flip() else []), *shape]}


@op(_expand)
def expand(x, shape):
    return x.expand(shape)


@op(over_dim)
def repeat(x, dim):
    times = [1] * x.ndim
    times[dim] = 2
    return x.repeat(times)


@op(over_dim)
def repeat_interleave(x, dim):
    return x.repeat_interleave(2, dim)


def _split(draw):
    (x,) = draw.floats(min_dims=1, nonempty=True)
    dim = draw.dim(x)
    length = draw.shape(x)[dim]
    how = draw.rng.choice(["split", "sizes", "chunk", "unbind"])
    cut = draw.rng.randint(0, length)
    return (x,), {
        "dim": dim,
        "how": how,
        "size": draw.rng.randint(1, length),
        "sizes": [cut, length - cut],
    }


@op(_split, weight=2)
def split(x, dim, how, size, sizes):
    match how:
        case "split":
            return x.split(size, dim)
        case "sizes":
            return x.split(sizes, dim)
        case "chunk":
            return x.chunk(size, dim)
        case "unbind":
            return x.unbind(dim)


def _slice(draw):
    (x,) = draw.floats(min_dims=1)
    return (x,), {"index": draw.index(x)}


@op(_slice, weight=3)
def index(x, index):
    return x[tuple(slice(*i) if isinstance(i, tuple) else i for i in index)]


def _join(draw):
    (x,) = draw.floats(min_dims=1, nonempty=True)
    dim = draw.dim(x)
    shape = list(draw.shape(x))
    others = []
    for _ in range(draw.rng.randint(1, 2)):
        other = list(shape)
        if draw.flip():
            other[dim] = draw.length()
        others.append(draw.with_shape(tuple(other)))
    return (x, *others), {"dim": dim}


@op(_join, weight=2)
def cat(*tensors, dim):
    return torch.cat(tensors, dim)


def _stack(draw):
    (x,) = draw.floats(max_dims=3)
    shape = draw.shape(x)
    return (x, draw.with_shape(shape)), {"dim": draw.rng.randint(0, len(shape))}


@op(_stack)
def stack(*tensors, dim):
    return torch.stack(tensors, dim)


def _pad(draw):
    (x,) = draw.floats(min_dims=1)
    return (x,), {"pad": [draw.rng.randint(0, 2), draw.rng.randint(0, 2)]}


@op(_pad)
def pad(x, pad):
    return F.pad(x, pad, value=0.5)


def _select(draw):
    (x,) = draw.floats(min_dims=1, nonempty=True)
    dim = draw.dim(x)
    return (x, draw.ints((draw.length(),), draw.shape(x)[dim])), {"dim": dim}


@op(_select)
def index_select(x, indices, dim):
    return x.index_select(dim, indices)


def _gather(draw):
    (x,) = draw.floats(min_dims=1, nonempty=True)
    dim = draw.dim(x)
    shape = list(draw.shape(x))
    shape[dim] = draw.rng.randint(1, 4)
    return (x, draw.ints(tuple(shape), draw.shape(x)[dim])), {"dim": dim}


@op(_gather)
def gather(x, indices, dim):
    return x.gather(dim, indices)


@op(_gather)
def scatter_add(x, indices, dim):
    return x.scatter_add(dim, indices, indices.double() + 1)


def _take_rows(draw):
    (x,) = draw.floats(min_dims=1, nonempty=True)
    return (x, draw.ints((draw.length(), 2), draw.shape(x)[0])), {}


@op(_take_rows)
def take_rows(x, indices):
    return x[indices]


def _embedding(draw):
    (table,) = draw.floats(dims=2, nonempty=True)
    shape = tuple(draw.length() for _ in range(draw.rng.randint(1, 2)))
    return (table, draw.ints(shape, draw.shape(table)[0])), {
        "padding_idx": draw.rng.choice([None, 0])
    }


@op(_embedding, weight=2)
def embedding(table, indices, padding_idx):
    return F.embedding(indices, table, padding_idx)
