"""Programs whose sizes change at every step: compiled beside eager, on TP 2 beside TP 1 beside a rank outside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hdtensor
from hdtensor import HDTensor


BATCH = "S0[3:1] / 0,1:R 2:R"
WHOLE = "R / 0,1:R 2:R"
COLUMN, ROW = "R / 0,1:S1 2:R", "R / 0,1:S0 2:R"

#: (batch, sequence) of each step; the top tier cuts 13 into 9 and 4.
SIZES = ((13, 6), (9, 10), (17, 4), (16, 7))


def tensor(*shape: int, spec: str, below: int = 0, top_sizes: Any = None) -> HDTensor:
    """Return a leaf cut by ``spec``: random, with a gradient; or whole numbers below ``below``."""
    generator = torch.Generator().manual_seed(sum(shape))
    if below:
        whole = torch.randint(0, below, shape, generator=generator)
    else:
        whole = torch.randn(*shape, generator=generator, dtype=torch.float64)
    cut = hdtensor.distribute_tensor(whole, spec, top_sizes=top_sizes).detach()
    return cut.requires_grad_(not below)


@dataclass
class Program:
    """A function, its operands for given sizes, and which of their dims change.

    Attributes:
        run: The function.
        make: ``make(batch, sequence) -> operands``.
        dims: (operand, dim) of the dims that change.
    """

    run: Callable[..., Any]
    make: Callable[[int, int], list[HDTensor]]
    dims: Sequence[tuple[int, int]] = ((0, 0), (0, 1))


@dataclass
class Seen:
    """What a program gave at a step: values, gradients and their layouts."""

    values: list[torch.Tensor] = field(default_factory=list)
    specs: list[Any] = field(default_factory=list)

    def take(self, tensors: Sequence[HDTensor]) -> None:
        """Add tensors."""
        self.values += [t.to_local().detach() for t in tensors]
        self.specs += [t._spec for t in tensors]


def step(run: Callable[..., Any], operands: list[HDTensor]) -> Seen:
    """Run forward and backward."""
    torch.manual_seed(len(operands))
    out = run(*operands)
    outs = out if isinstance(out, tuple) else (out,)
    seen = Seen()
    seen.take(outs)
    terms = [o.pow(2).redistribute(WHOLE).sum() if o.ndim else o for o in outs]
    loss = terms[0]
    for term in terms[1:]:
        loss = loss + term
    loss.backward()
    seen.take([x.grad for x in operands if x.requires_grad])
    return seen


def check(
    program: Program,
    *,
    backend: str = "aot_eager",
    mark: bool = True,
    dynamic: bool | None = None,
    sizes: Sequence[tuple[int, int]] = SIZES,
    limits: dict[str, int] | None = None,
) -> list[int]:
    """Compare every step with eager; return how many graphs there were after each.

    Args:
        program: The program.
        backend: Of ``torch.compile``.
        mark: Whether to mark the dims that change.
        dynamic: ``torch.compile``'s.
        sizes: (batch, sequence) of each step.
        limits: ``min`` and ``max`` of the marked dims.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(program.run, fullgraph=True, backend=backend, dynamic=dynamic)
    graphs = []
    for size in sizes:
        eager = step(program.run, program.make(*size))
        operands = program.make(*size)
        for operand, dim in program.dims if mark else ():
            torch._dynamo.mark_dynamic(operands[operand], dim, **(limits or {}))
        got = step(compiled, operands)
        assert got.specs == eager.specs, (size, got.specs, eager.specs)
        for a, b in zip(got.values, eager.values, strict=True):
            torch.testing.assert_close(a, b)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert not torch._dynamo.utils.counters["graph_break"]
    return graphs


def _layer(x: HDTensor, qkv: HDTensor, o: HDTensor, w1: HDTensor, w2: HDTensor) -> HDTensor:
    batch, length, _ = x.shape
    h = F.rms_norm(x, (8,))
    q, k, v = (h @ qkv).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    x = x + (h.reshape(batch, length, 8) @ o).redistribute(BATCH)
    return (x + F.gelu(x @ w1) @ w2).redistribute(BATCH).pow(2).mean()


