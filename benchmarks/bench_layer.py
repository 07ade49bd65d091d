"""A Llama layer, forward and backward: the time that hdtensor and DTensor add to plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llama
import torch
import torch.distributed as dist
from report import Row
from settings import Settings
from timing import interleave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hdtensor as hd


BATCH, LENGTH, HIDDEN = 4, 16, 128


@dataclass(frozen=True, slots=True)
class _Side:
    """One side's layer with its inputs and the gradient that backward begins with."""

    model: nn.Module
    hidden: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]
    grad: torch.Tensor
    after_backward: Callable[[nn.Module], None] | None = None

    def step(self) -> torch.Tensor:
        """Run forward and backward; gradients stay."""
        layer = self.model.model.layers[0]
        out = layer(self.hidden, position_embeddings=self.tables, attention_mask=None)
        torch.autograd.backward((out,), (self.grad,))
        if self.after_backward is not None:
            self.after_backward(layer)
        return out

    def timed(self) -> None:
        """Run a step and drop the gradients."""
        self.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self.hidden.grad = None
        for parameter in self.model.model.layers[0].parameters():
            parameter.grad = None

    def results(self) -> list[torch.Tensor]:
        """Return the whole output and all whole gradients."""
        out = self.step()
        layer = self.model.model.layers[0]
        parts = [out.detach(), self.hidden.grad, *[p.grad for p in layer.parameters()]]
        self.drop_gradients()
        return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in parts]


def measure(kind: str, settings: Settings) -> list[Row]:
    """Return the rows of one kind of plan, "TP" or "DP", on all ranks of the world."""
    sides = _tensor_parallel_sides() if kind == "TP" else _data_parallel_sides()
    _check_agreement(sides)
    times = interleave(
        {name: side.timed for name, side in sides.items()},
        number=settings.scaled(5),
        repeats=settings.scaled(30),
    )
    size = dist.get_world_size()
    label = f"{kind}, {size} rank{'s' * (size > 1)}"
    goals = {"op by op": 0.5, "region": 0.15}
    return [
        Row(
            section="A Llama layer, forward and backward",
            name=f"{label}, {way}",
            figure="added / DTensor adds",
            value=(times[way] - times["plain"]) / (times["dtensor"] - times["plain"]),
            goal=goal,
            plain_us=times["plain"],
            dtensor_us=times["dtensor"],
            hdtensor_us=times[way],
        )
        for way, goal in goals.items()
    ]


def _inputs(
    whole: nn.Module,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN)
    tables = whole.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    return hidden, tables, torch.randn(BATCH, LENGTH, HIDDEN)


def _tensor_parallel_sides() -> dict[str, _Side]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    plan = llama.tensor_parallel(1, tuple(range(size)))
    whole = llama.model(1, hidden=HIDDEN)
    hidden, tables, grad = _inputs(whole)

    def distributed(model: nn.Module, place: Callable[[torch.Tensor], torch.Tensor]) -> _Side:
        return _Side(model, place(hidden).requires_grad_(), tuple(map(place, tables)), place(grad))

    return _all_sides(
        whole,
        plan,
        plain=_Side(
            llama.plain_part(whole, size, rank), hidden.clone().requires_grad_(), tables, grad
        ),
        dtensor=distributed(
            llama.parallelize_with_dtensor(llama.model(1, hidden=HIDDEN), plan, mesh),
            lambda t: distribute_tensor(t, mesh, [Replicate()]),
        ),
        hdtensor=lambda model: distributed(
            model, lambda t: hd.distribute_tensor(t, mesh, [Replicate()])
        ),
    )


def _data_parallel_sides() -> dict[str, _Side]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    plan = llama.data_parallel(1, tuple(range(size)))
    whole = llama.model(1, hidden=HIDDEN)
    hidden, tables, grad = _inputs(whole)
    mine = [t.chunk(size)[rank].clone() for t in (hidden, grad)]
    batch_spec = plan.expand(whole).inputs if size > 1 else hd.HDSpec.from_text("R / 0:S0")
    table_spec = hd.HDSpec.from_text("R / " + " ".join(f"{r}:R" for r in range(size)))

    def with_hdtensor(model: nn.Module) -> _Side:
        x, g = (hd.distribute_tensor(t, batch_spec) for t in (hidden, grad))
        own_tables = tuple(hd.distribute_tensor(t, table_spec) for t in tables)
        return _Side(model, x.requires_grad_(), own_tables, g)

    x, g = (distribute_tensor(t, mesh, [Shard(0)]) for t in (hidden, grad))
    dtensor_tables = tuple(distribute_tensor(t, mesh, [Replicate()]) for t in tables)
    return _all_sides(
        whole,
        plan,
        plain=_Side(
            llama.plain_part(whole, 1, 0),
            mine[0].requires_grad_(),
            tables,
            mine[1],
            llama.sum_gradients if size > 1 else None,
        ),
        dtensor=_Side(
            llama.parallelize_with_dtensor(llama.model(1, hidden=HIDDEN), plan, mesh),
            x.requires_grad_(),
            dtensor_tables,
            g,
            llama.bring_gradients_home,
        ),
        hdtensor=with_hdtensor,
    )


def _all_sides(
    whole: nn.Module,
    plan: hd.AnnotationPlan,
    *,
    plain: _Side,
    dtensor: _Side,
    hdtensor: Callable[[nn.Module], _Side],
) -> dict[str, _Side]:
    reference = _Side(whole, *_reference_inputs(whole))
    ways = {
        way: hdtensor(
            hd.parallelize(llama.model(1, hidden=HIDDEN), plan, use_regions=way == "region")
        )
        for way in ("op by op", "region")
    }
    return {"plain": plain, "dtensor": dtensor, **ways, "reference": reference}


def _reference_inputs(whole: nn.Module) -> Any:
    hidden, tables, grad = _inputs(whole)
    return hidden.requires_grad_(), tables, grad


def _check_agreement(sides: dict[str, _Side]) -> None:
    """Raise unless the distributed sides compute what the whole plain layer does; drop that layer."""
    expected = sides.pop("reference").results()
    for name in ("dtensor", "op by op", "region"):
        side = sides[name]
        for _ in range(4):  # a region records, checks, then runs
            side.timed()
        for mine, plain in zip(side.results(), expected, strict=True):
            torch.testing.assert_close(
                mine, plain, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
