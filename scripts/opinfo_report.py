"""Run PyTorch's whole operator database on ``HDTensor``s and write the table of what is right.

    .venv/bin/python -m scripts.opinfo_report                     # about half an hour on two cores
    .venv/bin/python -m scripts.opinfo_report --ops add,softmax --samples 8
    .venv/bin/python -m scripts.opinfo_report --beside-dtensor    # also what DTensor gets right, and this does not
    .venv/bin/python -m scripts.opinfo_report --beside-dtensor --docs    # rewrite docs/ops.md

Everything goes to ``outputs/opinfo/``: ``table.txt``, ``outcomes.jsonl`` (one line a case) and a journal for every job.
"""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.ops.outcomes import (
    BOTH,
    CLASSES,
    COLUMNS,
    CRASH,
    IN_PLACE,
    NONE,
    ONE,
    OUT,
    PARTLY,
    WRONG,
    Outcome,
    Row,
    fraction,
    reason,
    rows_of,
    table,
)
from tests.ops.standing import DTENSOR, Standing, is_good, standing_of
from tests.ops.sweep import sweep


ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "outputs" / "opinfo"
DOCS = ROOT / "docs" / "ops.md"

LAYOUTS = ("one S0", "one any", "two S0", "two E0", "two S1", "two S2", "two R", "one P", "two P")
BESIDE = ("one S0", "one any")

_MEANINGS = {
    BOTH: "every case right, with one subgroup and with two",
    PARTLY: "right with two subgroups for some cuts; for the others an error names the `redistribute` to insert",
    ONE: "right with one subgroup; with two, every cut that was tried is refused with such an error",
    NONE: "refused with an error that says why",
    WRONG: "a value differs: a bug",
    CRASH: "another error than ours, or ranks that disagree: a bug",
}


def main(argv: Sequence[str]) -> int:
    """Run what the arguments ask for; return 1 if a case is wrong, crashes, or is right with DTensor only."""
    options = _parser().parse_args(argv)
    # The database takes seconds to import: after the arguments are known to be right.
    from tests.ops.opinfo import ops  # noqa: PLC0415

    names = options.ops.split(",") if options.ops else list(ops())
    unknown = sorted(set(names) - set(ops()))
    if unknown:
        print(f"no operators of the database: {', '.join(unknown)}")
        return 2
    layouts = options.layouts.split(",")
    if options.beside_dtensor:
        layouts += [DTENSOR + layout for layout in BESIDE]
    outcomes = sweep(
        names,
        layouts,
        options.samples,
        variants=options.variants.split(","),
        seconds=options.seconds,
        folder=FOLDER,
        processes=options.processes,
    )
    _write_outcomes(outcomes)
    rows = rows_of(o for o in outcomes if not o.case.layout.startswith(DTENSOR))
    standing = standing_of(outcomes)
    lines = standing.lines() if options.beside_dtensor else []
    (FOLDER / "table.txt").write_text(table(rows), encoding="utf-8")
    print(table(rows), _summary(rows, len(names)), *standing.behind, *lines, sep="\n")
    if options.docs:
        DOCS.write_text(document(rows, options.samples, standing), encoding="utf-8")
    is_bad = any(row.kind in (WRONG, CRASH) for row in rows)
    return int(is_bad or (options.beside_dtensor and not is_good(standing)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", default="", help="comma-separated operators; default: all")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="keys of tests.ops.layouts")
    parser.add_argument("--samples", type=int, default=3, help="most samples of an operator")
    parser.add_argument("--variants", default="", help=f"forms, of '', '{IN_PLACE}', '{OUT}'")
    parser.add_argument("--seconds", type=float, default=3000.0, help="start no job after as many")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2), help="worlds at a time")
    parser.add_argument("--beside-dtensor", action="store_true", help="compare with plain DTensor")
    parser.add_argument("--docs", action="store_true", help="rewrite docs/ops.md")
    return parser


def _write_outcomes(outcomes: list[Outcome]) -> None:
    lines = [json.dumps(dataclasses.asdict(outcome)) for outcome in outcomes]
    (FOLDER / "outcomes.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _summary(rows: list[Row], num_ops: int) -> str:
    counts = Counter(row.kind for row in rows)
    parts = [f"{counts[kind]} {kind}" for kind in CLASSES if counts[kind]]
    return f"{num_ops} operators: {', '.join(parts)}, {num_ops - len(rows)} without a case."


def document(rows: list[Row], samples: int, standing: Standing) -> str:
    """Return ``docs/ops.md``."""
    counts = Counter(row.kind for row in rows)
    lines = [
        "# Operators",
        "",
        "Written by `make test-ops ARGS=--docs`; do not edit. Every operator of PyTorch's own operator",
        f"database (OpInfo, float32, CPU), up to {samples} of its samples, forward and backward, on four processes,",
        "against plain PyTorch on one. The subgroups are ranks 0, 1 and, where there are two, rank 2; rank 3 is outside",
        "and must see the same results.",
        "",
        "* **one subgroup**: cut on dim 0, and on any dim;",
        "* **two subgroups**: the top tier cuts dim 0, 1 or 2 in the proportion 2:1, or replicates; the bottom tier cuts",
        "  the first subgroup's block;",
        "* **pending**: every floating operand is an unreduced sum, over the ranks of one subgroup or over two subgroups.",
        "",
        "A column counts the cases that are right; the others are refused with an error on every rank alike. Operators",
        "never move data between subgroups, so most of these errors name the `redistribute` to insert.",
        "",
        "| class | operators | meaning |",
        "|---|---|---|",
        *(f"| {k} | {counts[k]} | {_MEANINGS[k]} |" for k in CLASSES if counts[k]),
        "",
        "Beside DTensor, on the same cases with one subgroup, by variant of the database:",
        "",
        *(f"* {line}" for line in standing.lines()),
        "",
        f"| operator | class | {' | '.join(COLUMNS)} | first refusal |",
        f"|---|---|{'---|' * len(COLUMNS)}---|",
        *map(_line, rows),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    numbers = " | ".join(fraction(row.counts[column]) for column in COLUMNS)
    note = "" if row.first is None else reason(row.first).replace("|", "\\|")
    return f"| `{row.op}` | {row.kind} | {numbers} | {note} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
