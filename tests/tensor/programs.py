"""Random programs over random unlike subgroups: drawn once from a seed, run on one device and on ranks."""

import math
import random
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor.placements import HDSpec, Subgroup
from tests.tensor import program_losses, program_math, program_shapes  # noqa: F401 - they fill OPS
from tests.tensor.program_ops import OPS


WORLD_SIZE = 4
MAX_NUMEL = 2000
#: So many seeds in a row share their subgroups: process groups are dear.
GROUP_SEEDS = 16
MESHES = {1: [(1,), (1, 1)], 2: [(2,), (2,), (2, 1), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (2, 2)]}


@dataclass(frozen=True)
class Input:
    """One input: its values come from a seed."""

    shape: tuple
    kind: str  # "float", "int", "weight"
    high: int
    spec: str
    top_sizes: tuple | None
    grad: bool
    from_local: bool
    seed: int

    def value(self):
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == "int":
            return torch.randint(0, self.high, self.shape, generator=generator)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return values.abs() + 0.5 if self.kind == "weight" else values


@dataclass(frozen=True)
class Step:
    """One call: the operands' numbers, the results' numbers."""

    name: str
    operands: tuple
    params: dict
    results: tuple

    def run(self, values):
        out = OPS[self.name][1](*(values[i] for i in self.operands), **self.params)
        return tuple(out) if isinstance(out, tuple | list) else (out,)


@dataclass
class Program:
    """Inputs, calls, and the results that make the loss."""

    seed: int
    groups: tuple
    inputs: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    losses: tuple = ()

    def __str__(self):
        lines = [f"program {self.seed}"]
        for i, x in self.inputs.items():
            lines.append(f"  v{i} = {x}")
        for s in self.steps:
            lines.append(f"  {s.results} = {s.name}{s.operands} {s.params}")
        return "\n".join([*lines, f"  losses {self.losses}"])


