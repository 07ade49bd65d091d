"""What changing shapes and a first step cost."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import llama
import torch
import torch.distributed as dist
from report import Row
from settings import Settings
from timing import cpu_seconds, interleave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import hdtensor as hd


#: The steps that are not counted: placements are decided in them.
NUM_FIRST_STEPS = 10
_MIDDLE_LENGTH = 128
_NUM_LAYERS = 2
_SECTION = "Shapes that change"


def measure_keys(settings: Settings) -> list[Row]:
    """Return the row of 24 (operator, shape) keys in a cycle against the same calls while hot."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    operators: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: a.relu(),
        lambda a, b: a.t(),
    ]
    calls: list[Callable[[], Any]] = []
    for rows in (4, 8, 12, 16, 20, 24):
        a, b = (hd.distribute_tensor(torch.randn(rows, 16), mesh, [Replicate()]) for _ in range(2))
        calls += [lambda run=run, a=a, b=b: run(a, b) for run in operators]

    def cycle() -> None:
        for call in calls:
            call()

    number, repeats = settings.scaled(100), settings.scaled(15)
    candidates = {str(i): call for i, call in enumerate(calls)}
    candidates["cycle"] = cycle
    times = interleave(candidates, number=number, repeats=repeats, warmup=20)
    hot = sum(times[str(i)] for i in range(len(calls)))
    name = f"{len(calls)} keys in a cycle"
    figure = "cycle / one key again and again"
    return [
        Row(
            section=_SECTION,
            name=name,
            figure=figure,
            value=times["cycle"] / hot,
            goal=1.3,
            hdtensor_us=times["cycle"],
        )
    ]


def measure_lengths(settings: Settings) -> list[Row]:
    """Return the rows of steps with a new sequence length each, against steps of one length.

    The lengths lie evenly around the one length, so that the arithmetic is nearly the same. The goal is for
    ``parallelize`` as it is; without regions every operator binds anew, which the row informs of.
    """
    num_steps = settings.scaled(200)
    first = _MIDDLE_LENGTH - num_steps // 2
    lengths = list(range(first, first + num_steps))
    random.Random(0).shuffle(lengths)
    plan = llama.tensor_parallel(_NUM_LAYERS, (0,))
    ways = {
        "plain": llama.model(_NUM_LAYERS),
        "region": hd.parallelize(llama.model(_NUM_LAYERS), plan),
        "op by op": hd.parallelize(llama.model(_NUM_LAYERS), plan, use_regions=False),
    }
    seconds = {(way, kind): 0.0 for way in ways for kind in ("one", "many")}
    gc.collect()
    gc.freeze()
    for step, length in enumerate(lengths):
        for way, model in ways.items():
            for kind, now in (("one", _MIDDLE_LENGTH), ("many", length)):
                spent = cpu_seconds(lambda model=model, now=now: _step(model, now))
                if step >= NUM_FIRST_STEPS:
                    seconds[way, kind] += spent
    gc.unfreeze()
    return [
        Row(
            section=_SECTION,
            name=f"{num_steps} steps, {num_steps} sequence lengths, {way}",
            figure="all lengths / one length",
            value=seconds[way, "many"] / seconds[way, "one"],
            goal=1.3 if way == "region" else None,
            plain_us=seconds["plain", "many"] / (num_steps - NUM_FIRST_STEPS) * 1e6,
            hdtensor_us=None
            if way == "plain"
            else seconds[way, "many"] / (num_steps - NUM_FIRST_STEPS) * 1e6,
        )
        for way in ways
    ]


def _step(model: Any, length: int) -> None:
    ids = torch.full((2, length), 7)
    batch = {"input_ids": ids, "labels": ids}
    if not isinstance(next(model.parameters()), hd.HDTensor):
        llama.training_step(model, batch)
    else:
        llama.training_step(model, hd.distribute_batch(model, batch))
    model.zero_grad()


def measure_first_step(side: str) -> float:
    """Return what the first step of a process costs more than a later one, in microseconds of CPU time.

    Args:
        side: "dtensor", or hdtensor's "op by op" or "region".
    """
    mesh = init_device_mesh("cpu", (1,))
    plan = llama.tensor_parallel(_NUM_LAYERS, (0,))
    ids = torch.randint(0, 256, (2, 16))
    warm_up = llama.model(_NUM_LAYERS)  # what torch loads on first use is no one's deduction
    llama.training_step(
        warm_up, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(warm_up.parameters())
    )
    model = llama.model(_NUM_LAYERS)
    if side == "dtensor":
        llama.parallelize_with_dtensor(model, plan, mesh)
        ids = distribute_tensor(ids, mesh, [Replicate()])
        batch = {"input_ids": ids, "labels": ids}
    else:
        hd.parallelize(model, plan, use_regions=side == "region")
        batch = hd.distribute_batch(model, {"input_ids": ids, "labels": ids})
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with llama.plain_tensors_allowed():
            llama.training_step(model, batch, optimizer)

    first = cpu_seconds(step)
    for _ in range(3):  # regions record and check; DTensor's optimizer has its states
        step()
    return (first - min(cpu_seconds(step) for _ in range(5))) * 1e6


def first_step_rows(microseconds: dict[str, float]) -> list[Row]:
    """Return the rows of ``measure_first_step``'s figures, by side."""
    return [
        Row(
            section="The first step of a Llama: forward, backward, AdamW",
            name=f"deduction, {way}",
            figure="hdtensor / DTensor",
            value=microseconds[way] / microseconds["dtensor"],
            goal=2.0,
            dtensor_us=microseconds["dtensor"],
            hdtensor_us=microseconds[way],
        )
        for way in ("op by op", "region")
    ]
