"""What compiled programs of HDTensors cost beside compiled plain ones and DTensor's.

    python benchmarks/bench_compile.py          # some minutes
    python benchmarks/bench_compile.py --quick  # does it work?

The compared sides take turns in one run. The whole run is also written as docs/benchmarks/compile.md.
"""

from __future__ import annotations

import os


# Before torch is imported: OpenMP reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama
import processes
import timing
import torch
import torch.distributed as dist
import wall
from report import Row, machine, markdown, text_table, write_page
from settings import Settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import hdtensor as hd


PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "compile.md"

ABOUT = (
    "Compiled programs",
    "`torch.compile(fullgraph=True)` with inductor on CPU. The layer is a Llama decoder layer of `transformers` (hidden 512, 8 heads, "
    "batch 4, sequence 256), forward and backward. Beside it, on one rank: the plain module, compiled. With TP 2: one rank's "
    "part by hand, smaller layers and four all-reduces (functional collectives), compiled; wall time of the slowest of two "
    "gloo processes, its figure the median of the ratios of neighbouring turns. A call of tiny sizes is "
    "`relu(x @ w + b)` of 4 x 4; what wrapping adds is the time less the plain function's, compiled too. Compile time is the "
    "first forward and backward of the layer in a new process, without caches on disk; what is compared is the median of the ratios "
    "of neighbouring processes.",
)

SIZES: dict[str, Any] = {"hidden": 512, "heads": 8, "kv_heads": 8}
BATCH, LENGTH = 4, 256


class _Layer:
    """A layer, its inputs, and the gradient that backward begins with."""

    def __init__(self, model: nn.Module, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        torch.manual_seed(1)
        hidden = torch.randn(BATCH, LENGTH, SIZES["hidden"])
        tables = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
        self.layer = model.model.layers[0]
        self.compiled = torch.compile(self.layer, fullgraph=True)
        self.hidden = place(hidden).detach().requires_grad_()
        self.tables = tuple(map(place, tables))
        self.grad = place(torch.randn(BATCH, LENGTH, SIZES["hidden"]))

    def step(self) -> torch.Tensor:
        """Run forward and backward and drop the gradients; return the output."""
        out = self.compiled(self.hidden, position_embeddings=self.tables, attention_mask=None)
        torch.autograd.backward((out,), (self.grad,))
        self.hidden.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None
        return out


def _plain_layer(degree: int = 1, rank: int = 0) -> _Layer:
    return _Layer(llama.plain_part(llama.model(1, **SIZES), degree, rank), lambda t: t)


def _hdtensor_layer(size: int) -> _Layer:
    plan = llama.tensor_parallel(1, tuple(range(size)))
    model = hd.parallelize(llama.model(1, **SIZES), plan, use_regions=False)
    spec = f"R / {','.join(map(str, range(size)))}:R"
    return _Layer(model, lambda t: hd.distribute_tensor(t, spec, src_data_rank=None))


def _dtensor_layer(size: int) -> _Layer:
    mesh = init_device_mesh("cpu", (size,))
    plan = llama.tensor_parallel(1, tuple(range(size)))
    model = llama.parallelize_with_dtensor(llama.model(1, **SIZES), plan, mesh)
    return _Layer(model, lambda t: distribute_tensor(t, mesh, [Replicate()], src_data_rank=None))


def measure_layer(settings: Settings) -> list[Row]:
    """Compare the layer with plain torch, on all ranks of the world."""
    size, rank = dist.get_world_size(), dist.get_rank()
    sides = {"plain": _plain_layer(size, rank), "hdtensor": _hdtensor_layer(size)}
    outs = [side.step() for side in sides.values()]
    torch.testing.assert_close(outs[1].to_local(), outs[0], rtol=1e-4, atol=1e-5)
    seconds = wall.interleave(
        {name: side.step for name, side in sides.items()},
        repeats=settings.scaled(60),
        warmup=3,
    )
    middles = {name: wall.middle(values) * 1e6 for name, values in seconds.items()}
    return [
        Row(
            section="A Llama layer, forward and backward",
            name=f"{size} rank" + ("s, TP 2" if size > 1 else ""),
            figure="hdtensor / plain",
            value=wall.ratio(seconds, "hdtensor", "plain"),
            goal=1.05,
            plain_us=middles["plain"],
            hdtensor_us=middles["hdtensor"],
        )
    ]


def measure_call(settings: Settings) -> list[Row]:
    """Compare calls of a tiny compiled function, on one rank."""
    mesh = init_device_mesh("cpu", (1,))
    places: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": lambda t: t,
        "dtensor": lambda t: distribute_tensor(t, mesh, [Replicate()]),
        "hdtensor": lambda t: hd.distribute_tensor(t, "R / 0:R"),
    }
    return [
        row
        for with_backward in (False, True)
        for row in _call_rows(places, with_backward=with_backward, settings=settings)
    ]