class Draw:
    """Choices for one program."""

    def __init__(self, seed, steps=None):
        self.rng = random.Random(seed)
        self.groups = self._groups(random.Random(seed // GROUP_SEEDS))
        self.program = Program(seed, self.groups)
        self.values = {}
        ratios = [None, None, *([self.rng.randint(0, 3) for _ in self.groups] for _ in range(3))]
        self.ratio = self.rng.choice([r for r in ratios if r is None or any(r)])
        self.exact = self.rng.random() < 0.15
        self.partial = self.rng.random() < 0.5
        self.lengths = [self.rng.choice([2, 3, 4, 5, 6, 8]) for _ in range(3)]
        self.lengths += [1] + ([0] if self.rng.random() < 0.15 else [])
        # Data parallelism: what has a batch dim is cut there, all else is replicated between subgroups.
        self.batch = self.rng.choice([None, 7])
        if self.batch:
            self.exact = False
            self.lengths.append(self.batch)
        self.wanted = self.rng.randint(3, 10) if steps is None else steps

    # -- layouts

    @staticmethod
    def _groups(rng):
        ranks = list(range(WORLD_SIZE))
        if rng.random() < 0.3:
            rng.shuffle(ranks)
        sizes = rng.choice(
            [
                (4,),
                (2, 1),
                (2, 2),
                (1, 1),
                (2, 1, 1),
                (1, 2),
                (1, 3),
                (3, 1),
                (1, 1, 2),
                (3,),
                (2,),
                (1, 1, 1),
            ]
        )
        groups = []
        for size in sizes:
            groups.append((tuple(ranks[:size]), rng.choice(MESHES[size])))
            ranks = ranks[size:]
        return tuple(groups)

    def layout(self, shape, kind):
        rng = self.rng
        top = rng.choice([Replicate(), *[Shard(d) for d in range(len(shape))] * 2])
        if self.batch:
            top = Shard(shape.index(self.batch)) if self.batch in shape else Replicate()
        partial = kind == "float" and self.partial
        op = rng.choice(["sum", "sum", "sum", "sum", "avg", "max", "min", "product"])
        if partial and rng.random() < 0.2:
            top = Partial(op)
        groups = []
        for ranks, mesh in self.groups:
            placements = []
            for _ in mesh:
                choice = rng.choice([Replicate(), *[Shard(d) for d in range(len(shape))]])
                if partial and rng.random() < 0.15:
                    choice = Partial(rng.choice(["sum", "sum", op]))
                placements.append(choice)
            groups.append(Subgroup(ranks, placements, mesh))
        ratio = sizes = None
        if isinstance(top, Shard) and len(groups) > 1:
            ratio = (
                self.ratio
                if self.batch or rng.random() < 0.85
                else [rng.randint(1, 3) for _ in groups]
            )
            if self.exact:
                length = shape[top.dim]
                cuts = sorted(random.Random(length).randint(0, length) for _ in groups[1:])
                sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
        return str(HDSpec(groups, top, ratio)), sizes

    # -- values

    def flip(self):
        return self.rng.random() < 0.5

    def length(self):
        return self.rng.choice(self.lengths)

    def shape(self, i):
        return tuple(self.values[i].shape)

    def dim(self, i):
        num = len(self.shape(i))
        return self.rng.randint(-num, num - 1)

    def new(self, shape, kind="float", high=0):
        spec, sizes = self.layout(shape, kind)
        number = len(self.values)
        found = Input(
            tuple(shape),
            kind,
            high,
            spec,
            sizes,
            kind == "float" and self.rng.random() < 0.8,
            self.rng.random() < 0.5,
            self.rng.randint(0, 10**6),
        )
        self.program.inputs[number] = found
        self.values[number] = found.value().requires_grad_(found.grad)
        return number

    def ints(self, shape, high):
        return self.new(shape, "int", max(high, 1))

    def weights(self, length):
        return self.new((length,), "weight")

    def floats(self, *, dims=None, min_dims=0, max_dims=9, nonempty=False):
        low, high = (min_dims, max_dims) if dims is None else (dims, dims)

        def fits(v):
            return (
                v.dtype == torch.float64 and low <= v.ndim <= high and (v.numel() or not nonempty)
            )

        found = [i for i, v in self.values.items() if fits(v)]
        if found and self.rng.random() < 0.9:
            # late values more often
            return (self.rng.choice(found[-3:] if self.flip() else found),)
        num = dims if dims is not None else self.rng.randint(max(low, 1), min(3, high))
        shape = [self.length() for _ in range(num)]
        if nonempty:
            shape = [n or 2 for n in shape]
        return (self.new(tuple(shape)),)

    def with_shape(self, shape):
        found = [
            i
            for i, v in self.values.items()
            if tuple(v.shape) == shape and v.dtype == torch.float64
        ]
        if found and self.rng.random() < 0.6:
            return self.rng.choice(found)
        return self.new(shape)

    def broadcastable(self, i, grows=True):
        shape = list(self.shape(i))
        for d in range(len(shape)):
            if self.rng.random() < 0.2:
                shape[d] = 1
        drop = self.rng.choice([0, 0, 0, 1, 2])
        return self.with_shape(tuple(shape[drop:]))

    def regrouped(self, shape):
        numel = math.prod(shape)
        shape = list(shape)
        for _ in range(self.rng.randint(1, 2)):
            if len(shape) > 1 and self.flip():
                d = self.rng.randint(0, len(shape) - 2)
                shape[d : d + 2] = [shape[d] * shape[d + 1]]
            elif shape and len(shape) < 4:
                d = self.rng.randint(0, len(shape) - 1)
                factors = [f for f in range(1, shape[d] + 1) if shape[d] % f == 0]
                if factors:
                    f = self.rng.choice(factors)
                    shape[d : d + 1] = [f, shape[d] // f]
        if numel and shape and self.flip():
            shape[self.rng.randint(0, len(shape) - 1)] = -1
        return shape

    def index(self, i):
        out = []
        for n in self.shape(i):
            kind = self.rng.choice(["all", "all", "slice", "step", "int"])
            if kind == "int" and n:
                out.append(self.rng.randint(-n, n - 1))
            elif kind == "slice":
                out.append(
                    (self.rng.randint(0, n), self.rng.choice([None, self.rng.randint(0, n), -1]))
                )
            elif kind == "step":
                out.append((self.rng.choice([None, 1]), None, 2))
            else:
                out.append((None, None))
        return out


_NAMES = [name for name, (_, _, weight) in OPS.items() for _ in range(weight)]


def draw_program(seed, names=None):
    """Return a program on which plain torch agrees to run forward and backward; None if none was found."""
    draw = Draw(seed)
    program, rng = draw.program, draw.rng
    names = _NAMES if names is None else names
    for _ in range(draw.wanted):
        name = rng.choice(names)
        picked = OPS[name][0](draw)
        operands, params = picked
        step = Step(name, tuple(operands), params, ())
        try:
            outs = step.run(draw.values)
        except (RuntimeError, IndexError, ValueError):
            continue  # plain torch refuses it
        if any(
            o.numel() > MAX_NUMEL or not o.isfinite().all() or o.abs().max().item() > 1e4
            if o.numel()
            else False
            for o in outs
        ):
            continue
        results = []
        for out in outs:
            results.append(len(draw.values))
            draw.values[results[-1]] = out
        program.steps.append(Step(name, tuple(operands), params, tuple(results)))
    made = [i for s in program.steps for i in s.results]
    useful = [i for i in made if draw.values[i].requires_grad]
    if useful:
        program.losses = tuple(sorted({useful[-1], rng.choice(useful)}))
    return program if program.steps else None


def coefficients(shape, number):
    """What a result is multiplied with in the loss."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def reference(program):
    """Run on one device; return all values and the gradients of the inputs."""
    values = {i: x.value().requires_grad_(x.grad) for i, x in program.inputs.items()}
    for step in program.steps:
        values.update(zip(step.results, step.run(values), strict=True))
    grads = {}
    if program.losses:
        total = sum((values[i] * coefficients(values[i].shape, i)).sum() for i in program.losses)
        total.backward()
        grads = {i: values[i].grad for i, x in program.inputs.items() if x.grad}
    return {i: v.detach() for i, v in values.items()}, grads
