"""What pipelines cost, and whether they do what the simulator says.

    python benchmarks/bench_pipeline.py          # some minutes
    python benchmarks/bench_pipeline.py --quick  # does it work?

The compared sides take turns in one run on local gloo processes. The whole run is also written as
docs/benchmarks/pipeline.md.
"""

from __future__ import annotations

import os


# Before torch is imported: OpenMP reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import statistics
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
from sleeping import SleepingModel, batch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import hdtensor as hd
from hdtensor.pipeline import Durations, LaneRun, Runner, build_schedule, simulate


PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "pipeline.md"

ABOUT = (
    "Pipelines",
    "Local gloo processes on two cores. Wall times are of the slowest rank, and their figures the medians of the ratios of "
    "neighbouring turns; CPU times (`time.process_time`) are the smallest of the repeats. Sleeping layers sleep instead of "
    "computing (`benchmarks/sleeping.py`), so that the two cores do not matter there. A call of the model that waits between "
    "stages of one rank does so in a thread of its own: a call of 2 stages costs 43 us, of 4 stages 77 us, beside 9 and 10 us in "
    "greenlets; with a millisecond of work in each stage the two take the same (`benchmarks/bench_turns.py`). Times are in "
    "microseconds.",
)

Plan = hd.AnnotationPlan


def plan_of(*pipelines: tuple[int, list[tuple[tuple[int, ...], int]]]) -> Plan:
    """Return a plan: for each pipeline its micro-batches of one sample, and (ranks, number of layers) of each stage."""
    found = []
    for count, stages in pipelines:
        first, rows = 0, []
        for ranks, num in stages:
            rows.append({"ranks": list(ranks), "layers": [first, first + num - 1]})
            first += num
        found.append({"stages": rows, "microbatches": count, "mbs": 1})
    return Plan.from_dict({"pipelines": found})


# -- beside torch's own ----------------------------------------------------------------------------------------------

NUM_MICROBATCHES, LENGTH = 8, 32


class SmallLlama(nn.Module):
    """A Llama of plain torch around ``transformers``' layers: the same program for both sides."""

    #: Gives rotary tables their dtype and device.
    like = torch.empty(0)

    def __init__(self, num_layers: int) -> None:
        """Build it with the same weights at every call."""
        super().__init__()
        whole = _model(num_layers)
        self.embed_tokens: nn.Module | None = whole.model.embed_tokens
        self.layers = whole.model.layers
        self.rotary = whole.model.rotary_emb
        self.norm: nn.Module | None = whole.model.norm
        self.lm_head: nn.Module | None = whole.lm_head

    def keep(self, layers: slice, *, is_first: bool, is_last: bool) -> None:
        """Keep one stage, as one writes it for ``PipelineStage``."""
        self.layers = self.layers[layers]
        if not is_first:
            self.embed_tokens = None
        if not is_last:
            self.norm = self.lm_head = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of token ids; of a stage what it has."""
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        tables = self.rotary(self.like, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=tables, attention_mask=None)
        return x if self.lm_head is None or self.norm is None else self.lm_head(self.norm(x))


def _token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    return functional.cross_entropy(flat, labels[:, 1:].reshape(-1))


def _model(num_layers: int) -> Any:
    torch.manual_seed(0)
    config = llama.config(num_layers)
    config._attn_implementation = "sdpa"
    return type(llama.model(1))(config)


def beside_torch(settings: Settings) -> list[Row]:
    """Two stages of two layers on two ranks, 1F1B, beside ``torch.distributed.pipelining``."""
    rank = dist.get_rank()
    stage_module = SmallLlama(4)
    stage_module.keep(
        slice(0, 2) if rank == 0 else slice(2, 4), is_first=rank == 0, is_last=rank == 1
    )
    ids = torch.randint(
        0, 256, (NUM_MICROBATCHES, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, _token_loss)

    cleared = torch.optim.SGD(stage_module.parameters())

    def torch_step() -> None:
        cleared.zero_grad()
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=[])

    model = SmallLlama(4)
    runner = Runner(model, plan_of((NUM_MICROBATCHES, [((0,), 2), ((1,), 2)])), schedule="1F1B")
    data = (ids, ids)

    optimizer = torch.optim.SGD(runner.optimizer_parameters())

    def our_step() -> None:
        optimizer.zero_grad()
        runner.step(data)

    for _ in range(5):  # regions form
        our_step()
    torch_step()
    _compare(stage_module, model)
    seconds = wall.interleave(
        {"hdtensor": our_step, "torch": torch_step}, repeats=settings.scaled(60)
    )
    return [
        Row(
            section="A training step: 4 Llama layers, 2 stages on 2 ranks, 8 micro-batches, 1F1B",
            name="forward and backward, wall time",
            figure="hdtensor / Schedule1F1B",
            value=wall.ratio(seconds, "hdtensor", "torch"),
            goal=1.0,
            plain_us=wall.middle(seconds["torch"]) * 1e6,
            hdtensor_us=wall.middle(seconds["hdtensor"]) * 1e6,
        )
    ]


def _compare(stage: nn.Module, model: nn.Module) -> None:
    """Raise unless both sides have the same gradients."""
    ours = {n: p.grad for n, p in model.named_parameters() if p.is_local}
    for name, parameter in stage.named_parameters():
        kind, _, rest = name.partition(".")
        whole_name = name
        if kind == "layers":
            number, _, rest = rest.partition(".")
            whole_name = f"layers.{int(number) + 2 * dist.get_rank()}.{rest}"
        torch.testing.assert_close(
            ours[whole_name].to_local(), parameter.grad, rtol=1e-3, atol=1e-5
        )


# -- pruned layers ---------------------------------------------------------------------------------------------------


class Joined(nn.Module):
    """A layer with more layers behind it that no plan knows of: they compute, and are no part of the model."""

    def __init__(self, layer: nn.Module, num_more: int) -> None:
        """Take the layer, and copy it."""
        super().__init__()
        self.layer = layer
        # In a list of its own, which is no part of the module.
        self.__dict__["more"] = [copy.deepcopy(layer) for _ in range(num_more)]

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Run all."""
        for layer in (self.layer, *self.more):
            x = layer(x, **kwargs)
        return x


