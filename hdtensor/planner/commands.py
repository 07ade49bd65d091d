"""The planner's commands: plan, simulate, profile, devices; and ``explain`` of a plan.

Exit codes: 0; 2 for an error of the user; 130 after Ctrl-C, with the best plan so far written if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from hdtensor._interrupts import INTERRUPTED
from hdtensor.planner.command_inputs import (
    add_cluster,
    add_plan_file,
    add_profiles,
    add_search,
    add_workload,
    check_outputs,
    cluster_of,
    context_warning,
    costs_of,
    number,
    numbers,
    planned_of,
    print_json,
    search_options,
    seconds,
    unmeasured,
    warn,
    workload_of,
)
from hdtensor.planner.emit import Planned, emit
from hdtensor.planner.library import ALIASES, DEVICES, find_device
from hdtensor.planner.models import find_model
from hdtensor.planner.page import save_page
from hdtensor.planner.planning import explained, find_plan, predict
from hdtensor.planner.profile import ProfileOptions, missing_points, profile
from hdtensor.planner.profile_transfers import TransferPoint
from hdtensor.planner.profile_units import UnitPoint
from hdtensor.planner.profile_world import launched_world
from hdtensor.planner.progress import Interrupt, ProgressBar
from hdtensor.planner.renumber import renumber
from hdtensor.planner.replan_command import (
    Replanned,
    add_replan,
    check_lost,
    replan_of,
    replan_text,
)
from hdtensor.planner.space import make_space
from hdtensor.planner.strategy import Strategy
from hdtensor.planner.summary import Summary
from hdtensor.planner.text_report import bytes_text, seconds_text, step_text, table_lines
from hdtensor.planner.workload import PRECISIONS


#: What ``ArgumentParser.add_subparsers`` returns.
Commands: TypeAlias = "argparse._SubParsersAction[Any]"


def add_plan(commands: Commands) -> None:
    """Add ``hdtensor plan``."""
    parser = commands.add_parser(
        "plan",
        help="the fastest plan of a model on a cluster",
        description="Search for the plan with the shortest step, and say how far it is from a lower bound. "
        "Ctrl-C ends the search with the best plan so far.",
        epilog="example:\n  hdtensor plan --model llama-32b --cluster '16x H800 + 32x H20' --batch 64 --context "
        "4096 -o plan.json --html plan.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="NAME", help="a known name, or a config.json")
    parser.add_argument("--batch", type=number, metavar="N", help="samples of a step")
    add_cluster(parser, "this")
    add_workload(parser)
    parser.add_argument(
        "--zero", type=int, choices=(0, 1), help="ZeRO of optimizer states; default 1"
    )
    add_profiles(parser)
    add_search(parser.add_argument_group("what plans may look like"))
    add_replan(parser.add_argument_group("after ranks were lost"))
    parser.add_argument(
        "--seconds", type=seconds, metavar="S", help="stop after so long, with the best plan so far"
    )
    parser.add_argument("--uniform", action="store_true", help="show the best uniform plan too")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan")
    _add_outputs(parser)
    parser.set_defaults(run=_plan, parser=parser)


def _plan(options: argparse.Namespace) -> int:
    check_outputs(options)
    started = time.monotonic()
    with Interrupt() as interrupt:  # until the plan is written, so that no Ctrl-C loses it
        with ProgressBar("searching") as bar:

            def should_stop() -> bool:
                return interrupt.is_set() or _is_late(started, options)

            if options.replan is None:
                found = _search(options, bar, should_stop)
            else:
                found = replan_of(options, should_stop)
        planned, result, costs, lost, facts = found
        summary = explained(planned, result, costs).summary
        if options.renumber:
            planned, lost = renumber(planned, lost), ()
            summary = predict(planned, costs, dict(summary.why))
        predicted = {"step_seconds": summary.prediction.seconds, **summary.why}
        label = f"{planned.model.name}, {planned.workload.batch} samples"
        plan = emit(planned, label=label, predicted=predicted, lost=lost)
        if options.output is not None:
            plan.save(options.output)
    uniform = None
    if options.uniform and result.uniform is not None:
        uniform = predict(found.planned._replace(strategy=result.uniform.strategy), costs)
    _write_outputs(summary, options)
    warn(unmeasured(planned, costs), options)
    if options.json:
        more = {} if uniform is None else {"uniform": uniform.to_dict()}
        more |= {"replan": dict(facts)} if facts else {}
        search_seconds = time.monotonic() - started
        print_json(
            {**summary.to_dict(), **more, "search_seconds": search_seconds, "plan": plan.to_dict()}
        )
    else:
        sys.stdout.write(f"{step_text(summary)}\n")
        if options.uniform:
            text = (
                "none has whole layers and micro-batches and fits in memory"
                if uniform is None
                else step_text(uniform)
            )
            sys.stdout.write(f"\nbest uniform plan: {text}\n")
        if facts:
            sys.stdout.write(f"\n{replan_text(facts)}\n")
    warn(context_warning(planned), options)
    if interrupt.is_set():
        sys.stderr.write("hdtensor plan: interrupted; this is the best plan so far\n")
        return INTERRUPTED
    return 0


def _search(
    options: argparse.Namespace, bar: ProgressBar, should_stop: Callable[[], bool]
) -> Replanned:
    """Return the best plan of a search from the beginning."""
    missing = [f"--{name}" for name in ("model", "batch") if getattr(options, name) is None]
    if missing:
        options.parser.error(f"the following arguments are required: {', '.join(missing)}")
    given = [name for name in ("label", "back") if getattr(options, name)]
    if given:
        options.parser.error(f"argument --{given[0]}: needs --replan, a plan")
    model, cluster, workload = find_model(options.model), cluster_of(options), workload_of(options)
    costs = costs_of(Planned(Strategy(()), model, cluster, workload), options)
    lost = set(options.without)
    check_lost(lost, cluster.num_ranks)
    kept = [rank for rank in range(cluster.num_ranks) if rank not in lost]
    space = make_space(
        cluster, costs, workload, model.num_layers, search_options(options), ranks=kept
    )
    planned, result = find_plan(
        model,
        space,
        report=lambda at: bar.update(at.done, 1.0, f"{at.what}, best {seconds_text(at.seconds)}"),
        should_stop=should_stop,
    )
    return Replanned(planned, result, costs, tuple(sorted(lost)), {})


def _is_late(started: float, options: argparse.Namespace) -> bool:
    return options.seconds is not None and time.monotonic() - started > options.seconds


def add_simulate(commands: Commands) -> None:
    """Add ``hdtensor simulate``."""
    parser = commands.add_parser(
        "simulate",
        help="what a step of a plan takes",
        description="Simulate a step of any plan by discrete events: seconds, memory and traffic; the timeline as a "
        "trace for Perfetto, and everything as a web page.",
        allow_abbrev=False,
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan as JSON, or a file of several")
    add_plan_file(parser)
    _add_outputs(parser)
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    check_outputs(options)
    summary = summary_of(options)
    _write_outputs(summary, options)
    if options.json:
        print_json(summary.to_dict())
    else:
        sys.stdout.write(f"{step_text(summary)}\n")
    return 0


def explain_plan(options: argparse.Namespace) -> None:
    """Print what a step of the options' plan is made of, and why the planner chose it."""
    summary = summary_of(options)
    if options.json:
        print_json(summary.to_dict())
    else:
        sys.stdout.write(f"{step_text(summary)}\n")


