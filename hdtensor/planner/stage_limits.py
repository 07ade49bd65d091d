"""``StageLimits``: whether the stages of a lane can hold all layers, when each of them has to end in time.

``lane_bounds`` looks at a lane's slowest stage. Here each stage has a limit of its own, by where it may stand in the lane and by its
own synchronization and optimizer; a lane whose stages are unlike gains least from that. The formulas are proven in docs/planner_bound.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdtensor.planner.lane_sets import LaneSets
from hdtensor.planner.space import Floats, Ints
from hdtensor.planner.tails import Tails


#: Times that limits are found again with the sum of stages that the last ones leave.
_ROUNDS = 4
#: Relative slack for sums in another order.
_ROUNDING = 1e-9
#: What a number that divides is at least.
_TINY = 1e-30


class StageLimits:
    """Limits of all stages of each set of kinds, for 1F1B; arrays are of shape (stages, sets), the fastest stages first."""

    def __init__(self, sets: LaneSets, tails: Tails, m: int) -> None:
        """Sort the stages of each set.

        Args:
            sets: What lanes can be made of; of known kinds only.
            tails: What comes after the passes of a stage, at least.
            m: Number of the size of micro-batches.
        """
        space, prices = sets.space, sets.space.prices
        self._num_layers, self._is_whole = float(space.num_layers), sets.is_whole
        self._stages = sets.stages.astype(float)
        known = np.isfinite(prices.layer[:, m])
        order = np.flatnonzero(known)[np.argsort(prices.layer[known, m], kind="stable")]
        table = np.zeros((len(sets.stages), int(sets.stages.max(initial=0))), dtype=np.int64)
        is_stage = np.arange(table.shape[1]) < sets.stages[:, None]
        kinds = np.tile(order, len(table)).repeat(sets.counts[:, order].ravel())
        table[is_stage] = kinds
        self._kinds, self._is_stage = table.T, is_stage.T
        self._layer = np.where(known, prices.layer[:, m], 1.0)
        self._beside, self._per_layer = tails.beside, tails.per_layer
        self._ones = np.where(self._is_stage, self._layer[self._kinds], 0.0).cumsum(axis=0)
        self._rest = sets.least(prices.first[:, m]) + sets.least(prices.last[:, m])
        self._tail = sets.least(tails.beside + tails.first + tails.per_layer)
        self._phi, self._least = sets.phi, sets.limit(m).sums.min(axis=0)
        self._least_forward, self._forward = sets.least(sets.forwards[0]), sets.forwards[1]

    def may_hold(self, rows: Ints, most: Ints, seconds: float) -> npt.NDArray[np.bool_]:
        """Return whether lanes may have all layers and do so many micro-batches in a time.

        Args:
            rows: Numbers of the sets, of shape (lanes,).
            most: Micro-batches of each, 1 or more, likewise.
            seconds: The time.
        """
        count, stages = most.astype(float), self._stages[rows]
        kinds, is_stage = self._kinds[:, rows], self._is_stage[:, rows]
        seconds *= 1 + _ROUNDING
        end = seconds - self._tail[rows]
        number = np.arange(1, len(kinds) + 1)[:, None]
        behind = np.minimum(np.maximum(stages - number, 0), count - 1)
        places = 1 / np.maximum(count - 1 - behind * self._phi[rows], _TINY)
        sums = np.where(is_stage, places, 0.0).cumsum(axis=0)
        before = end * (1 - (1 - 1 / count) ** number)
        chain = np.maximum(count - 1 - stages, _TINY)
        total = self._least[rows]
        able: npt.NDArray[np.bool_] = total <= end
        for _ in range(_ROUNDS):
            rest = np.maximum(end - total, 0)
            slowest = np.where(count > stages + 1, np.maximum(rest - total, 0) / chain, np.inf)
            own = self._own(rows, kinds, count, seconds, total)
            caps = np.minimum(own, np.minimum(rest * places[0], slowest))
            caps = np.where(is_stage, caps, 0.0)
            holds, total = self._fill(rows, caps, np.minimum(before, rest * sums))
            able &= holds & (total <= end)
        return able

    def _own(self, rows: Ints, kinds: Ints, count: Floats, seconds: float, total: Floats) -> Floats:
        """Return the seconds of layers with which each stage's own tail ends in time, when all stages take a total."""
        least, layer = self._least_forward[rows], self._layer[kinds]
        ahead = np.minimum(self._stages[rows] - 1, count - 1)
        passes = count - least * (1 + ahead * self._forward[kinds])
        room = seconds - least * total - self._beside[kinds]
        layers = room / np.maximum(passes * layer + self._per_layer[kinds], _TINY)
        if self._is_whole:
            layers = np.floor(layers + _ROUNDING)
        found: Floats = layers * layer
        return found

    def _fill(
        self, rows: Ints, caps: Floats, limits: Floats
    ) -> tuple[npt.NDArray[np.bool_], Floats]:
        """Return whether all layers fit, and the least seconds of all stages: the fastest ones take what they may.

        Args:
            rows: Numbers of the sets.
            caps: What each stage takes at most.
            limits: What each stage and all faster ones take at most together.
        """
        is_stage, ones = self._is_stage[:, rows], self._ones[:, rows]
        layers = np.where(is_stage, self._layer[self._kinds[:, rows]], 1.0)
        left = self._num_layers - self._stages[rows]
        total, reach = ones[-1] + self._rest[rows], np.zeros(len(rows))
        able = np.ones(len(rows), dtype=bool)
        one = np.zeros(len(rows))
        for stage, layer in enumerate(layers):
            further = np.minimum(reach + caps[stage], limits[stage])
            here = is_stage[stage]
            least = ones[stage] - one
            able &= (further >= ones[stage] * (1 - _ROUNDING)) | ~here
            able &= (caps[stage] >= least * (1 - _ROUNDING)) | ~here
            done = np.minimum(left, np.maximum(further - reach - least, 0) / layer * here)
            total, left = total + done * layer, left - done
            reach, one = further, ones[stage]
        return able & (left <= self._num_layers * _ROUNDING), total
