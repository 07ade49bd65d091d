"""Single operators: hdtensor beside DTensor and plain torch, on a mesh of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Row, ratio_row
from settings import Settings
from timing import interleave
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hdtensor as hd


Operands = dict[str, torch.Tensor]

#: ``a``, ``b`` are cut along dim 0; ``w``, ``bias``, ``scale`` are replicated; ``c`` never records a gradient.
OPERATORS: Mapping[str, Callable[[Operands], Any]] = {
    "add": lambda o: o["a"] + o["b"],
    "add_": lambda o: o["c"].add_(o["b"]),
    "mul by scalar": lambda o: o["a"] * 2.0,
    "mm": lambda o: o["a"] @ o["w"],
    "linear with bias": lambda o: F.linear(o["a"], o["w"], o["bias"]),
    "view": lambda o: o["a"].view(8, 4, 4),
    "reshape": lambda o: o["a"].reshape(8, 4, 4),
    "sum": lambda o: o["a"].sum(),
    "softmax": lambda o: F.softmax(o["a"], -1),
    "layer_norm": lambda o: F.layer_norm(o["a"], (16,), o["scale"], o["bias"]),
    "split": lambda o: o["a"].split(4, 1),
    "relu": lambda o: F.relu(o["a"]),
    "t": lambda o: o["a"].t(),
}

_FOREACH: Mapping[str, Callable[[list[torch.Tensor], list[torch.Tensor]], Any]] = {
    "_foreach_add_": lambda xs, ys: torch._foreach_add_(xs, ys),
    "_foreach_mul_": lambda xs, ys: torch._foreach_mul_(xs, 0.999),
    "_foreach_lerp_": lambda xs, ys: torch._foreach_lerp_(xs, ys, 0.1),
}
_NUM_FOREACH_TENSORS = 50


def operands(distribute: Callable[[torch.Tensor, Any], torch.Tensor]) -> Operands:
    """Return the operands of ``OPERATORS``; ``distribute(tensor, placement)`` makes each."""
    torch.manual_seed(0)
    shapes = {
        "a": (8, 16),
        "b": (8, 16),
        "c": (8, 16),
        "w": (16, 16),
        "bias": (16,),
        "scale": (16,),
    }
    cut = ("a", "b", "c")
    return {
        name: distribute(torch.randn(shape), Shard(0) if name in cut else Replicate())
        for name, shape in shapes.items()
    }


def sides(mesh: DeviceMesh) -> dict[str, Operands]:
    """Return the same operands for each side."""
    return {
        "plain": operands(lambda t, p: t.clone()),
        "dtensor": operands(lambda t, p: distribute_tensor(t, mesh, [p])),
        "hdtensor": operands(lambda t, p: hd.distribute_tensor(t, mesh, [p])),
    }


def record_gradients(all_operands: Mapping[str, Operands], is_on: bool) -> None:
    """Turn gradient recording of every operand but ``c`` on or off.

    A leaf that requires grad cannot be written to; ``c`` gets its history from ``b``.
    """
    for each in all_operands.values():
        for name, tensor in each.items():
            if name != "c":
                tensor.requires_grad_(is_on)


def measure(settings: Settings) -> list[Row]:
    """Return the rows of single operators and of foreach operators."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = [*_operator_rows(mesh, settings, False), *_operator_rows(mesh, settings, True)]
    return rows + _foreach_rows(mesh, settings)


def _operator_rows(mesh: DeviceMesh, settings: Settings, records: bool) -> list[Row]:
    section = f"One operator, {'with' if records else 'without'} gradient recording"
    all_operands = sides(mesh)
    record_gradients(all_operands, records)
    rows = []
    for name, run in OPERATORS.items():
        _check_agreement(name, run, all_operands)
        times = interleave(
            {side: lambda run=run, each=each: run(each) for side, each in all_operands.items()},
            number=settings.scaled(200),
            repeats=settings.scaled(15),
            warmup=20,
        )
        rows.append(ratio_row(section, name, times, goal=0.8))
    mean = math.exp(sum(math.log(row.value) for row in rows) / len(rows))
    figure = "hdtensor / DTensor"
    return [*rows, Row(section=section, name="geometric mean", figure=figure, value=mean, goal=0.6)]


def _check_agreement(
    name: str, run: Callable[[Operands], Any], all_operands: dict[str, Operands]
) -> None:
    if name == "add_":  # would change one side's operand only
        return
    results = {side: run(each) for side, each in all_operands.items()}
    for side in ("dtensor", "hdtensor"):
        for mine, plain in zip(_listed(results[side]), _listed(results["plain"]), strict=True):
            torch.testing.assert_close(mine.full_tensor(), plain)


def _listed(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _foreach_rows(mesh: DeviceMesh, settings: Settings) -> list[Row]:
    makers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": torch.clone,
        "dtensor": lambda t: distribute_tensor(t, mesh, [Replicate()]),
        "hdtensor": lambda t: hd.distribute_tensor(t, mesh, [Replicate()]),
    }
    whole = [torch.randn(16, 16) for _ in range(_NUM_FOREACH_TENSORS)]
    lists = {
        side: ([make(t) for t in whole], [make(t) for t in whole]) for side, make in makers.items()
    }
    rows = []
    for name, run in _FOREACH.items():
        times = interleave(
            {side: lambda run=run, pair=pair: run(*pair) for side, pair in lists.items()},
            number=settings.scaled(40),
            repeats=settings.scaled(15),
        )
        label = f"{name}, {_NUM_FOREACH_TENSORS} tensors"
        rows.append(ratio_row("Operators over lists of tensors", label, times, goal=1.0))
    return rows