def summary_of(options: argparse.Namespace) -> Summary:
    """Return what a step of the options' plan is made of, and what the planner said when it chose it."""
    planned, purpose, conflict = planned_of(options)
    costs = costs_of(planned, options)
    summary = predict(planned, costs)
    warn(conflict, options)
    warn(unmeasured(planned, costs), options)
    warn(context_warning(planned), options)
    said = purpose.get("predicted", {})
    # What was said holds for what was planned: not for another cluster, other costs or an edited file.
    if not isinstance(said, dict) or said.get("step_seconds") != summary.prediction.seconds:
        return summary
    return replace(summary, why=said)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="FILE", help="write the timeline for Perfetto")
    parser.add_argument("--html", metavar="FILE", help="write a page with everything")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _write_outputs(summary: Summary, options: argparse.Namespace) -> None:
    if options.trace is not None:
        summary.prediction.timeline.save_trace(options.trace)
    if options.html is not None:
        save_page(options.html, summary)


def add_profile(commands: Commands) -> None:
    """Add ``hdtensor profile``."""
    parser = commands.add_parser(
        "profile",
        help="measure a model's units and transfers on this machine",
        description="Measure attention, MLP, embedding and head, forward and backward, and transfers by size, on the "
        "devices at hand. A second run with the same file measures what the first one left out. Under torchrun "
        "collectives go over all of its processes, and the first one measures units and writes.",
        allow_abbrev=False,
    )
    default = ProfileOptions()
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="a known name, or a config.json"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the profile")
    for name, key, words in (
        ("--tp", "tps", "degrees of tensor parallelism"),
        ("--mbs", "batch_sizes", "samples of a micro-batch"),
        ("--context", "contexts", "tokens of a sample"),
        ("--ranks", "num_ranks", "numbers of ranks of transfers; 1 for none"),
        ("--sizes", "sizes", "bytes of transfers"),
    ):
        usual = getattr(default, key)
        text = f"{words}; default {','.join(map(str, usual))}"
        parser.add_argument(name, dest=key, type=numbers, default=usual, metavar="N,N", help=text)
    parser.add_argument(
        "--precision", default=default.precision, metavar="NAME", help=", ".join(PRECISIONS)
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="what your cluster's description calls these devices; default their usual name",
    )
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=default.max_seconds,
        metavar="S",
        help="when to stop; default 180",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> int:
    check_outputs(options)
    names = ("tps", "batch_sizes", "contexts", "num_ranks", "sizes")
    wanted = ProfileOptions(
        **{name: getattr(options, name) for name in names},
        precision=options.precision,
        max_seconds=options.seconds,
        device=options.device,
    )
    model = find_model(options.model)
    with launched_world() as rank, ProgressBar("measuring", is_quiet=rank > 0) as bar:
        found = profile(model, wanted, path=options.output, progress=bar.update)
        units, transfers = missing_points(found, wanted)
    if rank > 0:
        return 0
    if options.json:
        print_json(found.to_dict())
        return 0
    sys.stdout.write(
        f"{found.device}: {len(found.units)} measurements of units and {len(found.transfers)} of transfers in "
        f"{options.output}\n"
    )
    if units or transfers:
        sys.stdout.write(
            f"left out for want of time: {len(units)} of units, {len(transfers)} of transfers, such as "
            f"{_examples(units, transfers)}; run again to go on\n"
        )
    return 0


