"""What cases of the operator tests gave, and the table of operators that they add up to."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable


RIGHT, REFUSED, WRONG, CRASH = "right", "refused", "wrong", "crash"

#: Classes of operators, best first.
BOTH, PARTLY, ONE, NONE = "both tiers", "both tiers, some cuts", "one subgroup", "refused"
CLASSES = (BOTH, PARTLY, ONE, NONE, WRONG, CRASH)


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator call: an operator of the database, a layout and the number of a sample."""

    op: str
    layout: str
    sample: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a case gave.

    Attributes:
        case: The case.
        kind: ``right``, ``refused``, ``wrong`` or ``crash``.
        phase: ``forward`` or ``backward``: where it went wrong, or the last that was checked.
        text: The error, or how the values differ.
    """

    case: Case
    kind: str
    phase: str
    text: str = ""

    @classmethod
    def from_dict(cls, entry: dict) -> "Outcome":
        """Return what ``dataclasses.asdict`` took apart."""
        return cls(**{**entry, "case": Case(**entry["case"])})


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator's row in the table.

    Attributes:
        op: The operator.
        kind: Its class, one of ``CLASSES``.
        counts: Tier (``one`` or ``two`` subgroups) -> kind -> number of cases.
        note: The first error, shortened.
    """

    op: str
    kind: str
    counts: dict[str, Counter]
    note: str


def rows_of(outcomes: Iterable[Outcome]) -> list[Row]:
    """Return the table's rows, in the order of the operators' names."""
    by_op = defaultdict(list)
    for outcome in outcomes:
        by_op[outcome.case.op].append(outcome)
    return [_row(op, by_op[op]) for op in sorted(by_op)]


def _row(op: str, outcomes: list[Outcome]) -> Row:
    counts: dict[str, Counter] = {"one": Counter(), "two": Counter()}
    for outcome in outcomes:
        counts[outcome.case.layout.split()[0]][outcome.kind] += 1
    kind = _class_of(counts)
    worst = {WRONG: WRONG, CRASH: CRASH}.get(kind, REFUSED)
    first = next((o for o in outcomes if o.kind == worst), None)
    return Row(op, kind, counts, "" if first is None else _shorten(first))


def _class_of(counts: dict[str, Counter]) -> str:
    total = counts["one"] + counts["two"]
    for bad in (WRONG, CRASH):
        if total[bad]:
            return bad
    if not total[REFUSED]:
        return BOTH
    if not total[RIGHT]:
        return NONE
    return PARTLY if counts["two"][RIGHT] else ONE


def _shorten(outcome: Outcome) -> str:
    line = outcome.text.splitlines()[0] if outcome.text else ""
    return f"{outcome.case.layout} #{outcome.case.sample} {outcome.phase}: {line}"


def table(rows: Iterable[Row], width: int = 160) -> str:
    """Return the rows as text, one line an operator."""
    lines = [f"{'operator':40} {'class':22} {'one':>9} {'two':>9}  first error"]
    for row in rows:
        one, two = (_fraction(row.counts[tier]) for tier in ("one", "two"))
        lines.append(f"{row.op:40} {row.kind:22} {one:>9} {two:>9}  {row.note[:width]}")
    return "\n".join(lines) + "\n"


def _fraction(counts: Counter) -> str:
    return f"{counts[RIGHT]}/{sum(counts.values())}"
