"""Running many cases in bounded time, over worlds that a case may hang or kill."""

import concurrent.futures
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ops.outcomes import CRASH, Case, Outcome
from tests.support.world import WorldError, run_world


#: Operators that one job runs.
JOB_OPS = 8
JOB_SECONDS = 240.0


def sweep(
    names: Sequence[str],
    layouts: Sequence[str],
    max_samples: int,
    *,
    variants: Sequence[str] = ("",),
    seconds: float,
    folder: Path,
    processes: int = 2,
) -> list[Outcome]:
    """Run all cases of the named operators; cases that end a world count as crashes.

    Args:
        names: Operators.
        layouts: Layouts.
        max_samples: Most samples of an operator.
        variants: Forms of the operators.
        seconds: No new job starts after as many; operators left over have no outcome.
        folder: Where journals go.
        processes: Number of worlds at the same time.
    """
    deadline = time.time() + seconds
    jobs = [
        (list(names[i : i + JOB_OPS]), folder / f"{i // JOB_OPS}.jsonl")
        for i in range(0, len(names), JOB_OPS)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    outcomes: list[Outcome] = []
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [
            pool.submit(
                _run_job, (job, list(layouts), max_samples, tuple(variants)), deadline, path
            )
            for job, path in jobs
        ]
        for done, future in enumerate(waiting, 1):
            outcomes += future.result()
            print(f"\r{done}/{len(jobs)} jobs, {len(outcomes)} cases", end="", flush=True)
    print()
    return outcomes


def _run_job(what: tuple[Any, ...], deadline: float, journal: Path) -> list[Outcome]:
    # The database takes seconds to import: only where it is used.
    from tests.ops.opinfo import WORLD_SIZE, run_ops  # noqa: PLC0415

    journal.unlink(missing_ok=True)
    if time.time() > deadline:
        return []
    outcomes: dict[Case, Outcome] = {}
    while True:
        try:
            skip = frozenset(outcomes)
            run_world(run_ops, WORLD_SIZE, *what, skip, str(journal), timeout=JOB_SECONDS)
        except WorldError as error:
            culprit = _read(journal, outcomes)
            if culprit is None:
                raise
            outcomes[culprit] = Outcome(culprit, CRASH, "world", _first_words(error))
            if time.time() < deadline:
                continue
        _read(journal, outcomes)
        return list(outcomes.values())


def _first_words(error: WorldError) -> str:
    said = [text.strip().splitlines() for text in error.failures.values()]
    return "; ".join(f"{lines[0]} {lines[-1][:200]}" for lines in said)


def _read(journal: Path, outcomes: dict[Case, Outcome]) -> Case | None:
    """Add what the journal has; return the case that has started and not ended."""
    started = None
    for line in journal.read_text().splitlines():
        ((key, entry),) = json.loads(line).items()
        if key == "start":
            started = Case(**entry)
        else:
            outcome = Outcome.from_dict(entry)
            outcomes[outcome.case] = outcome
            started = None
    return None if started in outcomes else started