def _examples(units: Sequence[UnitPoint], transfers: Sequence[TransferPoint]) -> str:
    """Return the first measurements of each kind that are missing, in words."""
    words = [
        f"{unit.unit} of tp {unit.tp} with {unit.mbs} x {unit.context} tokens" for unit in units[:1]
    ]
    words += [
        f"{each.kind} of {each.num_bytes} bytes between {each.num_ranks} ranks"
        for each in transfers[:1]
    ]
    return " and ".join(words)


def add_devices(commands: Commands) -> None:
    """Add ``hdtensor devices``."""
    parser = commands.add_parser(
        "devices",
        help="the devices that the planner knows, with their sources",
        description="Print what the planner knows of devices.",
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_devices)


def _devices(options: argparse.Namespace) -> int:
    devices = [find_device(name) for name in options.names] or list(DEVICES.values())
    if options.json:
        print_json(
            {
                device.name: {
                    "memory_bytes": device.memory_bytes,
                    "flops": dict(device.flops),
                    "memory_bandwidth": device.memory_bandwidth,
                    "link_bandwidth": device.link_bandwidth,
                    "network_bandwidth": device.network_bandwidth,
                    "source": device.source,
                }
                for device in devices
            }
        )
        return 0
    rows: list[tuple[str, ...]] = [
        ("device", "memory", "bfloat16", "float16", "float32", "reads", "link", "network", "source")
    ]
    for device in devices:
        rates = [
            f"{device.flops[kind] / 1e12:g} T" if kind in device.flops else "-"
            for kind in ("bfloat16", "float16", "float32")
        ]
        speeds = (device.memory_bandwidth, device.link_bandwidth, device.network_bandwidth)
        texts = (f"{bytes_text(speed)}/s" for speed in speeds)
        rows.append((device.name, bytes_text(device.memory_bytes), *rates, *texts, device.source))
    sys.stdout.write("\n".join([*table_lines(rows), ""]))
    aliases = ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    sys.stdout.write(f"{aliases}\n" if not options.names else "")
    return 0


#: What adds each command, in the order of the help.
COMMANDS: tuple[Callable[[Commands], None], ...] = (
    add_plan,
    add_simulate,
    add_profile,
    add_devices,
)
