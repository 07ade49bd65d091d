"""What the training examples show: who holds what, a progress line, a switch, comparisons, a picture."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TextColumn
from torch import Tensor, nn

from hdtensor.debug.training import Phase, write_phased_training_picture
from hdtensor.elastic import SwitchReport
from hdtensor.pipeline import Timeline
from hdtensor.placements import HDSpec, default_top_sizes, local_shape
from hdtensor.plan import ExpandedPlan


#: Lines of progress where the output is no terminal.
NUM_LINES = 10
#: Steps over which the rate is taken.
RATE_STEPS = 10
#: Parameters in the picture, by the end of their names: cut by rows, by columns, by vocabulary.
PICTURED = (
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "lm_head.weight",
)
IGNORED = -100
#: So many steps are repeated on one process.
CHECKED_STEPS = 5
#: Largest relative difference of a loss from the same step on one process, in float32.
TOLERANCE = 1e-5


class Layout:
    """Who holds what of a model and of a batch.

    Attributes:
        plan: The model's plan.
        shapes: Parameter name -> global shape.
        batch_shape: Rows and tokens of a row of the whole batch.
        num_ranks: Ranks of the world; some may be outside the plan.
        lanes: The ranks that work on each block of rows.
        rows: Rows of the batch of each subgroup, or lane.
        held: Rank -> how many elements of the parameters it holds.
    """

    def __init__(
        self,
        plan: ExpandedPlan,
        model: nn.Module,
        batch_shape: tuple[int, int],
        num_ranks: int,
        lanes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Look at a model, which may be on the meta device.

        Args:
            plan: The model's plan.
            model: The model.
            batch_shape: Rows and tokens of a row of the whole batch.
            num_ranks: Ranks of the world.
            lanes: The ranks that work on each block of rows; default the subgroups of the inputs.
        """
        self.plan = plan
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.batch_shape = batch_shape
        self.num_ranks = num_ranks
        self.lanes = lanes or [subgroup.ranks for subgroup in plan.inputs.subgroups]
        self.rows = default_top_sizes(plan.inputs, batch_shape) or (batch_shape[0],)
        self.held = {rank: self._num_held(rank) for rank in range(num_ranks)}

    def _num_held(self, rank: int) -> int:
        return sum(
            math.prod(local_shape(spec, shape, default_top_sizes(spec, shape), rank))
            for name, shape in self.shapes.items()
            for spec in [self.plan.tensors[name]]
        )

    def work(self, labels: Tensor) -> dict[int, float]:
        """Return each rank's part of a batch's work; all parts add up to 1.

        A rank's part is its subgroup's part of the tokens that count, times its own part of what the
        subgroup holds of the parameters; with pipelines, its lane's.

        Args:
            labels: Of the whole batch, ``[rows, tokens]``.
        """
        tokens = [num_tokens(block) for block in labels.split(self.rows)]
        parts = dict.fromkeys(range(self.num_ranks), 0.0)
        for ranks, count in zip(self.lanes, tokens, strict=True):
            together = sum(self.held[rank] for rank in ranks)
            for rank in ranks:
                parts[rank] = count / sum(tokens) * self.held[rank] / together
        return parts

    def __str__(self) -> str:
        total = sum(math.prod(shape) for shape in self.shapes.values())
        lines = [f"{'':8}{'rows of the batch':>20}{'parameters':>24}"]
        for rank in range(self.num_ranks):
            index = self.plan.inputs.index_of(rank)
            if index is None:
                lines.append(f"  rank {rank:<3}{'outside':>18}")
                continue
            others = [str(r) for r in self.plan.inputs.subgroups[index].ranks if r != rank]
            line = f"  rank {rank:<3}{self.rows[index]:>12} of {self.batch_shape[0]}"
            line += f"{self.held[rank]:>14,} of {total:,}"
            lines.append(line + (f", with rank {', '.join(others)}" if others else ""))
        return "\n".join(lines)


def num_tokens(labels: Tensor) -> int:
    """Return how many tokens count for the loss; the model predicts no first token of a row."""
    return int((labels[:, 1:] != IGNORED).sum())


