"""What the operator tests say beside DTensor: counted by variant (operator and test name) of the database."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable

from tests.ops.outcomes import CRASH, REFUSED, RIGHT, WRONG, Outcome


DTENSOR = "dtensor "
FULL, PART, NOTHING = "in full", "in part", "not at all"


@dataclasses.dataclass(frozen=True)
class Standing:
    """How many variants are right, here and with DTensor on the same cases.

    Attributes:
        theirs: In full, in part or not at all -> number of variants that DTensor has right on one mesh.
        ours: Likewise for one subgroup.
        behind: Outcomes that are not right here and right with DTensor.
        reading: Variants among DTensor's right ones that read a value, which ranks outside refuse by contract.
        silent: What became here, by kind, of the cases that are silently wrong with DTensor.
        covered: Variants that DTensor has right where it really cuts.
        top_cut: Those of them that are right here where the top tier really cuts.
        top_whole: Those that are right here where the top tier replicates.
    """

    theirs: Counter
    ours: Counter
    behind: tuple[Outcome, ...]
    reading: frozenset[str]
    silent: Counter
    covered: frozenset[str]
    top_cut: frozenset[str]
    top_whole: frozenset[str]

    def lines(self) -> list[str]:
        """Return the three figures as text."""
        num, whole = len(self.covered), len(self.top_whole)
        missed = sorted(self.covered - self.top_cut)
        behind = sorted({o.case.op for o in self.behind})
        return [
            f"One subgroup: {_counts(self.ours)}; DTensor {_counts(self.theirs)}. Right with DTensor and not here: "
            f"{len(behind)} variants{_listed(behind)}; refused on ranks outside, since they read a value: "
            f"{len(self.reading)}{_listed(sorted(self.reading))}.",
            f"Silently wrong with DTensor: {sum(self.silent.values())} cases; here "
            f"{', '.join(f'{n} {kind}' for kind, n in sorted(self.silent.items())) or 'none'}.",
            f"Of {num} variants that DTensor has right with a cut, {len(self.top_cut)} "
            f"({_percent(len(self.top_cut), num)}) are right with a top Shard that cuts between two subgroups, {whole} "
            f"({_percent(whole, num)}) with a top Replicate. Not with a cut: {len(missed)}{_listed(missed)}.",
        ]


def _listed(names: list[str]) -> str:
    return f" ({', '.join(f'`{name}`' for name in names)})" if names else ""


def _counts(counts: Counter) -> str:
    return f"{counts[FULL]} variants right {FULL} and {counts[PART]} {PART}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def standing_of(outcomes: Iterable[Outcome]) -> Standing:
    """Return the figures of a sweep whose layouts are some of both kinds, ``x`` and ``dtensor x``."""
    by_case = {(o.case.op, o.case.layout, o.case.sample): o for o in outcomes if not o.case.variant}
    theirs, ours = defaultdict(list), defaultdict(list)
    behind, reading, silent, covered = [], set(), Counter(), set()
    for (op, layout, sample), their in by_case.items():
        own = by_case.get((op, layout.removeprefix(DTENSOR), sample))
        if not layout.startswith(DTENSOR) or own is None:
            continue
        theirs[op].append(their.kind)
        ours[op].append(own.kind)
        if their.kind == RIGHT:
            covered |= {op} if their.is_cut else set()
            if own.kind == REFUSED and own.text.startswith("NonLocalError"):
                reading.add(op)
            elif own.kind != RIGHT:
                behind.append(own)
        elif their.kind == WRONG:
            silent[own.kind] += 1
    right = [o for o in by_case.values() if o.kind == RIGHT and o.case.op in covered]
    return Standing(
        Counter(map(_grade, theirs.values())),
        Counter(map(_grade, ours.values())),
        tuple(behind),
        frozenset(reading),
        silent,
        frozenset(covered),
        frozenset(o.case.op for o in right if o.case.layout.startswith("two ") and o.is_cut),
        frozenset(o.case.op for o in right if o.case.layout == "two R"),
    )


def _grade(kinds: list[str]) -> str:
    right = kinds.count(RIGHT)
    return FULL if right == len(kinds) else PART if right else NOTHING


def is_good(standing: Standing) -> bool:
    """Return whether nothing is behind DTensor, and none of its silent faults is one here."""
    return not standing.behind and not standing.silent[WRONG] and not standing.silent[CRASH]
