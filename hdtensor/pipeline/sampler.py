"""``LaneSampler``: one global order of samples, dealt to lanes by a plan's shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from hdtensor.errors import PlanError
from hdtensor.placements import HDSpec
from hdtensor.placements.layout import check_top_sizes, ratio_sizes


class LaneSampler(Sampler[list[int]]):
    """Yields for each step the indices of one lane's samples, as a ``DataLoader``'s ``batch_sampler``.

    The order of all samples follows from seed and epoch alone. Each step takes the next ``batch_size`` of it, and each
    lane a run of these, as long as its share: lane by lane what ``Runner.step(batch)`` would take of the whole batch. So
    the state, which knows of no lanes, goes on under any other plan.

    >>> lanes = [LaneSampler(10, batch_size=4, shares=(3, 1), lane=i, shuffle=False) for i in (0, 1)]
    >>> [list(lane) for lane in lanes]
    [[[0, 1, 2], [4, 5, 6], [8]], [[3], [7], [9]]]

    Attributes:
        epoch: Of the next step.
        position: Samples of that epoch that earlier steps took, over all lanes.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        shares: HDSpec | Sequence[int] = (1,),
        lane: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Begin with the first epoch.

        Args:
            num_samples: Samples of the data set.
            batch_size: Samples of a step, over all lanes. The last step of an epoch may have fewer.
            shares: Proportions of the lanes, or the plan's spec of inputs (``Runner.inputs``).
            lane: Number of the lane (``Runner.lane_index``); None yields whole batches.
            seed: The same on every rank.
            shuffle: Whether each epoch has an order of its own; without, samples come as they are numbered.

        Raises:
            PlanError: If a number is not what it may be.
        """
        super().__init__()
        for name, value, least in (("num_samples", num_samples, 0), ("batch_size", batch_size, 1)):
            if type(value) is not int or value < least:
                raise PlanError(
                    f"{name} must be a whole number of at least {least}, got {value!r}."
                )
        self._shares = _checked(shares)
        num_lanes = len(self._dealt(0))
        if lane is not None and (type(lane) is not int or not 0 <= lane < num_lanes):
            raise PlanError(
                f"lane {lane!r} is none of the {num_lanes} lanes of shares {shares}; give a number from 0, or None for "
                f"whole batches."
            )
        self._num_samples, self._batch_size, self._lane = num_samples, batch_size, lane
        self._seed, self._shuffle = seed, shuffle
        self.epoch = 0
        self.position = 0
        self._start = (0, 0)

    def __len__(self) -> int:
        """Return how many steps are left of the epoch, or are in the next one if it has ended."""
        left = self._num_samples - self.position
        return -(-(left or self._num_samples) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rest of the epoch; after its end the next one."""
        if self.position >= self._num_samples:
            self.set_epoch(self.epoch + 1)
        self._start = (self.epoch, self.position)
        order = self._order()
        while self.position < self._num_samples:
            batch = order[self.position : self.position + self._batch_size]
            self.position += len(batch)
            if self._lane is not None:
                sizes = self._dealt(len(batch))
                first = sum(sizes[: self._lane])
                batch = batch[first : first + sizes[self._lane]]
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Begin with an epoch."""
        self.epoch, self.position = epoch, 0

    def state_dict(self, num_steps: int | None = None) -> dict[str, int | bool]:
        """Return the state from which a sampler of any plan goes on.

        Args:
            num_steps: Steps that training made since the ``for`` loop over the epoch began: a ``DataLoader`` with
                worker processes draws ahead of them. Default: all that were drawn.

        Raises:
            PlanError: If fewer were drawn.
        """
        epoch, position = self.epoch, self.position
        if num_steps is not None:
            drawn = -(-(self.position - self._start[1]) // self._batch_size)
            if self.epoch != self._start[0] or not 0 <= num_steps <= drawn:
                raise PlanError(
                    f"num_steps: {num_steps} of {drawn} steps that were drawn of epoch {self.epoch}."
                )
            position = min(self._start[1] + num_steps * self._batch_size, self._num_samples)
        return {
            "epoch": epoch,
            "position": position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_samples": self._num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler stopped, whatever its lanes and its batch size were.

        Raises:
            PlanError: If the state is of a data set of another size.
        """
        if state["num_samples"] != self._num_samples:
            raise PlanError(
                f"the state is of {state['num_samples']} samples, this sampler has {self._num_samples}. Go on with the "
                f"same data, or begin with another epoch (set_epoch)."
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self.epoch, self.position = state["epoch"], state["position"]
        self._start = (self.epoch, self.position)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        generator = torch.Generator()
        generator.manual_seed((self._seed * 1_000_003 + self.epoch) % (1 << 63))
        return torch.randperm(self._num_samples, generator=generator).tolist()

    def _dealt(self, num: int) -> tuple[int, ...]:
        """Return how many of a step's samples each lane gets."""
        if isinstance(self._shares, HDSpec):
            return check_top_sizes(self._shares, (num,), None) or (num,)
        return ratio_sizes(num, self._shares)


def _checked(shares: HDSpec | Sequence[int]) -> HDSpec | tuple[int, ...]:
    if isinstance(shares, HDSpec):
        return shares
    found = tuple(shares)
    if any(type(n) is not int or n < 0 for n in found) or not sum(found):
        raise PlanError(f"shares must be whole numbers, not all 0, got {found}.")
    return found