def pruned(settings: Settings) -> list[Row]:
    """Rank 0 holds 8 layers of 32, or of 9: the CPU time that 23 more pruned layers take.

    The other rank computes as much beside both, so that the two cores' common caches are as full: in the model of 9 layers 23 run
    behind its one layer that are no part of the model.
    """
    candidates: dict[str, Callable[[], object]] = {}
    for name, others in (("32", 24), ("9", 1)):
        model = SmallLlama(8 + others)
        if others == 1:
            model.layers[8] = Joined(model.layers[8], 23)
        runner = Runner(model, plan_of((4, [((0,), 8), ((1,), others)])))
        data = (torch.arange(4 * LENGTH).view(4, LENGTH) % 256,) * 2

        optimizer = torch.optim.SGD(runner.optimizer_parameters())

        def step(runner: Runner = runner, optimizer: Any = optimizer, data: Any = data) -> None:
            optimizer.zero_grad()
            runner.step(data)

        candidates[name] = step
    for step in candidates.values():
        for _ in range(5):
            step()
    times = timing.interleave(candidates, number=1, repeats=settings.scaled(80))
    return [
        Row(
            section="Pruned layers: CPU time of the rank that holds 8 layers, 4 micro-batches",
            name="a model of 32 layers, beside one of 9",
            figure="32 layers / 9 layers",
            value=times["32"] / times["9"],
            goal=1.05,
            plain_us=times["9"],
            hdtensor_us=times["32"],
        )
    ]


# -- sleeping layers -------------------------------------------------------------------------------------------------

SECONDS = 0.01


def bubble(settings: Settings) -> list[Row]:
    """The measured bubble of four unlike stages beside the simulator's."""
    layers = [2, 1, 3, 1]
    rows = []
    for name in ("GPipe", "1F1B"):
        model = SleepingModel(sum(layers), SECONDS)
        plan = plan_of((8, [((r,), n) for r, n in enumerate(layers)]))
        runner = Runner(model, plan, schedule=name)
        for _ in range(4):
            runner.step(batch(8))
        shares = []
        for _ in range(settings.scaled(5)):
            with runner.record() as recording:
                runner.step(batch(8))
            shares.append(recording.timeline().bubble_share())
        lane = runner.lanes[0]
        durations = Durations(
            forward=tuple(n * SECONDS for n in layers),
            backward=tuple(2 * n * SECONDS for n in layers),
        )
        expected = simulate(
            [LaneRun(lane=lane, schedule=build_schedule(name, lane, 8), durations=durations)]
        ).bubble_share()
        measured = statistics.median(shares)
        rows.append(
            Row(
                section="The bubble of 4 processes with sleeping layers (2, 1, 3, 1), 8 micro-batches",
                name=f"{name}: {measured:.1%}, the simulator says {expected:.1%}",
                figure="|measured / simulated - 1|",
                value=abs(measured / expected - 1),
                goal=0.03,
            )
        )
    return rows


