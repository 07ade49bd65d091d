"""Options that the planner's commands share, and the values that they stand for."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from typing import Any, NamedTuple

from hdtensor.errors import PlannerError
from hdtensor.pipeline.plan_files import read_plan
from hdtensor.plan import StrategyPlan
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.cluster_files import read_cluster
from hdtensor.planner.cluster_text import MAX_RANKS
from hdtensor.planner.costs import CostModel
from hdtensor.planner.emit import Planned, read_planned
from hdtensor.planner.planning import make_costs
from hdtensor.planner.profiled import ProfiledCosts
from hdtensor.planner.profiles import Profile
from hdtensor.planner.quantities import planner_errors
from hdtensor.planner.space import SearchOptions
from hdtensor.planner.workload import OPTIMIZERS, PRECISIONS, SCHEDULES, Workload


_MOST_DIGITS = 12


def add_cluster(parser: argparse.ArgumentParser | argparse._ArgumentGroup, default: str) -> None:
    """Add the options that say a cluster.

    Args:
        parser: Where to.
        default: What it is without them, in words.
    """
    parser.add_argument(
        "--cluster",
        metavar="WHAT",
        help="a text such as '16x H800 + 32x H20', a YAML or JSON file, a file of what `nvidia-smi topo -m` "
        f"printed, slurm, or this; default {default}",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="kind of devices, for slurm and nvidia-smi"
    )
    parser.add_argument(
        "--nodes", type=number, metavar="N", help="nodes like the one that nvidia-smi printed"
    )


def add_workload(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options that say a step; all without default, so that a plan can say them."""
    parser.add_argument("--context", type=number, metavar="N", help="tokens of a sample")
    parser.add_argument("--precision", metavar="NAME", help=", ".join(PRECISIONS))
    parser.add_argument("--optimizer", metavar="NAME", help=", ".join(OPTIMIZERS))
    parser.add_argument("--recompute", metavar="NAME", help="none or full")
    parser.add_argument("--schedule", metavar="NAME", help=", ".join(SCHEDULES))


