"""Arithmetic of random programs: pointwise, contractions, normalisation, reductions."""

import math

import torch
import torch.nn.functional as F

from tests.tensor.program_ops import OPS, op, over_dim


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


@op(over_dim, weight=2)
def softmax(x, dim):
    return x.softmax(dim)


@op(over_dim)
def log_softmax(x, dim):
    return F.log_softmax(x, dim)


@op(over_dim)
def logsumexp(x, dim):
    return torch.logsumexp(x, dim)


@op(over_dim)
def cumsum(x, dim):
    return x.cumsum(dim)


@op(over_dim)
def flip(x, dim):
    return x.flip(dim)


@op(over_dim)
def sort(x, dim):
    return x.sort(dim=dim, stable=True).values


@op(over_dim)
def roll(x, dim):
    return x.roll(1, dim)


@op(over_dim)
def normalize(x, dim):
    return F.normalize(x + 3, dim=dim)


@op(over_dim)
def max_of_dim(x, dim):
    return x.max(dim).values


@op(over_dim)
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
_reduce("std", lambda x, d, k: x.std(d or None, correction=0, keepdim=k and bool(d)))
_reduce("vector_norm", lambda x, d, k: torch.linalg.vector_norm(x + 2, 2, d or None, k))
_reduce("norm1", lambda x, d, k: torch.linalg.vector_norm(x, 1, d or None, k))
_reduce("norm_inf", lambda x, d, k: torch.linalg.vector_norm(x, math.inf, d or None, k))
_reduce("any", lambda x, d, k: ((x > 1).any(d[0], k) if d else (x > 1).any()).double())
_reduce("all", lambda x, d, k: ((x > -1).all(d[0], k) if d else (x > -1).all()).double())
_reduce("count", lambda x, d, k: ((x > 0).sum(d, k) if d else (x > 0).sum()).double())
_reduce("argmax", lambda x, d, k: (x.argmax(d[0], k) if d else x.argmax()).double())
_reduce("prod", lambda x, d, k: x.prod(d[0], k) if d else x.prod())


def _redistribute(draw):
    (x,) = draw.floats()
    spec, sizes = draw.layout(draw.shape(x), "float")
    return (x,), {"spec": spec, "sizes": sizes}


@op(_redistribute, weight=6)
def redistribute(x, spec, sizes):
    return x * 1 if type(x) is torch.Tensor else x.redistribute(spec, top_sizes=sizes)


@op(over_dim)
def cumprod(x, dim):
    return (x.tanh() + 2).cumprod(dim)


@op(over_dim)
def topk(x, dim):
    return x.topk((x.shape[dim] + 1) // 2, dim).values


def _tensordot(draw):
    (x,) = draw.floats(min_dims=2)
    return (x, draw.with_shape((*draw.shape(x)[-2:], draw.length()))), {}


@op(_tensordot)
def tensordot(x, y):
    return torch.tensordot(x, y, dims=2)


def _attention(draw):
    shape = (draw.length(), draw.rng.choice([1, 2, 4]), draw.length(), draw.rng.choice([2, 3]))
    if 0 in shape:
        shape = (2, 2, 3, 2)
    return tuple(draw.with_shape(shape) for _ in range(3)), {"is_causal": draw.flip()}


@op(_attention, weight=2)
def attention(q, k, v, is_causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _group_norm(draw):
    x = draw.with_shape((draw.length() or 2, 4, draw.length() or 3))
    return (x, draw.with_shape((4,)), draw.with_shape((4,))), {}


@op(_group_norm)
def group_norm(x, w, b):
    return F.group_norm(x, 2, w, b)


def _conv(draw):
    x = draw.with_shape((draw.length() or 2, 3, 5))
    return (x, draw.with_shape((draw.rng.choice([2, 4]), 3, 3))), {}


@op(_conv)
def conv1d(x, w):
    return F.conv1d(x, w, padding=1)


@op(_binary)
def cosine_similarity(a, b):
    return F.cosine_similarity(*torch.broadcast_tensors(a, b), dim=-1) if a.ndim else a * b
