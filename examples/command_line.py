"""The command line that the training examples share, and what they say when something is wrong."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import launch

import hdtensor as hd
from hdtensor.errors import ScheduleError


def training_parser(description: str, *, plan: Path, steps: int) -> argparse.ArgumentParser:
    """Return a parser of what every training takes.

    Args:
        description: What the program does.
        plan: The default plan.
        steps: The default number of steps.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--plan", default=plan, type=Path, help="who holds what, as JSON")
    add("--steps", default=steps, type=whole, help="batches to train on")
    add("--batch", default=16, type=whole, help="rows of a batch, over all ranks")
    add("--context", default=128, type=whole, help="tokens of a row")
    add("--lr", default=3e-3, type=positive, help="learning rate after the warmup")
    add("--output", default=Path("outputs"), type=Path, help="folder for what is written")
    add("--no-check", action="store_true", help="do not repeat steps on one process")
    add("--time-limit", default=600.0, type=positive, help="seconds after which all processes end")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line and make the output folder; end the program where either cannot be."""
    options = parser.parse_args()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --output: cannot make {options.output}: {error.strerror}")
    if options.context < 2:
        parser.error("argument --context: must be at least 2, one token to see and one to predict")
    return options


def whole(text: str) -> int:
    """Read a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive(text: str) -> float:
    """Read a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {value}")
    return value


def exit_status(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a program; say in a line what a user can mend.

    Args:
        run: Returns its exit status.
        options: What it is called with.
    """
    try:
        return run(options)
    except (hd.PlanError, ScheduleError) as error:
        launch.complain(f"{type(error).__name__}: {error}")
        return 2
    except launch.RanksFailedError as error:
        launch.complain(str(error))
        return 1
    except KeyboardInterrupt:
        if launch.is_first():
            print("interrupted; all processes have ended", file=sys.stderr)
        return 130
