"""What a step is fed with: this lane's micro-batches, from a whole batch, from lists for each lane, or from one rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hdtensor.api.agreement import attempt, communicates, exchange, require_alike
from hdtensor.api.batches import batch_facts
from hdtensor.errors import DisagreementError, PlanError
from hdtensor.pipeline.runtime import delivery
from hdtensor.pipeline.runtime.batches import lane_rows, microbatches, num_rows, rows
from hdtensor.pipeline.runtime.inputs import InputLayout, check_form
from hdtensor.placements import HDSpec


#: Lane -> its micro-batches.
LaneParts = Mapping[int, Sequence[Any]]


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch of a lane.

    Attributes:
        data: Its tensors; of what this rank has no use for only the shapes may be right.
        first_row: Number of its first sample among the samples of all lanes, lane by lane.
        num_rows: Its samples.
        generator_state: torch's generator, as the model's call left it at its last cut.
        behind: Stage point -> what gives the tensors behind it again, call by call.
    """

    data: Any
    first_row: int
    num_rows: int
    generator_state: torch.Tensor | None = None
    behind: dict[Any, list[list[Any]]] = field(default_factory=dict)


class Portions(NamedTuple):
    """How a whole batch becomes micro-batches.

    Attributes:
        inputs: Spec whose subgroups are the lanes, with their shares.
        counts: Micro-batches of each lane; None where their size says it.
        sizes: Samples of each of them, where the plan says it.
    """

    inputs: HDSpec
    counts: Sequence[int | None]
    sizes: Sequence[int | None]


