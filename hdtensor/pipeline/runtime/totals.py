"""What all ranks learn of a step at its end: losses, what counts, and where torch's generator stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from hdtensor.api.agreement import communicates
from hdtensor.api.parameters import device_of
from hdtensor.collectives import groups
from hdtensor.pipeline.runtime.losses import check_means
from hdtensor.pipeline.runtime.surroundings import Surroundings


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over micro-batches, of one rank or of all.

    Attributes:
        loss: Sum of the losses.
        count: How many they are.
    """

    loss: float = 0.0
    count: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        """Return the sums of both."""
        return Totals(self.loss + other.loss, self.count + other.count)

    def mean(self) -> torch.Tensor:
        """Return the mean loss, a plain tensor without dims; NaN if nothing counts."""
        return torch.tensor(self.loss / self.count if self.count else float("nan"))


#: Of a rank that knows no mean: the least and the most targets of none.
NO_MEANS = (math.inf, -math.inf)


class End(NamedTuple):
    """What all ranks learn at the end of a step.

    Attributes:
        total: Losses and counts of all ranks.
        has_failed: Whether a loss failed somewhere.
        is_late: Whether some rank has gradients that came after their bucket had gone.
        problem: Why the losses of all ranks are no mean.
    """

    total: Totals
    has_failed: bool
    is_late: bool
    problem: Exception | None


def gather(
    mine: Totals,
    surroundings: Surroundings,
    *,
    has_failed: bool,
    is_late: bool,
    means: tuple[float, float],
) -> End:
    """Return what all ranks learn; every rank of the world calls it.

    Afterwards torch's generator of the CPU stands on every rank where the model's call for the whole batch would have
    left it, also on ranks that called none, or only their stages of it.

    Args:
        mine: This rank's.
        surroundings: Of the micro-batches that it ran.
        has_failed: Whether its loss failed.
        is_late: Whether it has late gradients.
        means: The least and the most targets of its micro-batches of whose losses the mean alone is known.
    """
    before, after = surroundings.before, surroundings.after
    if not communicates():
        torch.set_rng_state(before if after is None else after)
        problem = _problem([means])
        return End(mine, has_failed or problem is not None, is_late, problem)
    has_drawn = after is not None and not torch.equal(before, after)
    flags = [after is not None, has_drawn, has_failed, is_late]
    row = [mine.loss, mine.count, *map(float, flags), *means]
    table = torch.zeros(dist.get_world_size(), len(row), dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(row, dtype=torch.float64)
    table = table.to(device_of(None))
    dist.all_reduce(table, group=groups.lane_group())  # every other rank adds zero to a row
    rows = table.tolist()
    state = before if after is None else after
    ran = [rank for rank, told in enumerate(rows) if told[2]]
    if len(ran) < len(rows) and any(told[3] for told in rows):
        sent = state.to(device_of(None))
        dist.broadcast(sent, src=ran[0], group=groups.lane_group())
        state = sent.cpu()
    torch.set_rng_state(state)
    total = Totals(sum(told[0] for told in rows), sum(told[1] for told in rows))
    problem = _problem([(told[6], told[7]) for told in rows])
    has_failed = problem is not None or any(told[4] for told in rows)
    return End(total, has_failed, any(told[5] for told in rows), problem)


def _problem(means: Sequence[tuple[float, float]]) -> Exception | None:
    known = [pair for pair in means if pair != NO_MEANS]
    if not known:
        return None
    return check_means(min(least for least, _ in known), max(most for _, most in known))
