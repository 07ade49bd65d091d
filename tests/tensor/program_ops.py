"""Operators of random programs: each runs alike on plain tensors and on ``HDTensor``s.

An entry is ``name -> (pick, run)``. ``pick(draw)`` chooses operands and plain arguments with the help of a
``Draw`` (see ``programs.py``), or returns None where the values at hand do not fit; ``run(*tensors, **params)``
returns a tensor or a tuple of them.
"""

import math

import torch
import torch.nn.functional as F


OPS = {}


def op(pick, *names, weight=1):
    """Register ``run`` under its name, chosen by ``pick``."""

    def register(run):
        OPS[run.__name__.strip("_")] = (pick, run, weight)
        return run

    return register


def _unary(draw):
    return draw.floats(), {}


for _name, _run in {
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "neg": torch.neg,
    "sin": torch.sin,
    "square": torch.square,
    "root": lambda x: torch.sqrt(x.abs() + 1),
    "soft_exp": lambda x: torch.exp(-x.abs()),
    "leaky_relu": F.leaky_relu,
    "softplus": F.softplus,
    "clamp": lambda x: x.clamp(-1.5, 1.5),
    "erf": torch.erf,
    "reciprocal": lambda x: 1 / (x.abs() + 1),
    "affine": lambda x: x * 0.5 - 3,
    "rsub": lambda x: 2 - x,
    "cast": lambda x: x.to(torch.complex128).real,
    "clone": torch.clone,
    "contiguous": lambda x: x.transpose(0, -1).contiguous() if x.ndim else x.contiguous(),
    "detach": lambda x: x.detach() * 1,
    "log1p": lambda x: torch.log1p(x.abs()),
    "tril": lambda x: x.tril() if x.ndim > 1 else x * 1,
}.items():
    OPS[_name] = (_unary, _run, 1)


# -- several operands ------------------------------------------------------------------------------


def _binary(draw):
    (x,) = draw.floats()
    return (x, draw.broadcastable(x)), {}


for _name, _run in {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b.abs() + 1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "add_scaled": lambda a, b: torch.add(a, b, alpha=3),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "atan2": lambda a, b: torch.atan2(a, b.abs() + 1),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "pow": lambda a, b: (a.abs() + 1) ** b.clamp(-1, 1),
}.items():
    OPS[_name] = (_binary, _run, 2)


def _mask(draw):
    (x,) = draw.floats()
    other = draw.broadcastable(x)
    return (x, other, draw.broadcastable(x)), {}


@op(_mask)
def where(x, other, by):
    return torch.where(by > 0, x, other)


@op(_mask)
def where_scalar(x, other, by):
    return torch.where(by > other, x, 0.0)


@op(_mask)
def masked_fill(x, other, by):
    return x.masked_fill((by > 0) & ~(other > 1), 0.5)


# -- contractions ----------------------------------------------------------------------------------


def _matmul(draw):
    (x,) = draw.floats(min_dims=1)
    k = draw.shape(x)[-1]
    kind = draw.rng.choice(["matrix", "matrix", "vector", "batched"])
    n = draw.length()
    batch = draw.shape(x)[:-2]
    shape = {"matrix": (k, n), "vector": (k,), "batched": (*batch, k, n)}[kind]
    return (x, draw.with_shape(shape)), {}


@op(_matmul, weight=4)
def matmul(x, y):
    return x @ y


def _linear(draw):
    (x,) = draw.floats(min_dims=1)
    n = draw.length()
    operands = (x, draw.with_shape((n, draw.shape(x)[-1])))
    return (*operands, draw.with_shape((n,))) if draw.flip() else operands, {}


@op(_linear, weight=4)
def linear(x, w, b=None):
    return F.linear(x, w, b)


def _addmm(draw):
    (x,) = draw.floats(dims=2)
    n = draw.length()
    m, k = draw.shape(x)
    return (
        draw.with_shape(draw.rng.choice([(m, n), (n,), (1, n)])),
        x,
        draw.with_shape((k, n)),
    ), {}


@op(_addmm)
def addmm(b, x, y):
    return torch.addmm(b, x, y, beta=0.5, alpha=2)


def _bmm(draw):
    (x,) = draw.floats(dims=3)
    b, _, k = draw.shape(x)
    return (x, draw.with_shape((b, k, draw.length()))), {}


@op(_bmm, weight=2)
def bmm(x, y):
    return torch.bmm(x, y)


def _einsum(draw):
    (x,) = draw.floats(dims=3)
    b, s, h = draw.shape(x)
    equation, shape = draw.rng.choice(
        [
            ("bsh,hk->bsk", (h, 3)),
            ("bsh,bth->bst", (b, 4, h)),
            ("bsh,bsh->bs", (b, s, h)),
            ("bsh,sk->bhk", (s, 2)),
            ("bsh,h->bs", (h,)),
            ("bsh,bk->shk", (b, 2)),
        ]
    )
    return (x, draw.with_shape(shape)), {"equation": equation}


@op(_einsum, weight=2)
def einsum(x, y, equation):
    return torch.einsum(equation, x, y)


def _outer(draw):
    (x,) = draw.floats(dims=1)
    return (x, draw.with_shape((draw.length(),))), {}


@op(_outer)
def outer(x, y):
    return torch.outer(x, y)


# -- normalisation ---------------------------------------------------------------------------------


def _over_dim(draw):
    (x,) = draw.floats(min_dims=1, nonempty=True)
    return (x,), {"dim": draw.dim(x)}


