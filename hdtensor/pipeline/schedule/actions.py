"""``Action`` and ``Schedule``: what each rank does in which order, as data with a text form."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from hdtensor.errors import ScheduleError


class Kind(StrEnum):
    """What an action computes; the letters are those of ``torch.distributed.pipelining``."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """One stage's work on one micro-batch.

    >>> Action.parse("2F0")
    Action(stage=2, kind=<Kind.FORWARD: 'F'>, microbatch=0)
    >>> print(Action(1, Kind.BACKWARD, 3))
    1B3

    Attributes:
        stage: Number of the stage in its lane.
        kind: Forward; the whole backward; or its two parts, for the input and for the weights.
        microbatch: Number of the micro-batch in its lane.
    """

    stage: int
    kind: Kind
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action such as ``2F0``, ``1B3``, ``2I0`` or ``2W0``.

        Raises:
            ScheduleError: If it is anything else.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{_short(text)} is no action. Write stage, kind and micro-batch, such as 2F0 (forward), 1B3 "
                f"(backward), 2I0 and 2W0 (its parts for input and weights); messages, gathers and gradient "
                f"synchronization follow by themselves."
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


#: What ends the work of a stage on a micro-batch.
LAST_KINDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
#: What gives the stages before their gradients.
GRADIENT_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)

_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,7})", re.ASCII)
_HEADER = re.compile(r"#\s*(schedule|micro-batches)\s*:\s*(.*?)\s*$")
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of one lane's actions, a row for each place of the lane.

    It is data: whoever builds it, ``validate`` says whether a lane can follow it.

    >>> schedule = Schedule.parse('''
    ... # schedule: by hand
    ... 0F0,0F1,   ,0B0,0B1
    ...    ,1F0,1B0,1F1,1B1''')
    >>> schedule.num_microbatches, str(schedule.rows[1][0])
    (2, '1F0')

    Attributes:
        name: What it is called.
        num_microbatches: Micro-batches of a step.
        rows: Actions of each place, in the order of ``Lane.places``.
    """

    name: str
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a schedule file, the text that ``parse`` reads.

        Raises:
            ScheduleError: If it cannot be read, or as ``parse``.
        """
        try:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
            text = data.decode("utf-8-sig")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ScheduleError(f"cannot read the schedule {str(path)!r}: {reason}.") from error
        if len(data) > _MAX_BYTES:
            raise ScheduleError(f"the schedule {str(path)!r} has more than {_MAX_BYTES} bytes.")
        return cls.parse(text, name=Path(path).stem)

    @classmethod
    def parse(cls, text: str, *, name: str = "custom") -> Schedule:
        """Read a schedule: a line for each place, actions with commas between.

        Empty cells are idle time and mean nothing; lines that begin with ``#`` are comments, of which
        ``# schedule: NAME`` and ``# micro-batches: N`` are read. The files that
        ``torch.distributed.pipelining`` writes in its format "compute_only" are read too.

        Args:
            text: The lines.
            name: Its name, if no comment says it.

        Raises:
            ScheduleError: If a cell is no action; the message names line and column.
        """
        rows = []
        num_microbatches = None
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            if line.lstrip().startswith("#"):
                header = _HEADER.match(line.strip())
                if header is not None and header[1] == "schedule":
                    name = header[2]
                elif header is not None:
                    num_microbatches = _count(header[2], number)
                continue
            rows.append(tuple(_actions(line, number)))
        if num_microbatches is None:
            num_microbatches = 1 + max((a.microbatch for row in rows for a in row), default=-1)
        return cls(name=name, num_microbatches=num_microbatches, rows=tuple(rows))

    def to_text(self) -> str:
        """Return the schedule as text, ``parse``'s inverse."""
        lines = [f"# schedule: {self.name}", f"# micro-batches: {self.num_microbatches}"]
        lines += [",".join(map(str, row)) or "," for row in self.rows]
        return "\n".join(lines) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule as a text file.

        Raises:
            OSError: If the file cannot be written.
        """
        Path(path).write_text(self.to_text(), encoding="utf-8")

    @property
    def num_actions(self) -> int:
        """Number of actions in all rows."""
        return sum(map(len, self.rows))

    def __str__(self) -> str:
        return self.to_text().rstrip("\n")


def stages_of(rows: Iterable[Sequence[Action]]) -> int:
    """Return one more than the largest stage in some rows."""
    return 1 + max((action.stage for row in rows for action in row), default=-1)


def _actions(line: str, number: int) -> Iterable[Action]:
    for column, cell in enumerate(line.split(","), 1):
        if cell.strip():
            try:
                yield Action.parse(cell)
            except ScheduleError as error:
                raise ScheduleError(f"line {number}, cell {column}: {error}") from None


def _count(text: str, number: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 8):
        raise ScheduleError(
            f"line {number}: micro-batches must be a whole number, got {_short(text)}."
        )
    return int(text)


def _short(text: str) -> str:
    return ascii(text[:40]) + ("..." if len(text) > 40 else "")
