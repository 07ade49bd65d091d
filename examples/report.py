"""What ``train_llama.py`` shows: who holds what, a progress line, the comparison, a picture."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TextColumn
from torch import Tensor, nn

from hdtensor.debug import write_training_picture
from hdtensor.placements import default_top_sizes, local_shape
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


class Layout:
    """Who holds what of a model and of a batch.

    Attributes:
        plan: The model's plan.
        shapes: Parameter name -> global shape.
        batch_shape: Rows and tokens of a row of the whole batch.
        num_ranks: Ranks of the world; some may be outside the plan.
        rows: Rows of the batch of each subgroup.
        held: Rank -> how many elements of the parameters it holds.
    """

    def __init__(
        self, plan: ExpandedPlan, model: nn.Module, batch_shape: tuple[int, int], num_ranks: int
    ) -> None:
        """Look at a model, which may be on the meta device."""
        self.plan = plan
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.batch_shape = batch_shape
        self.num_ranks = num_ranks
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
        subgroup holds of the parameters.

        Args:
            labels: Of the whole batch, ``[rows, tokens]``.
        """
        tokens = [num_tokens(block) for block in labels.split(self.rows)]
        parts = dict.fromkeys(range(self.num_ranks), 0.0)
        for subgroup, count in zip(self.plan.inputs.subgroups, tokens, strict=True):
            together = sum(self.held[rank] for rank in subgroup.ranks)
            for rank in subgroup.ranks:
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


class Progress:
    """A line with loss, tokens per second and each rank's share of the work.

    On a terminal it is one moving line, else some lines in all.
    """

    def __init__(self, layout: Layout, num_steps: int, *, is_shown: bool) -> None:
        """Prepare for ``num_steps`` calls of ``advance``."""
        self.layout = layout
        self.num_steps = num_steps
        self.losses: list[float] = []
        self.work = dict.fromkeys(range(layout.num_ranks), 0.0)
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
    def shares(self) -> dict[int, float]:
        """Each rank's share of the work so far."""
        num_steps = max(len(self.losses), 1)
        return {rank: part / num_steps for rank, part in self.work.items()}

    def advance(self, loss: float, labels: Tensor) -> None:
        """Count a step and show it."""
        self.losses.append(loss)
        now = time.perf_counter()
        self._recent.append((now - self._clock, num_tokens(labels)))
        self._clock = now
        for rank, part in self.layout.work(labels).items():
            self.work[rank] += part
        step = len(self.losses)
        if not self._is_shown:
            return
        seconds, tokens = map(sum, zip(*self._recent, strict=True))
        shares = " ".join(f"{100 * part:.0f}" for part in self.shares.values())
        text = f"loss {loss:.3f}  {tokens / seconds:6,.0f} tokens/s  work by rank {shares} %"
        if self._is_moving:
            self._bar.update(self._task, advance=1, description=text, refresh=True)
        elif step in (1, self.num_steps) or step % max(1, self.num_steps // NUM_LINES) == 0:
            print(f"step {step:>4}/{self.num_steps}  {text}", flush=True)


def summary(losses: Sequence[float], num_last: int = 10) -> str:
    """Return how far a training came; one batch's loss alone says little."""
    last = losses[-num_last:]
    mean = sum(last) / len(last)
    return f"loss {losses[0]:.3f} at step 1, mean {mean:.3f} over the last {len(last)} steps"


def compare(
    losses: Sequence[float], reference: Sequence[float], num_ranks: int, tolerance: float
) -> tuple[bool, str]:
    """Return whether losses are those of one process, and a table that shows it.

    Args:
        losses: Of each step.
        reference: Of the first steps, on one process.
        num_ranks: Processes that ``losses`` come from.
        tolerance: Each relative difference must be below it; NaN is not.
    """
    lines = [
        f"\nthe first {len(reference)} steps beside plain PyTorch on one process:",
        f"  step   {num_ranks} processes   1 process   relative difference",
    ]
    differences = []
    for step, (ours, theirs) in enumerate(zip(losses, reference, strict=False), start=1):
        differences.append(abs(ours - theirs) / abs(theirs))
        lines.append(f"  {step:>4}   {ours:11.7f}   {theirs:9.7f}   {differences[-1]:.1e}")
    is_equal = all(difference < tolerance for difference in differences)
    verdict = "equal" if is_equal else "NOT EQUAL"
    largest = max(differences, key=lambda difference: (math.isnan(difference), difference))
    lines.append(f"{verdict}: differences up to {largest:.1e}, allowed below {tolerance:.0e}")
    return is_equal, "\n".join(lines)


def draw(
    path: Path,
    layout: Layout,
    losses: Sequence[float],
    reference: Sequence[float],
    shares: Mapping[int, float],
) -> Path:
    """Write the loss curve, each rank's share, and who owns what of the batch and some parameters."""
    pictured = {
        name: (layout.plan.tensors[name], shape)
        for name, shape in layout.shapes.items()
        if name.endswith(PICTURED)
    }
    return write_training_picture(
        path,
        losses,
        reference,
        shares=shares,
        specs={"input_ids": (layout.plan.inputs, layout.batch_shape), **pictured},
        title="Llama on the functions of Python's standard library",
    )
