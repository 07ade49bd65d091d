"""A whole training step of a Llama with 4 layers: forward, backward, AdamW."""

from __future__ import annotations

from typing import Any

import llama
import torch
import torch.distributed as dist
from report import Row
from settings import Settings
from timing import interleave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import hdtensor as hd


NUM_LAYERS = 4
_SECTION = f"A training step of a Llama, {NUM_LAYERS} layers, hidden 128: forward, backward, AdamW"


def measure(settings: Settings) -> list[Row]:
    """Return the rows of one subgroup of all ranks; with two ranks also those of a rank outside."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    plan = llama.tensor_parallel(NUM_LAYERS, tuple(range(size)))
    whole = llama.model(NUM_LAYERS)
    sides = {
        "plain": _Plain(llama.plain_part(whole, size, rank), batch),
        "dtensor": _WithDTensor(plan, batch, size),
        "op by op": _WithHDTensor(plan, batch, use_regions=False),
        "region": _WithHDTensor(plan, batch, use_regions=True),
    }
    losses = {name: _first_losses(side) for name, side in sides.items()}
    for name, found in losses.items():
        torch.testing.assert_close(
            found, losses["plain"], rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )
    if size == 2:
        outside = llama.tensor_parallel(NUM_LAYERS, (1,))
        sides["outside"] = _WithHDTensor(outside, batch, use_regions=True)
        sides["outside, op by op"] = _WithHDTensor(outside, batch, use_regions=False)
        for name in ("outside", "outside, op by op"):
            _first_losses(sides[name])
    times = interleave(
        {name: side.step for name, side in sides.items()},
        number=1,
        repeats=settings.scaled(80),
    )
    label = f"{size} rank{'s' * (size > 1)}"
    goals = {"op by op": 0.8, "region": 0.5}
    if size == 2:
        goals |= {"outside": 0.2, "outside, op by op": None}
    return [
        Row(
            section=_SECTION,
            name=f"rank 0 {way}" if way.startswith("outside") else f"{label}, {way}",
            figure="hdtensor / DTensor",
            value=times[way] / times["dtensor"],
            goal=goal,
            plain_us=times["plain"],
            dtensor_us=times["dtensor"],
            hdtensor_us=times[way],
        )
        for way, goal in goals.items()
    ]


def _first_losses(side: Any) -> torch.Tensor:
    """Return the losses of the first five steps."""
    return torch.tensor([side.loss() for _ in range(5)])


class _Plain:
    """Plain torch: this rank's part of the model."""

    def __init__(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self) -> torch.Tensor:
        return llama.training_step(self.model, self.batch, self.optimizer)

    def loss(self) -> float:
        return self.step().item()


class _WithDTensor(_Plain):
    def __init__(self, plan: hd.AnnotationPlan, batch: dict[str, torch.Tensor], size: int) -> None:
        mesh = init_device_mesh("cpu", (size,))
        model = llama.parallelize_with_dtensor(llama.model(NUM_LAYERS), plan, mesh)
        super().__init__(
            model, {k: distribute_tensor(v, mesh, [Replicate()]) for k, v in batch.items()}
        )

    def step(self) -> torch.Tensor:
        with llama.plain_tensors_allowed():
            return llama.training_step(
                self.model, self.batch, self.optimizer, llama.bring_gradients_home
            )

    def loss(self) -> float:
        return self.step().full_tensor().item()


class _WithHDTensor(_Plain):
    def __init__(
        self, plan: hd.AnnotationPlan, batch: dict[str, torch.Tensor], *, use_regions: bool
    ) -> None:
        model = hd.parallelize(llama.model(NUM_LAYERS), plan, use_regions=use_regions)
        super().__init__(model, hd.distribute_batch(model, batch))

    def loss(self) -> float:
        return hd.item(self.step())
