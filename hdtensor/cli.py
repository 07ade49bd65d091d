"""The command line, ``python -m hdtensor <command>``: what can be known without any process group.

======================  ================================================================
command                 what it prints
======================  ================================================================
``hdtensor plan``       the fastest plan of a model on a cluster, with a lower bound
``hdtensor explain``    what a plan's step is made of and why; or how a tensor gets from one
                        spec to another, and what that costs
``hdtensor simulate``   what a plan's step takes; its timeline as a trace and a page
``hdtensor dry-run``    what every rank of a plan would do: layers, messages, schedule, bubble
``hdtensor profile``    measures a model's units and transfers on this machine
``hdtensor devices``    the devices that the planner knows
======================  ================================================================

Whatever the user gets wrong is one line on stderr and exit code 2. Ctrl-C is exit code 130.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch

from hdtensor._interrupts import INTERRUPTED, in_order
from hdtensor.collectives.split import check_reducible
from hdtensor.debug.transfers import write_transfer_picture
from hdtensor.errors import HDTensorError
from hdtensor.pipeline.dry_run import DryRunOptions, dry_run
from hdtensor.pipeline.plan_files import read_model, read_plan
from hdtensor.pipeline.report import dry_run_text
from hdtensor.placements import HDSpec
from hdtensor.plan import AnnotationPlan, ModelDescription, StrategyPlan
from hdtensor.planner import commands as commands_of_planner
from hdtensor.planner.command_inputs import (
    add_plan_file,
    check_outputs,
    option_words,
    warn,
)
from hdtensor.planner.description import description_of
from hdtensor.planner.emit import planned_model
from hdtensor.planner.models import find_model
from hdtensor.redistribute import explain, resolve
from hdtensor.redistribute.topology import UNIFORM, Topology


#: What ``ArgumentParser.add_subparsers`` returns.
Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"

_SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
    "f64": "float64",
}

#: Options of ``explain`` for a plan, and for a tensor.
_OF_PLAN = ("label", "model", "batch", "cluster", "device", "nodes", "context", "precision", "optimizer",
            "recompute", "schedule", "profile", "json")  # fmt: skip
_OF_TENSOR = ("src", "dst", "shape", "dtype", "src_top_sizes", "dst_top_sizes", "topology", "ranks_per_node",
              "svg")  # fmt: skip

_EXAMPLE = """example:
  hdtensor explain --src 'S0 / 0-3:S1 4,5:R' --dst 'R / 0-5:S0' --shape 4096,4096 --dtype bf16

A spec is `top / ranks:placements ...`: S0[3:1] cuts dim 0 three to one, R copies, P sums;
0-3(2x2):S0,R is a mesh of 2 x 2 with a placement for each axis."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {_one_line(message)}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; default those of the process.

    Returns:
        Exit code: 0, or 2 for an error of the user, or 1 if nobody reads the output, or 130 after Ctrl-C.

    Raises:
        SystemExit: With code 2 if the arguments are not a command's.
    """
    parser = _Parser(prog="hdtensor", description="Look at plans without running them.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for add in COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    try:
        with in_order():
            code = options.run(options)
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and must not fail then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (HDTensorError, OSError) as error:
        message = option_words(_one_line(str(error)), options)
        sys.stderr.write(f"hdtensor {options.command}: error: {message}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"hdtensor {options.command}: interrupted\n")
        return INTERRUPTED
    return int(code or 0)


def add_explain(commands: Commands) -> None:
    """Add ``hdtensor explain``."""
    parser = commands.add_parser(
        "explain",
        help="what a plan's step is made of, or how a tensor gets from one spec to another",
        description="With PLAN: print what a step of the plan takes, where it goes, its memory and traffic, and why the "
        "planner chose it. With --src and --dst: print the steps of a redistribute, who sends what to whom, bytes "
        "by link, estimated seconds and peak memory.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "plan", nargs="?", metavar="PLAN", help="a plan as JSON, or a file of several"
    )
    of_plan = parser.add_argument_group("of a plan")
    add_plan_file(of_plan)
    of_plan.add_argument("--json", action="store_true", help="print JSON")
    of_tensor = parser.add_argument_group("of a tensor")
    of_tensor.add_argument("--src", metavar="SPEC", help="the spec before")
    of_tensor.add_argument("--dst", metavar="SPEC", help="the spec after")
    of_tensor.add_argument("--shape", type=_extents, metavar="N,N", help="global shape; '' for 0-d")
    of_tensor.add_argument(
        "--dtype", default=torch.float32, type=_dtype, help="such as bf16; default float32"
    )
    for side in ("src", "dst"):
        of_tensor.add_argument(
            f"--{side}-top-sizes",
            type=_extents,
            metavar="N,N",
            help=f"exact extents of the blocks of {side}; default as the spec cuts",
        )
    _add_links(of_tensor)
    of_tensor.add_argument("--svg", metavar="FILE", help="also draw a picture")
    parser.set_defaults(run=_explain, parser=parser)


def _explain(options: argparse.Namespace) -> None:
    """Explain a plan if one is given, else a tensor's way."""
    of_plan, of_tensor = _given(options, _OF_PLAN), _given(options, _OF_TENSOR)
    if options.plan is not None:
        if of_tensor:
            options.parser.error(f"argument {of_tensor[0]}: not allowed with PLAN")
        commands_of_planner.explain_plan(options)
        return
    if of_plan:
        options.parser.error(f"argument {of_plan[0]}: needs PLAN, a file")
    missing = [name for name in ("--src", "--dst", "--shape") if name not in of_tensor]
    if missing:
        wanted = f"the following arguments are required: {', '.join(missing)}"
        options.parser.error(wanted if of_tensor else f"{wanted}; or PLAN, a file")
    _explain_tensor(options)


