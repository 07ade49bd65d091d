"""One outcome for all ranks: whoever meets a bad file tells the others, and all raise the same error."""

from __future__ import annotations

import torch.distributed as dist

from hdtensor.api.agreement import communicates
from hdtensor.collectives import observe
from hdtensor.errors import CheckpointError


def agree(function: str, problem: Exception | None) -> None:
    """Raise on every rank what some rank met; every rank of the world calls it.

    Args:
        function: What is being done, for the message.
        problem: What this rank met.

    Raises:
        CheckpointError: Alike on every rank, if some rank has a problem.
    """
    said: list[str | None] = [None if problem is None else describe(problem)]
    if communicates():
        said = [None] * dist.get_world_size()
        observe.announce(function, range(len(said)))
        dist.all_gather_object(said, None if problem is None else describe(problem))
    failures = {rank: text for rank, text in enumerate(said) if text is not None}
    if failures:
        raise CheckpointError(f"{function}: {listing(failures)}") from problem


def describe(problem: BaseException) -> str:
    """Return an error's text, with its type unless it is one of ours."""
    text = str(problem).strip() or "no message"
    return text if isinstance(problem, CheckpointError) else f"{type(problem).__name__}: {text}"


def listing(failures: dict[int, str]) -> str:
    """Return what ranks met, each text once with the ranks that met it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"{text} (rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))})"
        for text, of in ranks.items()
    )