def add_profiles(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option that gives profiles."""
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="FILE",
        help="measurements of a kind of device, by hdtensor profile; once for each kind",
    )


def add_search(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options that say what plans may look like."""
    default = SearchOptions()
    for name, key, words in (
        ("--tp", "tp_degrees", "degrees"),
        ("--cp", "cp_degrees", "degrees"),
        ("--mbs", "mbs", "samples of a micro-batch"),
    ):
        usual = getattr(default, key)
        text = f"{words}; default {','.join(map(str, usual))}"
        parser.add_argument(name, dest=key, type=numbers, default=usual, metavar="N,N", help=text)
    for name, words in (
        ("max_stages", f"of a lane; default {default.max_stages}"),
        (
            "min_lanes",
            "2 or more: any device may die, but for ZeRO's states; see 'after a loss' for nodes",
        ),
        ("max_lanes", "default any number"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=number,
            default=getattr(default, name),
            metavar="N",
            help=words,
        )
    parser.add_argument(
        "--tight-bound",
        action="store_true",
        help="prove more: takes seconds, on a thousand devices minutes",
    )


def search_options(options: argparse.Namespace) -> SearchOptions:
    """Return what plans may look like by the options."""
    names = (
        "tp_degrees",
        "cp_degrees",
        "mbs",
        "max_stages",
        "min_lanes",
        "max_lanes",
        "tight_bound",
    )
    return SearchOptions(**{name: getattr(options, name) for name in names})


def add_plan_file(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add what reads a plan and what it does not say."""
    parser.add_argument("--label", metavar="TEXT", help="which plan of a file of several")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a known name, or a config.json; default: what the plan says",
    )
    parser.add_argument("--batch", type=number, metavar="N", help="samples of a step")
    add_cluster(parser, "what the plan says")
    add_workload(parser)
    add_profiles(parser)


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Return the cluster that the options say; this machine where they say none."""
    return read_cluster(options.cluster or "this", device=options.device, num_nodes=options.nodes)


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the step that the options say, with the usual values where they do not."""
    fields = {
        field.name: getattr(options, field.name, None) for field in dataclasses.fields(Workload)
    }
    said = {name: value for name, value in fields.items() if value is not None}
    return Workload(**{"context": 4096, **said})


class PlannedFile(NamedTuple):
    """What a plan file says.

    Attributes:
        planned: The strategy, and what it is for.
        purpose: What a planner said of it, JSON values; empty if nobody did.
        conflict: What is wrong with its batch, None if nothing is.
    """

    planned: Planned
    purpose: dict[str, Any]
    conflict: str | None


def planned_of(options: argparse.Namespace) -> PlannedFile:
    """Return what a plan file says."""
    with planner_errors():
        plan = read_plan(options.plan, label=options.label)
    if not isinstance(plan, StrategyPlan):
        raise PlannerError(
            "plan: it gives every tensor its spec; the planner reads the compact form, with pipelines of stages."
        )
    given = options.cluster is not None
    if not given and (options.device is not None or options.nodes is not None):
        raise PlannerError("device, nodes: they are for --cluster; give it too.")
    names = ("batch", "context", "precision", "optimizer", "recompute", "schedule")
    planned = read_planned(
        plan,
        model=options.model,
        cluster=cluster_of(options) if given else None,
        changes={name: getattr(options, name) for name in names},
    )
    said = plan.about.planned_for
    conflict = None if options.batch is not None else plan.batch_conflict()
    return PlannedFile(planned, {} if said is None else json.loads(said), conflict)


def warn(conflict: str | None, options: argparse.Namespace) -> None:
    """Write a line on stderr if there is something to warn of; at the end, as an error is one line."""
    if conflict is not None:
        sys.stderr.write(f"hdtensor {options.command}: warning: {conflict}\n")


def context_warning(planned: Planned) -> str | None:
    """Return what is wrong with a context that is longer than the model's positions; None if nothing is."""
    model, context = planned.model, planned.workload.context
    most = model.max_context or model.num_positions
    if not 0 < most < context:
        return None
    return (
        f"context: {context} tokens are more than the {most} positions of {model.name} "
        f"(max_position_embeddings); give at most so many, or a config.json with scaled positions."
    )


def costs_of(planned: Planned, options: argparse.Namespace) -> CostModel:
    """Return the costs by the profiles that the options give."""
    profiles = [Profile.load(path) for path in options.profile]
    return make_costs(planned.model, planned.workload, planned.cluster, profiles)


def unmeasured(planned: Planned, costs: CostModel) -> str | None:
    """Return what of a plan and its cluster no profile measured, None if nothing or if there are no profiles.

    Args:
        planned: The plan.
        costs: By which its seconds are.
    """
    if not isinstance(costs, ProfiledCosts):
        return None
    kinds = [device.name for device in planned.cluster.devices()]
    words = [
        f"{name} (no profile; its seconds are its datasheet's)"
        for name in dict.fromkeys(kinds)
        if name not in costs.profiles
    ]
    for lane in planned.strategy.lanes:
        for stage in lane.stages:
            profile = costs.profiles.get(kinds[stage.ranks[0]])
            if profile is not None:
                tokens = lane.mbs * planned.workload.context // stage.cp
                words += _not_in(profile, stage.tp, tokens)
    words = list(dict.fromkeys(words))
    more = f", and {len(words) - 3} more" if len(words) > 3 else ""
    return f"not measured: {', '.join(words[:3])}{more}" if words else None


def _not_in(profile: Profile, tp: int, tokens: int) -> list[str]:
    sizes = [each.mbs * each.context for each in profile.units if each.tp == tp]
    if not sizes:
        return [f"{profile.device} at tp {tp}"]
    if tokens > max(sizes):
        what = f"{profile.device} at tp {tp} with micro-batches of {tokens:,} tokens"
        return [f"{what} (up to {max(sizes):,} were)"]
    return []


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before anything is searched for.

    Raises:
        PlannerError: It names the option and the folder.
    """
    for name in ("output", "html", "trace"):
        path = getattr(options, name, None)
        if path is None:
            continue
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise PlannerError(
                f"{name}: there is no folder {folder!r} for {path!r}; make it first."
            )
        if os.path.isdir(path):
            raise PlannerError(f"{name}: {path!r} is a folder; name a file in it.")
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise PlannerError(f"{name}: {path!r} may not be written; name another file.")


#: What messages call things in Python -> how the command line spells them.
_SPELLINGS = (
    (r"recompute='(\w+)'", r"--recompute \1"),
    (r"precision='(\w+)'", r"--precision \1"),
    (r"schedule='(\w+)'", r"--schedule \1"),
    (r"zero=(\d)", r"--zero \1"),
    (r"\(mbs\)|(?<=smaller )mbs", "--mbs"),
    (r"\b(max_stages|min_lanes|max_lanes)\b", lambda found: f"--{found[0].replace('_', '-')}"),
    (r"\b(tp|cp)_degrees\b", r"--\1"),
    (r"\bnum_ranks\b", "--ranks"),
)


def option_words(message: str, options: argparse.Namespace) -> str:
    """Return a message with what it calls by the names of Python's arguments called as the command's options are.

    >>> option_words("min_lanes: 3, got 2. Take zero=1.", argparse.Namespace(min_lanes=2, zero=0))
    '--min-lanes: 3, got 2. Take --zero 1.'

    Args:
        message: Of an error.
        options: Of the command; a field of this name that a message begins with is written as an option too.
    """
    field = message.partition(":")[0]
    for pattern, spelling in _SPELLINGS:
        message = re.sub(pattern, spelling, message)
    is_option = field.isidentifier() and field in vars(options) and field not in ("plan", "names")
    return f"--{message}" if is_option and not message.startswith("--") else message


def number(text: str) -> int:
    """Return a positive whole number of the command line."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive number")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Return whole numbers, separated by commas."""
    return tuple(number(part.strip()) for part in text.split(","))


def seconds(text: str) -> float:
    """Return a positive number of seconds of the command line."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive number of seconds")
    return found


def ranks(text: str) -> tuple[int, ...]:
    """Return ranks as people write them.

    >>> ranks("0-2,7")
    (0, 1, 2, 7)
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        last = -1 if match is None else int(match[2] or match[1])
        if match is None or not int(match[1]) <= last < MAX_RANKS:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no list of ranks such as 0-3,7")
        found.update(dict.fromkeys(range(int(match[1]), last + 1)))
    return tuple(found)


def print_json(value: dict[str, Any]) -> None:
    """Print JSON values on stdout."""
    sys.stdout.write(f"{json.dumps(value, indent=2, allow_nan=False)}\n")
