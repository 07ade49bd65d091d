"""What cases of the operator tests gave, and the table of operators that they add up to."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable


RIGHT, REFUSED, WRONG, CRASH = "right", "refused", "wrong", "crash"

#: Forms of an operator beside the plain one.
IN_PLACE, OUT = "in place", "out="

#: Classes of operators, best first.
BOTH, PARTLY, ONE, NONE = "both tiers", "both tiers, some cuts", "one subgroup", "refused"
CLASSES = (BOTH, PARTLY, ONE, NONE, WRONG, CRASH)

#: Columns of the table: what a layout's name begins with, or ends with for pending operands.
ONE_SUBGROUP, TWO_SUBGROUPS, PENDING = "one subgroup", "two subgroups", "pending"
COLUMNS = (ONE_SUBGROUP, TWO_SUBGROUPS, PENDING)


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator call: an operator of the database, a layout, the number of a sample, and the operator's form."""

    op: str
    layout: str
    sample: int
    variant: str = ""

    @property
    def column(self) -> str:
        """The table's column that the case counts in."""
        if self.layout.endswith(" P"):
            return PENDING
        return ONE_SUBGROUP if self.layout.startswith("one") else TWO_SUBGROUPS


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a case gave.

    Attributes:
        case: The case.
        kind: ``right``, ``refused``, ``wrong`` or ``crash``.
        phase: ``forward`` or ``backward``: where it went wrong, or the last that was checked.
        text: The error, or how the values differ.
        is_cut: Whether the layout cuts a tensor of the sample.
    """

    case: Case
    kind: str
    phase: str
    text: str = ""
    is_cut: bool = False

    @classmethod
    def from_dict(cls, entry: dict) -> "Outcome":
        """Return what ``dataclasses.asdict`` took apart."""
        return cls(**{**entry, "case": Case(**entry["case"])})

    def __str__(self) -> str:
        case = self.case
        form = f", {case.variant}" if case.variant else ""
        return f"{case.op}, {case.layout!r}, sample {case.sample}{form}: {self.kind} {self.phase}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator's row in the table.

    Attributes:
        op: The operator.
        kind: Its class, one of ``CLASSES``.
        counts: Column -> kind -> number of cases.
        first: The first outcome of the worst kind, None if all are right.
    """

    op: str
    kind: str
    counts: dict[str, Counter]
    first: Outcome | None


def rows_of(outcomes: Iterable[Outcome]) -> list[Row]:
    """Return the table's rows, in the order of the operators' names."""
    by_op = defaultdict(list)
    for outcome in outcomes:
        by_op[outcome.case.op].append(outcome)
    return [_row(op, by_op[op]) for op in sorted(by_op, key=str.lower)]


def _row(op: str, outcomes: list[Outcome]) -> Row:
    counts: dict[str, Counter] = {column: Counter() for column in COLUMNS}
    for outcome in outcomes:
        counts[outcome.case.column][outcome.kind] += 1
    kind = _class_of(counts)
    worst = kind if kind in (WRONG, CRASH) else REFUSED
    shown = [o for o in outcomes if o.kind == worst]
    shown.sort(key=lambda o: COLUMNS.index(o.case.column))
    return Row(op, kind, counts, shown[0] if shown else None)


def _class_of(counts: dict[str, Counter]) -> str:
    total = sum(counts.values(), Counter())
    for bad in (WRONG, CRASH):
        if total[bad]:
            return bad
    one, two = counts[ONE_SUBGROUP], counts[TWO_SUBGROUPS]
    if not one[REFUSED] and not two[REFUSED]:
        return BOTH
    if two[RIGHT]:
        return PARTLY
    return ONE if one[RIGHT] else NONE


def fraction(counts: Counter) -> str:
    """Return how many of the cases are right."""
    return f"{counts[RIGHT]}/{sum(counts.values())}"


def table(rows: Iterable[Row], width: int = 170) -> str:
    """Return the rows as text, one line an operator."""
    heads = "".join(f"{column:>15}" for column in COLUMNS)
    lines = [f"{'operator':40} {'class':22}{heads}  first error"]
    for row in rows:
        numbers = "".join(f"{fraction(row.counts[column]):>15}" for column in COLUMNS)
        note = "" if row.first is None else str(row.first).partition(", ")[2][:width]
        lines.append(f"{row.op:40} {row.kind:22}{numbers}  {note}")
    return "\n".join(lines) + "\n"


_MOVE = re.compile(r"(?:\w+\.)?([\w.]+): operand '([^']+)' .*? must be (\S+) at the top tier")
_NO_RULE = re.compile(r"(?:\w+\.)?([\w.]+) has no sharding rule")


def reason(outcome: Outcome) -> str:
    """Return in a few words why a case was refused.

    >>> case = Case("sort", "two S0", 0)
    >>> text = "DeductionError: aten.sort.default: operand 'self' (...) must be R at the top tier but is S0; ..."
    >>> reason(Outcome(case, REFUSED, "forward", text))
    '`sort.default` wants `self` R at the top'
    """
    text = outcome.text.partition(": ")[2] or outcome.text
    if match := _MOVE.match(text):
        return f"`{match[1]}` wants `{match[2]}` {match[3]} at the top"
    if match := _NO_RULE.match(text):
        return f"`{match[1]}` has no rule"
    said = re.sub(r" \(.*", "", text.splitlines()[0]).partition(". ")[0]
    return re.sub(r"^(?:aten|torch_nn)\.([\w.]+):", r"`\1`:", said)[:90].rstrip()
