"""What holds around each action of a schedule, so that its micro-batch computes what it would in the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hdtensor.ops.special.random import rows_of_batch
from hdtensor.pipeline.runtime.feed import MicroBatch
from hdtensor.pipeline.runtime.replay import recording, replaying
from hdtensor.pipeline.schedule.actions import Action, Kind


class Surroundings:
    """Gives each micro-batch its samples' place in the whole batch, and the random numbers of the whole batch's call.

    Every call of the model begins where torch's generator stood before the step. A call that waits at a cut goes on where
    it stopped. Backward runs outside of autocast, as after an ordinary forward.

    Attributes:
        before: The generator's state before the step.
        after: Its state after a call of the whole model; None where each call left after this rank's stages.
    """

    def __init__(self, parts: Sequence[MicroBatch], note: Callable[[Action], object]) -> None:
        """Prepare a step.

        Args:
            parts: The micro-batches.
            note: Called with each action before it begins.
        """
        self._parts = parts
        self._note = note
        self.before = torch.get_rng_state()
        self.after: torch.Tensor | None = None

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Have them hold while an action runs."""
        self._note(action)
        part = self._parts[action.microbatch]
        with rows_of_batch(part.first_row, part.num_rows):
            if action.kind is not Kind.FORWARD:
                with replaying(part), _without_autocast():
                    yield
                return
            torch.set_rng_state(
                self.before if part.generator_state is None else part.generator_state
            )
            with recording(part):
                yield
            part.generator_state = torch.get_rng_state()

    def note_called(self) -> None:
        """Note where the generator stands at the end of a call of the model."""
        if self.after is None:
            self.after = torch.get_rng_state()


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configurations of ``transformers`` models that a model is or has inside, each once."""
    found: list[Any] = [getattr(m, "config", None) for m in model.modules()]
    return list({id(c): c for c in found if c is not None}.values())


@contextlib.contextmanager
def without_cache(configs: Sequence[Any]) -> Iterator[None]:
    """Have ``transformers`` models keep no cache of keys and values, which a training step has no use for.

    A cache holds every micro-batch's keys, and a layer that is computed again would add to it twice.
    """
    changed = [c for c in configs if getattr(c, "use_cache", False) is True]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _without_autocast() -> contextlib.AbstractContextManager[object]:
    enabled = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not enabled:
        return _AS_IT_IS
    stack = contextlib.ExitStack()
    for kind in enabled:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


_AS_IT_IS = contextlib.nullcontext()