class Feed:
    """Takes what ``Runner.step`` is called with, on every rank of the world."""

    def __init__(
        self, portions: Portions, layouts: Sequence[InputLayout], index: int | None
    ) -> None:
        """Prepare.

        Args:
            portions: How a whole batch becomes micro-batches.
            layouts: Of each lane.
            index: Number of this rank's lane; None outside of all.
        """
        self._portions = portions
        self._layouts = layouts
        self._index = index
        self._is_checked = False

    def take(self, batch: Any, lanes: Any, source: int | None) -> list[MicroBatch]:
        """Return this rank's micro-batches.

        Args:
            batch: A whole batch.
            lanes: Or what each lane gets.
            source: Rank that has either; None: every rank.

        Raises:
            PlanError: If what is passed has a form that is not known.
            DisagreementError: On every rank, if ranks pass what does not fit together, or one of them fails.
        """
        rank = dist.get_rank() if communicates() else source
        is_loader = source is None or rank == source
        if not self._is_checked and communicates():
            self._compare(batch, lanes, source, is_loader)
            self._is_checked = True
        if source is None:
            if lanes is None:
                return self._numbered(self._divided(batch))
            return self._from_lanes(lanes)
        parts, problem = None, None
        if is_loader:
            parts, problem = attempt(lambda: self._loaded(batch, lanes))
        if communicates():
            parts = self._from_source(parts, problem, source)
        elif problem is not None:
            raise problem
        return self._numbered(parts or {})

    def _compare(self, batch: Any, lanes: Any, source: int | None, is_loader: bool) -> None:
        """Raise on every rank unless all ranks' first calls fit together."""

        def facts() -> Any:
            if source is not None:
                _check_source(source)
                if not is_loader and (batch is not None or lanes is not None):
                    raise PlanError(
                        f"only rank {source} passes a batch, src_data_rank; the others pass None."
                    )
                return "src_data_rank", source
            _check_one(batch, lanes)
            return ("lanes",) if lanes is not None else ("batch", batch_facts(batch))

        mine, problem = attempt(facts)
        require_alike(
            "Runner.step",
            exchange("Runner.step", mine, problem),
            "Every rank passes the same whole batch, or all pass lanes=, or all name one src_data_rank.",
        )

    # -- a batch in parts -----------------------------------------------------------------------------------------

    def _loaded(self, batch: Any, lanes: Any) -> LaneParts:
        """Return all lanes' micro-batches."""
        _check_one(batch, lanes)
        if lanes is None:
            return self._divided(batch)
        parts = self._given(lanes)
        missing = [lane for lane in range(len(self._layouts)) if lane not in parts]
        if missing:
            raise PlanError(
                f"lanes: nothing for lanes {missing}; the rank that loads passes every lane's micro-batches, [] for "
                f"one that has none."
            )
        return parts

    def _divided(self, batch: Any) -> LaneParts:
        """Return all lanes' micro-batches of a whole batch."""
        check_form(batch)
        shares = lane_rows(self._portions.inputs, num_rows(batch))
        return {lane: self._split(lane, rows(batch, *share)) for lane, share in enumerate(shares)}

    def _split(self, lane: int, samples: Any) -> list[Any]:
        return microbatches(samples, self._portions.counts[lane], self._portions.sizes[lane])

    def _given(self, lanes: Any) -> LaneParts:
        """Return the micro-batches of the lanes that are passed."""
        parts: dict[int, Sequence[Any]] = {}
        for lane, entry in lanes.items() if isinstance(lanes, Mapping) else enumerate(lanes):
            if lane not in range(len(self._layouts)):
                raise PlanError(
                    f"lanes: there is no lane {lane!r}; the plan has {len(self._layouts)}, numbered from 0."
                )
            if isinstance(entry, list):
                for part in entry:
                    check_form(part)
                    if not num_rows(part):
                        raise PlanError(
                            f"lanes: a micro-batch of lane {lane} has no samples; leave it out."
                        )
                parts[lane] = entry
            elif entry is not None:
                check_form(entry)
                parts[lane] = self._split(lane, entry)
        return parts

    # -- from lists for each lane, and from one rank --------------------------------------------------------------

    def _from_lanes(self, lanes: Any) -> list[MicroBatch]:
        """Take this rank's own lane's part; the lane's other ranks must have the same."""

        def own() -> tuple[LaneParts, Any]:
            parts = self._given(lanes)
            if self._index is None:
                return parts, None
            if self._index not in parts:
                raise PlanError(
                    f"lanes: nothing for lane {self._index}, which this rank is in. Each rank passes at least its own "
                    f"lane's micro-batches; [] for a lane that has none in this step."
                )
            mine = parts[self._index]
            return parts, (
                self._index,
                [num_rows(p) for p in mine],
                str([delivery.outlined(p) for p in mine]),
            )

        found, problem = attempt(own)
        if not communicates():
            if problem is not None:
                raise problem
            return self._numbered((found or ({}, None))[0])
        said = exchange("Runner.step", found and found[1], problem)
        rows_of = _rows_of_lanes(said)
        if found is None or self._index is None:
            return []
        before = sum(num for lane, num in rows_of.items() if lane < self._index)
        return _in_order(found[0][self._index], before)

    def _from_source(
        self, parts: LaneParts | None, problem: Exception | None, source: int
    ) -> LaneParts:
        """Hear of all shapes from one rank, and get what this rank needs."""
        letter: list[Any] = [None]
        if problem is not None:
            letter = [f"{type(problem).__name__}: {problem}"]
        elif parts is not None:
            letter = [{lane: [delivery.outlined(p) for p in ps] for lane, ps in parts.items()}]
        dist.broadcast_object_list(letter, src=source)
        if problem is not None:
            raise problem
        if isinstance(letter[0], str):
            raise DisagreementError(
                f"Runner.step cannot go on: rank {source} fails with {letter[0]}"
            )
        if parts is not None:
            delivery.send(parts, self._layouts)
            return parts
        found = {lane: [delivery.stand_ins(p) for p in ps] for lane, ps in letter[0].items()}
        if self._index is not None:
            own = found[self._index]
            found[self._index] = delivery.receive(own, self._layouts[self._index], source)
        return found

    def _numbered(self, parts: LaneParts) -> list[MicroBatch]:
        if self._index is None:
            return []
        before = sum(num_rows(p) for lane, ps in parts.items() if lane < self._index for p in ps)
        return _in_order(parts[self._index], before)


def _in_order(parts: Sequence[Any], before: int) -> list[MicroBatch]:
    nums = [num_rows(p) for p in parts]
    starts = itertools.accumulate(nums, initial=before)
    return [MicroBatch(p, first, num) for p, first, num in zip(parts, starts, nums, strict=False)]


def _rows_of_lanes(said: Sequence[Any]) -> dict[int, int]:
    """Return the samples of each lane, of which each rank said (lane, samples of each micro-batch, shapes)."""
    first_of: dict[int, tuple[int, Any]] = {}
    for rank, fact in enumerate(said):
        if fact is None:
            continue
        first, known = first_of.setdefault(fact[0], (rank, fact))
        if known != fact:
            raise DisagreementError(
                f"Runner.step: ranks {first} and {rank} of lane {fact[0]} pass unlike micro-batches: {known[2]} and "
                f"{fact[2]}. All ranks of a lane pass the same ones."
            )
    return {lane: sum(fact[1]) for lane, (_, fact) in first_of.items()}


def _check_one(batch: Any, lanes: Any) -> None:
    if (batch is None) == (lanes is None):
        what = "neither" if batch is None else "both"
        raise PlanError(
            f"a step takes a whole batch, or lanes= with each lane's micro-batches, got {what}."
        )


def _check_source(source: Any) -> None:
    if type(source) is not int or not 0 <= source < dist.get_world_size():
        raise PlanError(
            f"src_data_rank {source!r} is no rank of the world of {dist.get_world_size()}."
        )