def _attention(x: HDTensor, wq: HDTensor, wk: HDTensor, wv: HDTensor) -> HDTensor:
    batch, length, _ = x.shape
    q, k, v = ((x @ w).view(batch, length, -1, 4).transpose(1, 2) for w in (wq, wk, wv))
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(batch, length, 8).pow(2).sum()


def _language_model(tokens: HDTensor, table: HDTensor, head: HDTensor, labels: HDTensor) -> Any:
    h = F.layer_norm(F.embedding(tokens, table), (8,))
    scores = h @ head
    return F.cross_entropy(scores.view(-1, 12), labels.view(-1), ignore_index=3)


def _moves(x: HDTensor) -> HDTensor:
    x = x.redistribute(WHOLE) * 2
    x = x.redistribute("S1 / 0,1:R 2:R") * x.redistribute(BATCH).redistribute("S1 / 0,1:R 2:R")
    x = x.redistribute("S0[3:1] / 0,1:S2 2:R").pow(2).redistribute("S0[1:1] / 3:R 2:R")
    partial = x.flatten(0, 1).t() @ x.flatten(0, 1)
    return partial.redistribute("R / 3:R 2:R").pow(2).sum()


def _slices(x: HDTensor) -> Any:
    half = x[:, : x.shape[1] // 2]
    joined = torch.cat([half, x[:, 1:-1], x[..., :1].expand(-1, -1, 8)], 1)
    return joined.flatten(0, 1) * 2, x[:, -1] + 1, joined.transpose(0, 1) / x.shape[0]


def _checkpoint(x: HDTensor, w1: HDTensor, w2: HDTensor) -> HDTensor:
    def block(x: HDTensor) -> HDTensor:
        return F.gelu(F.dropout(x.redistribute(WHOLE), 0.2) @ w1) @ w2

    return checkpoint(block, x, use_reentrant=False).pow(2).sum()


def _dropout(x: HDTensor, w1: HDTensor, w2: HDTensor) -> Any:
    h = F.dropout(F.gelu(x @ w1), 0.5) @ w2
    return h.redistribute(WHOLE) * torch.rand_like(h).redistribute(WHOLE)


def _mlp(x: HDTensor, w1: HDTensor, w2: HDTensor) -> HDTensor:
    return (F.gelu(x @ w1) @ w2).pow(2).sum()


def _states(batch: int, length: int) -> HDTensor:
    return tensor(batch, length, 8, spec=BATCH)


def _tokens(batch: int, length: int, below: int) -> HDTensor:
    return tensor(batch, length, spec=BATCH, below=below)


def _square(spec: str) -> HDTensor:
    return tensor(8, 8, spec=spec)


PROGRAMS = {
    "checkpoint": Program(
        _checkpoint,
        lambda b, s: [_states(b, s), tensor(8, 16, spec=COLUMN), tensor(16, 8, spec=ROW)],
    ),
    "dropout": Program(
        _dropout,
        lambda b, s: [_states(b, s), tensor(8, 16, spec=COLUMN), tensor(16, 8, spec=ROW)],
    ),
    "layer": Program(
        _layer,
        lambda b, s: [
            _states(b, s),
            tensor(8, 24, spec=WHOLE),
            _square(ROW),
            tensor(8, 12, spec=COLUMN),
            tensor(12, 8, spec=ROW),
        ],
    ),
    "attention": Program(_attention, lambda b, s: [_states(b, s), *(_square(COLUMN),) * 3]),
    "language model": Program(
        _language_model,
        lambda b, s: [
            _tokens(b, s, 10),
            tensor(10, 8, spec=ROW),
            tensor(8, 12, spec=WHOLE),
            _tokens(b, s, 12),
        ],
        ((0, 0), (0, 1), (3, 0), (3, 1)),
    ),
    "moves": Program(_moves, lambda b, s: [_states(b, s)]),
    "slices": Program(_slices, lambda b, s: [_states(b, s)]),
    "mlp": Program(
        _mlp,
        lambda b, s: [_states(b, s), tensor(8, 12, spec=COLUMN), tensor(12, 8, spec=ROW)],
    ),
}