def _given(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return which of some options were given, as they are written."""
    default = options.parser.get_default
    return [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) != default(n)]


def _explain_tensor(options: argparse.Namespace) -> None:
    src, dst = HDSpec.from_text(options.src), HDSpec.from_text(options.dst)
    topology = _topology(options, 1 + max(*src.ranks, *dst.ranks))
    plan = resolve(
        src,
        dst,
        options.shape,
        src_top_sizes=options.src_top_sizes,
        dst_top_sizes=options.dst_top_sizes,
        topology=topology,
    )
    for op in plan.reductions:
        check_reducible(op, options.dtype)
    text = explain(plan, dtype=options.dtype, topology=topology)
    if options.svg is not None:
        write_transfer_picture(options.svg, plan, dtype=options.dtype, topology=topology)
    sys.stdout.write(f"{text}\n")


def add_dry_run(commands: Commands) -> None:
    """Add ``hdtensor dry-run``."""
    parser = commands.add_parser(
        "dry-run",
        help="what every rank of a plan would do",
        description="Print, for each rank of a plan, its stage, layers, parameters and messages, and for each "
        "lane its schedule and its bubble at unit durations. No process is started.",
        allow_abbrev=False,
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan as JSON, or a file of several")
    parser.add_argument("--label", metavar="TEXT", help="which plan of a file of several")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a known name, or a config.json; default: what the plan says",
    )
    parser.add_argument(
        "--schedule",
        action="append",
        default=[],
        metavar="NAME",
        help="a schedule or its file; once for all lanes, or once for each",
    )
    parser.add_argument(
        "--microbatches", type=_positive, default=8, metavar="N", help="where the plan is silent"
    )
    parser.add_argument("--context", type=_positive, metavar="N", help="tokens of a sequence")
    parser.add_argument("--dtype", default=torch.bfloat16, type=_dtype, help="of hidden states")
    _add_links(parser)
    parser.add_argument("--trace", metavar="FILE", help="also write the timeline for Perfetto")
    parser.set_defaults(run=_dry_run)


def _dry_run(options: argparse.Namespace) -> None:
    check_outputs(options)
    plan = read_plan(options.plan, label=options.label)
    model = _description(plan, options.model)
    found = dry_run(
        plan,
        model,
        DryRunOptions(
            schedules=tuple(options.schedule),
            microbatches=options.microbatches,
            context=options.context,
            itemsize=options.dtype.itemsize,
            topology=_topology(options, 1 + max(plan.ranks)),
        ),
    )
    if options.trace is not None:
        found.timeline.save_trace(options.trace)
    sys.stdout.write(f"{dry_run_text(found)}\n")
    warn(plan.batch_conflict() if isinstance(plan, StrategyPlan) else None, options)


def _description(plan: AnnotationPlan, name: str | None) -> ModelDescription:
    """Return the model of a name, or else the one that the plan was made for, or says."""
    shape = None
    if name is not None and not name.endswith(".json"):
        shape = find_model(name)
    elif name is None and isinstance(plan, StrategyPlan):
        shape = planned_model(plan)
    return read_model(plan, name) if shape is None else description_of(shape)


def _add_links(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    links = parser.add_mutually_exclusive_group()
    links.add_argument("--topology", metavar="FILE", help="a topology as JSON")
    links.add_argument(
        "--ranks-per-node", type=_positive, metavar="N", help="nodes of N consecutive ranks"
    )


def _topology(options: argparse.Namespace, num_ranks: int) -> Topology:
    if options.topology is not None:
        return Topology.load(options.topology)
    if options.ranks_per_node is not None:
        return Topology.of_nodes(options.ranks_per_node, num_ranks)
    return UNIFORM


def _extents(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(_is_number(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 4096,4096")
    return tuple(map(int, parts))


def _positive(text: str) -> int:
    if not _is_number(text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _dtype(text: str) -> torch.dtype:
    name = text.removeprefix("torch.")
    found: Any = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype such as bfloat16 or bf16")
    return found


def _one_line(message: str) -> str:
    return " ".join(message.split())


#: What adds each command, in the order of the help.
COMMANDS: tuple[Callable[[Commands], None], ...] = (
    add_explain,
    add_dry_run,
    *commands_of_planner.COMMANDS,
)
