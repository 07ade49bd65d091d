"""What a rank pays for work that it holds no part of; two ranks, of which rank 1 holds everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import bench_ops
import torch
from report import Row
from settings import Settings
from timing import interleave
from torch import nn
from torch.distributed.tensor import Shard

import hdtensor as hd
from hdtensor._torch_compat import new_wrapper, no_torch_function
from hdtensor.api.gradients import GradientSync
from hdtensor.api.regions import Region


WIDTH = 16


def measure(settings: Settings) -> list[Row]:
    """Return the rows of pruned operators and of pruned modules."""
    rows = [_floor_row(settings)]
    rows += [row for records in (False, True) for row in _operator_rows(settings, records)]
    for num_layers in (2, 200):
        rows += _module_rows(settings, num_layers)
    return rows


def _on(rank: int, tensor: torch.Tensor, placement: Any = None) -> hd.HDTensor:
    """Return the tensor on one rank alone."""
    bottom = "S0" if isinstance(placement, Shard) else "R"
    return hd.distribute_tensor(tensor, f"R / {rank}:{bottom}", src_data_rank=None)


class _OnlyWraps(torch.Tensor):
    """The least that a wrapper subclass can do for an operator: wrap an empty tensor, unasked."""

    __slots__ = ("_local_tensor", "_spec")
    __torch_function__ = no_torch_function

    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return new_wrapper(_OnlyWraps, args[0]._local_tensor, args[0]._spec, False)


def _floor_row(settings: Settings) -> Row:
    """Return what a pruned operator would cost if nothing had to be looked up."""
    local = _on(0, torch.randn(16, 16))
    pruned = _on(1, torch.randn(16, 16))
    floor = new_wrapper(_OnlyWraps, pruned._local_tensor, pruned._spec, False)
    times = interleave(
        {"local": local.t, "floor": floor.t},
        number=settings.scaled(200),
        repeats=settings.scaled(15),
        warmup=20,
    )
    return Row(
        section="A pruned operator: the floor",
        name="t, if a dispatch looked nothing up and only made the empty result",
        figure="floor / run locally",
        value=times["floor"] / times["local"],
        hdtensor_us=times["floor"],
    )


def _operator_rows(settings: Settings, records: bool) -> list[Row]:
    all_operands = {
        side: bench_ops.operands(lambda t, p, rank=rank: _on(rank, t, p))
        for side, rank in (("local", 0), ("pruned", 1))
    }
    bench_ops.record_gradients(all_operands, records)
    section = f"A pruned operator, {'with' if records else 'without'} gradient recording"
    rows = []
    for name, run in bench_ops.OPERATORS.items():
        times = interleave(
            {side: lambda run=run, each=each: run(each) for side, each in all_operands.items()},
            number=settings.scaled(200),
            repeats=settings.scaled(10),
            warmup=20,
        )
        rows.append(
            Row(
                section=section,
                name=name,
                figure="pruned / run locally",
                value=times["pruned"] / times["local"],
                goal=0.7,
                hdtensor_us=times["pruned"],
            )
        )
    mean = math.exp(sum(math.log(row.value) for row in rows) / len(rows))
    figure = "pruned / run locally"
    return [*rows, Row(section=section, name="geometric mean", figure=figure, value=mean, goal=0.7)]


def _module_rows(settings: Settings, num_layers: int) -> list[Row]:
    torch.manual_seed(0)
    layers = [m for _ in range(num_layers) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    module = nn.Sequential(*layers)
    for owner in module.modules():
        for key, parameter in list(owner._parameters.items()):
            owner._parameters[key] = nn.Parameter(_on(1, parameter.detach()))
    Region(module, GradientSync(module.parameters()))
    x = _on(1, torch.randn(8, WIDTH)).requires_grad_()
    grad = _on(1, torch.randn(8, WIDTH))

    def backward() -> None:
        torch.autograd.backward((module(x),), (grad,))
        x.grad = None

    for _ in range(4):  # recorded once, skipped from then on
        backward()
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: module(x),
        "forward and backward": backward,
    }
    times = interleave(runs, number=settings.scaled(200), repeats=settings.scaled(15), warmup=20)
    goals = {"forward": 10.0, "forward and backward": 50.0}
    return [
        Row(
            section="A pruned module, skipped as one autograd node",
            name=f"{num_layers} linear layers, {name}",
            figure="microseconds",
            value=times[name],
            goal=goal,
            hdtensor_us=times[name],
        )
        for name, goal in goals.items()
    ]