@op(_over_dim, weight=2)
def softmax(x, dim):
    return x.softmax(dim)


@op(_over_dim)
def log_softmax(x, dim):
    return F.log_softmax(x, dim)


@op(_over_dim)
def logsumexp(x, dim):
    return torch.logsumexp(x, dim)


@op(_over_dim)
def cumsum(x, dim):
    return x.cumsum(dim)


@op(_over_dim)
def flip(x, dim):
    return x.flip(dim)


@op(_over_dim)
def sort(x, dim):
    return x.sort(dim=dim, stable=True).values


@op(_over_dim)
def roll(x, dim):
    return x.roll(1, dim)


@op(_over_dim)
def normalize(x, dim):
    return F.normalize(x + 3, dim=dim)


@op(_over_dim)
def max_of_dim(x, dim):
    return x.max(dim).values


@op(_over_dim)
def glu(x, dim):
    return F.glu(x if x.shape[dim] % 2 == 0 else torch.cat([x, x], dim), dim)


def _norm(draw):
    (x,) = draw.floats(min_dims=1, nonempty=True)
    shape = draw.shape(x)
    last = draw.rng.randint(1, min(2, len(shape)))
    tail = shape[-last:]
    operands = (x, *(draw.with_shape(tail) for _ in range(draw.rng.randint(0, 2))))
    return operands, {"num_dims": last}


@op(_norm, weight=2)
def layer_norm(x, w=None, b=None, num_dims=1):
    return F.layer_norm(x, x.shape[-num_dims:], w, b)


@op(_norm, weight=2)
def rms_norm(x, w=None, b=None, num_dims=1):
    y = F.rms_norm(x, x.shape[-num_dims:], w)
    return y if b is None else y + b


@op(_norm)
def hand_rms_norm(x, w=None, b=None, num_dims=1):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return y if w is None else w * y


# -- reductions ------------------------------------------------------------------------------------


def _reduction(draw):
    (x,) = draw.floats(nonempty=True)
    num_dims = len(draw.shape(x))
    chosen = [d for d in range(num_dims) if draw.flip()]
    if not chosen and num_dims and draw.flip():
        chosen = [draw.dim(x)]
    return (x,), {"dims": chosen, "keepdim": draw.flip()}


def _reduce(name, function, weight=1):
    def run(x, dims, keepdim):
        return function(x, dims, keepdim) if dims else function(x, None, False)

    OPS[name] = (_reduction, run, weight)


_reduce("sum", lambda x, d, k: x.sum(d, k) if d else x.sum(), 2)
_reduce("mean", lambda x, d, k: x.mean(d, k) if d else x.mean(), 3)
_reduce("amax", lambda x, d, k: x.amax(d, k) if d else x.amax())
_reduce("amin", lambda x, d, k: x.amin(d, k) if d else x.amin())
_reduce("max", lambda x, d, k: x.max(d[0], k).values if d else x.max())
_reduce("var", lambda x, d, k: x.var(d, keepdim=k, correction=0) if d else x.var(correction=0), 2)
_reduce(
    "std",
    lambda x, d, k: (x + torch.arange(x.shape[-1] if x.ndim else 1, dtype=x.dtype) if 0 else x).var(
        d or None, correction=0, keepdim=k if d else False
    ),
)
_reduce("vector_norm", lambda x, d, k: torch.linalg.vector_norm(x + 2, 2, d or None, k))
_reduce("norm1", lambda x, d, k: torch.linalg.vector_norm(x, 1, d or None, k))
_reduce("norm_inf", lambda x, d, k: torch.linalg.vector_norm(x, math.inf, d or None, k))
_reduce("any", lambda x, d, k: ((x > 1).any(d[0], k) if d else (x > 1).any()).double())
_reduce("all", lambda x, d, k: ((x > -1).all(d[0], k) if d else (x > -1).all()).double())
_reduce("count", lambda x, d, k: ((x > 0).sum(d, k) if d else (x > 0).sum()).double())
_reduce("argmax", lambda x, d, k: (x.argmax(d[0], k) if d else x.argmax()).double())
_reduce("prod", lambda x, d, k: x.prod(d[0], k) if d else x.prod())


# -- shapes ----------------------------------------------------------------------------------------


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


@op(_over_dim)
def repeat(x, dim):
    times = [1] * x.ndim
    times[dim] = 2
    return x.repeat(times)


@op(_over_dim)
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


# -- look-ups and losses ---------------------------------------------------------------------------


def _embedding(draw):
    (table,) = draw.floats(dims=2, nonempty=True)
    shape = tuple(draw.length() for _ in range(draw.rng.randint(1, 2)))
    return (table, draw.ints(shape, draw.shape(table)[0])), {
        "padding_idx": draw.rng.choice([None, 0])
    }


@op(_embedding, weight=2)
def embedding(table, indices, padding_idx):
    return F.embedding(indices, table, padding_idx)


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


# -- random and in-place ---------------------------------------------------------------------------


def _dropout(draw):
    return draw.floats(), {"seed": draw.rng.randint(0, 9), "p": draw.rng.choice([0.3, 0.5])}


@op(_dropout)
def dropout(x, seed, p):
    torch.manual_seed(seed)
    if type(x) is not torch.Tensor:
        return F.dropout(x, p)
    from hdtensor.triton_kernels import counter_random  # noqa: PLC0415

    from hdtensor.ops.special.random import draw_key  # noqa: PLC0415

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