class Part(NamedTuple):
    """What was done under one plan.

    Attributes:
        num_steps: How many steps.
        shares: Each rank's share of their work.
    """

    num_steps: int
    shares: dict[int, float]


class Progress:
    """A line with loss, tokens per second and each rank's share of the work under the current plan.

    On a terminal it is one moving line, else some lines in all.
    """

    def __init__(self, layout: Layout, num_steps: int, *, is_shown: bool) -> None:
        """Prepare for ``num_steps`` calls of ``advance``."""
        self.layout = layout
        self.num_steps = num_steps
        self.losses: list[float] = []
        self._ended: list[Part] = []
        self._work: list[dict[int, float]] = []
        #: Seconds and tokens of the last steps, for a rate without the slow first step.
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)
        self._clock = time.perf_counter()
        self._is_shown = is_shown
        self._is_moving = is_shown and sys.stdout.isatty()
        self._bar = RichProgress(
            MofNCompleteColumn(),
            BarColumn(10),
            TextColumn("{task.description}"),
            disable=not self._is_moving,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=num_steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @property
    def current(self) -> Part:
        """What was done under the current plan so far."""
        num_steps = max(len(self._work), 1)
        ranks = range(self.layout.num_ranks)
        shares = {rank: sum(work[rank] for work in self._work) / num_steps for rank in ranks}
        return Part(len(self._work), shares)

    @property
    def parts(self) -> list[Part]:
        """What was done under each plan."""
        return [*self._ended, self.current]

    def switch(self, layout: Layout, text: str) -> None:
        """Count from now on under another plan, and show the text."""
        self._ended.append(self.current)
        self._work = []
        self.layout = layout
        if self._is_shown:
            print(text, flush=True)
        self._clock = time.perf_counter()

    def advance(self, loss: float, labels: Tensor) -> None:
        """Count a step and show it."""
        self.losses.append(loss)
        now = time.perf_counter()
        self._recent.append((now - self._clock, num_tokens(labels)))
        self._clock = now
        self._work.append(self.layout.work(labels))
        step = len(self.losses)
        if not self._is_shown:
            return
        seconds, tokens = map(sum, zip(*self._recent, strict=True))
        shares = " ".join(f"{100 * part:.0f}" for part in self.current.shares.values())
        text = f"loss {loss:.3f}  {tokens / seconds:6,.0f} tokens/s  work by rank {shares} %"
        if self._is_moving:
            self._bar.update(self._task, advance=1, description=text, refresh=True)
        elif step in (1, self.num_steps) or step % max(1, self.num_steps // NUM_LINES) == 0:
            print(f"step {step:>4}/{self.num_steps}  {text}", flush=True)


def switched(report: SwitchReport, name: str, layout: Layout, num_steps: int) -> str:
    """Return what a switch did: the new plan, what changed place, and what each rank sent and received.

    Args:
        report: What ``hdtensor.switch`` returned.
        name: Of the new plan.
        layout: Of the new plan.
        num_steps: Steps made before.
    """
    plan = report.plan
    states = sum(":" in name for name in report.moved)
    rounds = "1 round" if report.num_rounds == 1 else f"{report.num_rounds} rounds"
    lines = [
        f"\nafter step {num_steps} switched in place to {name}: {layout.plan.inputs}",
        f"{layout}",
        f"moved: {len(report.moved) - states} parameters, {states} tensors of AdamW's state, "
        f"{plan.num_bytes / 2**20:.1f} MiB between ranks in {rounds}, {report.seconds:.3f} s",
    ]
    for rank in range(layout.num_ranks):
        sent, received = (
            sum(side.get(rank, {}).values()) for side in (plan.sent_bytes, plan.received_bytes)
        )
        lines.append(f"  rank {rank:<3}sent {sent:>10,} bytes, received {received:>10,} bytes")
    return "\n".join([*lines, ""])


def summary(losses: Sequence[float], num_last: int = 10) -> str:
    """Return how far a training came; one batch's loss alone says little."""
    last = losses[-num_last:]
    mean = sum(last) / len(last)
    return f"loss {losses[0]:.3f} at step 1, mean {mean:.3f} over the last {len(last)} steps"


def compare(
    losses: Sequence[float],
    reference: Sequence[float],
    num_ranks: int,
    tolerance: float,
    *,
    after: int = 0,
) -> tuple[bool, str]:
    """Return whether losses are those of one process, and a table that shows it.

    Args:
        losses: Of each step.
        reference: Of some steps in a row, on one process.
        num_ranks: Processes that ``losses`` come from.
        tolerance: Each relative difference must be below it; NaN is not.
        after: Steps before the first of ``reference``, which then began with the state after them.
    """
    title = f"the first {len(reference)} steps beside plain PyTorch on one process:"
    if after:
        title = (
            f"the first {len(reference)} steps after the switch beside plain PyTorch on one process, "
            f"which\ngoes on with the weights and AdamW states of before the switch:"
        )
    lines = [f"\n{title}", f"  step   {num_ranks} processes   1 process   relative difference"]
    found = differences(losses[after:], reference)
    rows = zip(losses[after:], reference, found, strict=False)
    for step, (ours, theirs, difference) in enumerate(rows, start=after + 1):
        lines.append(f"  {step:>4}   {ours:11.7f}   {theirs:9.7f}   {difference:.1e}")
    is_equal = all(difference < tolerance for difference in found)
    verdict = "equal" if is_equal else "NOT EQUAL"
    lines.append(
        f"{verdict}: differences up to {largest(found):.1e}, allowed below {tolerance:.0e}"
    )
    return is_equal, "\n".join(lines)


def differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the relative differences of the steps that both have."""
    pairs = zip(losses, reference, strict=False)
    return [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]


def largest(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if there is one."""
    return max(values, key=lambda value: (math.isnan(value), value))


def draw(
    path: Path,
    layouts: Sequence[Layout],
    losses: Sequence[float],
    reference: Sequence[float],
    parts: Sequence[Part],
) -> Path:
    """Write the loss curve, and for each plan the ranks' shares and who owns what.

    Args:
        path: Of the picture.
        layouts: Of the plans, in order.
        losses: Of each step.
        reference: Of the first steps on one process; empty if there are none.
        parts: What was done under each plan.
    """
    phases = [
        Phase(
            part.num_steps,
            part.shares,
            {"input_ids": (layout.plan.inputs, layout.batch_shape), **_pictured(layout)},
        )
        for layout, part in zip(layouts, parts, strict=True)
    ]
    title = "Llama on the functions of Python's standard library"
    return write_phased_training_picture(path, losses, reference, phases=phases, title=title)


def _pictured(layout: Layout) -> dict[str, tuple[HDSpec, tuple[int, ...]]]:
    return {
        name: (layout.plan.tensors[name], shape)
        for name, shape in layout.shapes.items()
        if name.endswith(PICTURED)
    }


def states(layout: Layout, state_bytes: Sequence[int]) -> str:
    """Return what each rank keeps of the parameters and of AdamW's states.

    Args:
        layout: Who holds what.
        state_bytes: Bytes of each rank's part of the states.
    """
    whole = 2 * 4 * sum(math.prod(shape) for shape in layout.shapes.values())
    lines = [f"\n{'':8}{'parameters':>14}{'AdamW bytes':>16}{'without ZeRO-1':>18}"]
    for rank, num_bytes in enumerate(state_bytes):
        held = layout.held[rank]
        lines.append(f"  rank {rank:<3}{held:>12,}{num_bytes:>16,}{8 * held:>18,}")
    copies, without = sum(layout.held.values()), 8 * sum(layout.held.values())
    lines.append(f"  {'all':<8}{copies:>12,}{sum(state_bytes):>16,}{without:>18,}")
    lines.append(f"one process keeps {whole:,} bytes of AdamW's states")
    return "\n".join(lines)


def recorded(path: Path, timeline: Timeline) -> str:
    """Write a step's trace; return where it is, and how long each rank computed.

    Args:
        path: Of the trace.
        timeline: What the ranks did when.
    """
    timeline.save_trace(path)
    busy = " ".join(f"{seconds:.2f}" for seconds in timeline.busy_seconds().values())
    return (
        f"\nthe last step took {timeline.seconds:.2f} s; computing by rank {busy} s\n"
        f"trace: {path}, for https://ui.perfetto.dev"
    )
