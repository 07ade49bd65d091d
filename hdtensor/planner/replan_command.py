"""``hdtensor plan --replan``: a plan file's plan anew, after ranks were lost or came back."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hdtensor.errors import PlannerError
from hdtensor.placements.checks import ranks_text
from hdtensor.planner.bounds import lower_bound
from hdtensor.planner.command_inputs import costs_of, planned_of, ranks, search_options, warn
from hdtensor.planner.copies import Lost, find_lost
from hdtensor.planner.costs import CostModel
from hdtensor.planner.emit import Planned
from hdtensor.planner.planning import with_tight_bound
from hdtensor.planner.quantities import whole_number
from hdtensor.planner.resume import kept_lanes, options_for, replan_strategy
from hdtensor.planner.search import SearchResult
from hdtensor.planner.space import make_space
from hdtensor.planner.text_report import seconds_text


#: What the file says, and what is for a search from the beginning.
_NOT_ALLOWED = ("model", "batch", "cluster", "device", "nodes", "context", "precision", "optimizer", "recompute",
                "schedule", "zero", "seconds", "uniform")  # fmt: skip


class Replanned(NamedTuple):
    """A plan after ranks were lost or came back.

    Attributes:
        planned: The new strategy, and what it is for.
        result: What the search says of it.
        costs: What it was found with.
        lost: Ranks of the cluster that may not be used.
        facts: What to tell: ``lost``, ``lanes_kept``, ``lanes_before``, ``seconds``, and ``only_on_lost_ranks``: what
            a running job needs a checkpoint for; empty of a search.
    """

    planned: Planned
    result: SearchResult
    costs: CostModel
    lost: tuple[int, ...]
    facts: Mapping[str, Any]


def add_replan(group: argparse._ArgumentGroup) -> None:
    """Add the options of a re-plan."""
    group.add_argument(
        "--replan",
        metavar="PLAN",
        help="start from this plan's file, which says model, cluster and step: lanes that lost nothing stay",
    )
    group.add_argument("--label", metavar="TEXT", help="which plan of a file of several")
    group.add_argument(
        "--without", type=ranks, default=(), metavar="N,N", help="ranks that are lost"
    )
    group.add_argument(
        "--renumber",
        action="store_true",
        help="number the ranks that are left from 0, for a restart with as many processes, from a checkpoint",
    )
    group.add_argument(
        "--back", type=ranks, default=(), metavar="N,N", help="ranks that the file lost and that are back"
    )  # fmt: skip


def replan_of(options: argparse.Namespace, should_stop: Callable[[], bool]) -> Replanned:
    """Return the plan of the options' file anew, for the ranks that are left.

    Args:
        options: Of the command.
        should_stop: Ends what makes the bound tight.

    Raises:
        PlannerError: If an option contradicts the file, no rank is left, or nothing fits.
    """
    given = [name for name in _NOT_ALLOWED if getattr(options, name) not in (None, False)]
    if given:
        raise PlannerError(
            f"{given[0]}: not allowed with --replan, which keeps what the plan is for; plan anew without it."
        )
    options.plan = options.replan
    planned, purpose, conflict = planned_of(options)
    costs = costs_of(planned, options)
    num_ranks = planned.cluster.num_ranks
    before = set(_lost_of(purpose, num_ranks))
    lost = (before | set(options.without)) - set(options.back)
    check_lost(lost | set(options.back), num_ranks)
    if lost == before:
        raise PlannerError(
            f"without: the plan already does without {_words(lost)}; name ranks that are lost now, or --back."
        )
    started = time.perf_counter()
    usable = [rank for rank in range(num_ranks) if rank not in before]
    space = make_space(
        planned.cluster,
        costs,
        planned.workload,
        planned.model.num_layers,
        options_for(planned.strategy, search_options(options)),
        ranks=usable,
    )
    result = replan_strategy(space, planned.strategy, set(range(num_ranks)) - lost)
    seconds = time.perf_counter() - started
    facts = {
        "lost": sorted(lost),
        "lanes_kept": len(kept_lanes(planned.strategy, result.strategy)),
        "lanes_before": len(planned.strategy.lanes),
        "seconds": seconds,
    }
    gone = find_lost(planned, lost)
    facts["only_on_lost_ranks"] = {**gone.to_dict(), "optimizer_states": gone.states}
    result = replace(result, bound=lower_bound(result.space, result.seconds))
    if space.options.tight_bound:
        result = with_tight_bound(result, should_stop)
    new = planned._replace(strategy=result.strategy)
    warn(conflict, options)
    return Replanned(new, result, costs, tuple(sorted(lost)), facts)


def replan_text(facts: Mapping[str, Any]) -> str:
    """Return a line that says what a re-plan kept, and how long it took, and one that says whether a checkpoint is needed."""
    whole = f"without {_words(facts['lost'])}" if facts["lost"] else "with all ranks"
    first = (
        f"re-planned in {seconds_text(facts['seconds'])} {whole}: {facts['lanes_kept']} of "
        f"{facts['lanes_before']} lanes stay on their ranks"
    )
    return f"{first}\n{_checkpoint_text(facts['only_on_lost_ranks'])}" if facts["lost"] else first


def _checkpoint_text(gone: Mapping[str, Any]) -> str:
    """Return whether a running job can go on from what the ranks that are left hold."""
    layers = tuple((first, last) for first, last in gone["layers"])
    lost = Lost(gone["embedding"], layers, gone["head"], gone["optimizer_states"])
    if not lost.states:
        return "no checkpoint is needed: ranks that are left hold all that the lost ones held"
    what = f"{lost.words()} and their optimizer states"
    if not lost.has_weights:
        what = "their parts of the optimizer's states (ZeRO 1)"
    return f"the running job cannot switch to this plan without a checkpoint: only lost ranks had {what}"


def check_lost(lost: set[int], num_ranks: int) -> None:
    """Refuse ranks that the cluster does not have, or all of them.

    Raises:
        PlannerError: If so.
    """
    if lost and not lost < set(range(num_ranks)):
        raise PlannerError(
            f"without: the cluster has ranks 0 to {num_ranks - 1}, and some must be left; got "
            f"{ranks_text(tuple(sorted(lost)))}."
        )


def _lost_of(purpose: Mapping[str, Any], num_ranks: int) -> tuple[int, ...]:
    lost = purpose.get("lost", [])
    if not isinstance(lost, list):
        raise PlannerError(f"planned_for.lost: must be a list of ranks, got {str(lost)[:60]}.")
    return tuple(whole_number("planned_for.lost", rank, 0, num_ranks - 1) for rank in lost)


def _words(lost: Any) -> str:
    some = tuple(sorted(lost))
    return f"ranks {ranks_text(some)}" if some else "no rank"
