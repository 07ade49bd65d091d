"""Rows of the benchmark's table, and how they are printed and written."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


#: Text from this heading on is written by hand and survives a new run.
NOTES_HEADING = "## Notes"

_COLUMNS = ("what", "plain us", "DTensor us", "hdtensor us", "figure", "value", "goal", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure beside its goal.

    Attributes:
        section: Title of the part of the table that the row belongs to.
        name: What was measured.
        figure: What ``value`` is, such as "hdtensor / DTensor".
        value: The figure: a ratio, or microseconds where ``figure`` says so.
        goal: Largest value that is good enough; None where the row only informs.
        plain_us: Time of plain torch, in microseconds; None where nothing was compared with it.
        dtensor_us: Time of DTensor.
        hdtensor_us: Time of hdtensor.
    """

    section: str
    name: str
    figure: str
    value: float
    goal: float | None = None
    plain_us: float | None = None
    dtensor_us: float | None = None
    hdtensor_us: float | None = None

    @property
    def is_missed(self) -> bool:
        """Whether the row has a goal that the value is above."""
        return self.goal is not None and self.value > self.goal

    def cells(self) -> tuple[str, ...]:
        """Return the row's texts, column by column."""
        times = [_number(t) for t in (self.plain_us, self.dtensor_us, self.hdtensor_us)]
        result = "" if self.goal is None else "miss" if self.is_missed else "PASS"
        goal = "" if self.goal is None else f"<= {self.goal:g}"
        return (self.name, *times, self.figure, _number(self.value), goal, result)


def ratio_row(section: str, name: str, times: dict[str, float], goal: float | None) -> Row:
    """Return the row of hdtensor's time over DTensor's.

    Args:
        section: Title.
        name: What was measured.
        times: Microseconds of "hdtensor", "dtensor" and, where measured, "plain".
        goal: Largest good ratio.
    """
    return Row(
        section=section,
        name=name,
        figure="hdtensor / DTensor",
        value=times["hdtensor"] / times["dtensor"],
        goal=goal,
        plain_us=times.get("plain"),
        dtensor_us=times["dtensor"],
        hdtensor_us=times["hdtensor"],
    )


def text_table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text, one block for each section."""
    cells = [row.cells() for row in rows]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *cells, strict=True)]
    lines: list[str] = []
    section = None
    for row, texts in zip(rows, cells, strict=True):
        if row.section != section:
            section = row.section
            lines += ["", section, _aligned(_COLUMNS, widths)]
        lines.append(_aligned(texts, widths))
    return "\n".join(lines[1:])


#: Title and first paragraph of the page of dispatch.
_ABOUT = (
    "What a dispatch costs",
    "hdtensor beside plain torch and beside DTensor of the same torch, in one process. Times are CPU time "
    "(`time.process_time`) in microseconds, so that waiting for another rank does not count; the runs of the "
    "compared sides alternate, and each figure is the smallest of its repeats.",
)


def markdown(
    rows: Sequence[Row], command: str, seconds: float, *, about: tuple[str, str] = _ABOUT
) -> str:
    """Return the rows as a page: machine, command, summary, one table for each section."""
    with_goal = [row for row in rows if row.goal is not None]
    missed = [row for row in with_goal if row.is_missed]
    lines = [
        f"# {about[0]}",
        "",
        about[1],
        "",
        *[f"* {name}: {text}" for name, text in machine(command, seconds).items()],
        "",
        f"{len(with_goal) - len(missed)} of {len(with_goal)} rows reach their goal."
        + "".join(
            f"\n* miss: {r.section}: {r.name}: {r.value:.3g} (goal {r.goal:g})" for r in missed
        ),
    ]
    section = None
    for row in rows:
        if row.section != section:
            section = row.section
            lines += [
                "",
                f"## {section}",
                "",
                _piped(_COLUMNS),
                "|---|" + "---:|" * 3 + "---|---:|---:|---|",
            ]
        lines.append(_piped(row.cells()))
    return "\n".join(lines) + "\n"


def write_page(path: Path, page: str) -> None:
    """Write the page; keep the notes that the file has at its end."""
    notes = ""
    if path.exists():
        _, heading, rest = path.read_text().partition(f"\n{NOTES_HEADING}\n")
        notes = heading + rest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page + notes)


def machine(command: str, seconds: float) -> dict[str, str]:
    """Return what a figure depends on besides the code."""
    return {
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, one thread",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"`{command}` ({seconds:.0f} s)",
    }


def _cpu_model() -> str:
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = ()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> str:
    is_left = (0, 4, 7)
    cells = [
        t.ljust(w) if i in is_left else t.rjust(w)
        for i, (t, w) in enumerate(zip(texts, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _piped(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"