def unlike_lanes(settings: Settings) -> list[Row]:
    """Two lanes of two stages, one twice as fast: micro-batches by speed beside equal numbers."""
    seconds_of = SECONDS if dist.get_rank() < 2 else 2 * SECONDS
    candidates: dict[str, Callable[[], object]] = {}
    for name, counts in (("by speed", (16, 8)), ("equal", (12, 12))):
        model = SleepingModel(2, seconds_of)
        stages = [[((0,), 1), ((1,), 1)], [((2,), 1), ((3,), 1)]]
        runner = Runner(model, plan_of(*zip(counts, stages, strict=True)))
        candidates[name] = lambda runner=runner: runner.step(batch(24))
    seconds = wall.interleave(candidates, repeats=settings.scaled(5), warmup=4)
    return [
        Row(
            section="Two lanes, one twice as fast (sleeping layers), 24 micro-batches",
            name="16 and 8 micro-batches, beside 12 and 12",
            figure="by speed / equal",
            value=wall.ratio(seconds, "by speed", "equal"),
            goal=1 / 1.3,
            plain_us=wall.middle(seconds["equal"]) * 1e6,
            hdtensor_us=wall.middle(seconds["by speed"]) * 1e6,
        )
    ]


# -- memory ------------------------------------------------------------------------------------------------------------


class _Held:
    """Counts the bytes that autograd holds, and the most there were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, x: torch.Tensor) -> Any:
        """Count a saved tensor."""
        local = getattr(x, "_local_tensor", x)
        return _Saved(self, x, local.nbytes)


class _Saved:
    def __init__(self, held: _Held, x: torch.Tensor, num_bytes: int) -> None:
        self.held, self.x, self.num_bytes = held, x, num_bytes
        held.now += num_bytes
        held.most = max(held.most, held.now)

    def __del__(self) -> None:
        self.held.now -= self.num_bytes


def memory(settings: Settings) -> list[Row]:
    """The most bytes that autograd saves on the first of two stages."""
    most = {}
    for name in ("1F1B", "GPipe"):
        model = SmallLlama(4)
        runner = Runner(
            model, plan_of((8, [((0,), 2), ((1,), 2)])), schedule=name, use_regions=False
        )
        data = (torch.arange(8 * LENGTH).view(8, LENGTH) % 256,) * 2
        runner.step(data)
        held = _Held()
        with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda saved: saved.x):
            runner.step(data)
        most[name] = float(held.most)
    return [
        Row(
            section="Peak memory of activations on the first of 2 stages, 8 micro-batches",
            name=f"{most['1F1B'] / 2**20:.1f} MiB beside {most['GPipe'] / 2**20:.1f} MiB",
            figure="1F1B / GPipe",
            value=most["1F1B"] / most["GPipe"],
            goal=0.5,
        )
    ]


PARTS = {
    "torch": (beside_torch, 2),
    "pruned": (pruned, 2),
    "bubble": (bubble, 4),
    "lanes": (unlike_lanes, 4),
    "memory": (memory, 2),
}


def main() -> int:
    """Measure, print and write; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, nothing is written")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts; nothing is written")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    rows: list[Row] = []
    for name in options.only or PARTS:
        measure, world_size = PARTS[name]
        rows += processes.run(measure, world_size, Settings(is_quick=options.quick))
    seconds = time.perf_counter() - start
    command = " ".join(["python", "benchmarks/bench_pipeline.py", *sys.argv[1:]])
    print(text_table(rows))
    print("\n".join(f"{name}: {text}" for name, text in machine(command, seconds).items()))
    if not options.quick and not options.only:
        write_page(PAGE, markdown(rows, command, seconds, about=ABOUT))
        print(f"written: {PAGE.name}")
    return int(any(row.is_missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