def _call_rows(
    places: dict[str, Callable[[torch.Tensor], torch.Tensor]],
    *,
    with_backward: bool,
    settings: Settings,
) -> list[Row]:
    steps = {name: _tiny(place, with_backward) for name, place in places.items()}
    times = timing.interleave(steps, number=200, repeats=settings.scaled(30), warmup=20)
    added = {name: times[name] - times["plain"] for name in ("dtensor", "hdtensor")}
    name = "forward and backward" if with_backward else "forward"
    return [
        Row(
            section="Calls of tiny sizes",
            name=f"{name}: {what}",
            figure="hdtensor / DTensor",
            value=value,
            goal=goal,
            plain_us=times["plain"],
            dtensor_us=times["dtensor"],
            hdtensor_us=times["hdtensor"],
        )
        for what, value, goal in (
            ("what wrapping adds", added["hdtensor"] / added["dtensor"], 0.6),
            (
                "the whole call",
                times["hdtensor"] / times["dtensor"],
                None if with_backward else 0.6,
            ),
        )
    ]


def _tiny(place: Callable[[torch.Tensor], torch.Tensor], with_backward: bool) -> Callable[[], Any]:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w + b)

    shapes = ((4, 4), (4, 4), (4,))
    args = [place(torch.randn(s)).detach().requires_grad_(with_backward) for s in shapes]
    compiled = torch.compile(function, fullgraph=True)
    grad = place(torch.ones(4, 4))
    if not with_backward:
        return lambda: compiled(*args)

    def step() -> None:
        torch.autograd.backward((compiled(*args),), (grad,))
        for arg in args:
            arg.grad = None

    return step


def compile_seconds(side: str) -> float:
    """Return the CPU time of the layer's first step in this process."""
    make = {
        "plain": _plain_layer,
        "dtensor": lambda: _dtensor_layer(1),
        "hdtensor": lambda: _hdtensor_layer(1),
    }
    layer = make[side]()
    start = time.process_time()
    layer.step()
    return time.process_time() - start


def measure_compile_time(settings: Settings) -> list[Row]:
    """Compare compile times, each in a new process."""
    torch.compile(lambda x: x * 2)(
        torch.ones(2)
    )  # what all import is imported before the processes are forked
    names = ("plain", "dtensor", "hdtensor")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(settings.scaled(5)):
        for name in names:
            seconds[name].append(processes.run(compile_seconds, 1, name))
    middles = {name: wall.middle(values) * 1e6 for name, values in seconds.items()}
    return [
        Row(
            section="Compile time of the layer",
            name="1 rank",
            figure="hdtensor / DTensor",
            value=wall.ratio(seconds, "hdtensor", "dtensor"),
            goal=1.2,
            plain_us=middles["plain"],
            dtensor_us=middles["dtensor"],
            hdtensor_us=middles["hdtensor"],
        )
    ]


def main() -> int:
    """Measure, print and write; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, nothing is written")
    parser.add_argument(
        "--only", choices=("layer", "tp", "call", "compile"), help="one part; nothing is written"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch._inductor.config.force_disable_caches = True
    settings = Settings(is_quick=options.quick)
    start = time.perf_counter()
    rows: list[Row] = []
    if options.only in (None, "layer"):
        rows += processes.run(measure_layer, 1, settings)
    if options.only in (None, "tp"):
        rows += processes.run(measure_layer, 2, settings)
    if options.only in (None, "call"):
        rows += processes.run(measure_call, 1, settings)
    if options.only in (None, "compile"):
        rows += measure_compile_time(settings)
    seconds = time.perf_counter() - start
    command = " ".join(["python", "benchmarks/bench_compile.py", *sys.argv[1:]])
    print(text_table(rows))
    print("\n".join(f"{name}: {text}" for name, text in machine(command, seconds).items()))
    if not (options.quick or options.only):
        write_page(PAGE, markdown(rows, command, seconds, about=ABOUT))
        print(f"written: {PAGE.name}")
    return int(any(row.is_missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
