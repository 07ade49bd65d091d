"""What a call of the model showed, for later micro-batches of the same shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hdtensor.errors import PipelineError
from hdtensor.pipeline.runtime.crossings import Route
from hdtensor.placements import HDSpec
from hdtensor.tensor import HDTensor


class Coming(NamedTuple):
    """A tensor that arrives in each call with such a micro-batch.

    Attributes:
        number: Number of its crossing in the call.
        path: Its way.
        device: Where it is needed.
    """

    number: int
    path: Route
    device: torch.device


class Border(NamedTuple):
    """Where a layer is in its lane.

    Attributes:
        spec: Of hidden states on the layer's stage.
        ranks: The stage's.
        is_home: Whether this rank is one of them.
        is_turn: Whether a stage begins there though the ranks stay.
        begins: Whether a stage begins there.
    """

    spec: HDSpec
    ranks: frozenset[int]
    is_home: bool
    is_turn: bool
    begins: bool

    def is_foreign(self, x: HDTensor) -> bool:
        """Return whether another stage made a tensor that the layer gets."""
        spec = x._spec.spec
        return self.is_turn or (spec is not self.spec and self.ranks != set(spec.ranks))


@dataclass(slots=True)
class Manner:
    """What is known of calls of some kind, whatever the sizes of their micro-batches.

    Attributes:
        can_be_plain: Whether this rank's stage computes the same on plain tensors; None: it was not tried.
        num_kept: Calls that could not be tried, since they changed what modules keep.
    """

    can_be_plain: bool | None = None
    num_kept: int = 0


@dataclass(slots=True)
class Learned:
    """What a call with micro-batches of some shapes showed.

    Attributes:
        coming: Stage -> what arrives there.
        last: Number of the last crossing in which this rank takes part; None before a call has ended.
        manner: What is known of all calls that differ from this one in sizes only.
        held: Call of a stage point of another stage -> the places among its arguments of what this rank's stage made, and
            the ways of that.
        foreign: Call of a stage point of this rank's -> the places among its arguments of what other stages made.
    """

    coming: dict[int, list[Coming]] = field(default_factory=dict)
    last: int | None = None
    manner: Manner = field(default_factory=Manner)
    held: dict[int, Mapping[Any, Route]] = field(default_factory=dict)
    foreign: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def checked_held(
        self, call: int, tensors: Mapping[Any, torch.Tensor], spec: HDSpec
    ) -> Mapping[Any, Route]:
        """Return the ways of what this rank's stage made and a layer of another one gets.

        Args:
            call: Number of the call of a stage point.
            tensors: What the layer takes, by its place among the arguments.
            spec: Of hidden states on the layer's stage.

        Raises:
            PipelineError: If a tensor that an earlier call showed is missing.
        """
        known = self.held.get(call, {})
        for place, path in known.items():
            x = tensors.get(place)
            if x is None or x.shape != path.home.shape or x.dtype != path.after.dtype:
                came = "nothing" if x is None else f"{x.dtype} of {list(x.shape)}"
                raise PipelineError(
                    f"a layer on ranks {list(spec.ranks)} is called with {came} where an earlier micro-batch of the same "
                    f"shapes gave it {path.after.dtype} of {list(path.home.shape)} from an earlier stage. What goes from "
                    f"stage to stage may depend on shapes, but not on values."
                )
        return known

    def check_foreign(self, call: int, tensors: Mapping[Any, torch.Tensor], border: Border) -> None:
        """Raise if a layer of this rank's gets tensors of other stages at other places than in an earlier call.

        Their messages would not be sent, or be waited for in vain; the rank that made them cannot tell.

        Args:
            call: Number of the call of a stage point.
            tensors: What the layer takes, by its place among the arguments.
            border: Where the layer is.

        Raises:
            PipelineError: If so.
        """
        present = tuple(
            [i for i, x in tensors.items() if isinstance(x, HDTensor) and border.is_foreign(x)]
        )
        known = self.foreign.setdefault(call, present)
        if known != present:
            raise PipelineError(
                f"a layer on ranks {list(border.spec.ranks)} gets {len(present)} tensors of earlier stages where an earlier "
                f"micro-batch of the same shapes gave it {len(known)}, or gets them at other places. What goes from stage "
                f"to stage may depend on shapes, but not on values: pass a tensor of zeros or ones instead of None."
            )
