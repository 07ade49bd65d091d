"""The figures beside DTensor, on outcomes made by hand."""

from tests.ops.outcomes import CRASH, REFUSED, RIGHT, WRONG, Case, Outcome
from tests.ops.standing import FULL, NOTHING, PART, is_good, standing_of


def _outcome(op, layout, kind, sample=0, text=""):
    return Outcome(Case(op, layout, sample), kind, "forward", text, is_cut=layout != "two R")


def _pair(op, theirs, ours, sample=0):
    return [
        _outcome(op, "dtensor one S0", theirs, sample),
        _outcome(op, "one S0", ours, sample),
    ]


def test_counts_variants_and_names_what_is_behind():
    outcomes = [
        *_pair("add", RIGHT, RIGHT),
        *_pair("sort", RIGHT, RIGHT),
        *_pair("sort", CRASH, REFUSED, sample=1),
        *_pair("loss", WRONG, RIGHT),
        *_pair("eig", RIGHT, REFUSED),
        _outcome("add", "two S0", RIGHT),
        _outcome("add", "two R", RIGHT),
        _outcome("eig", "two S0", REFUSED),
        _outcome("sort", "two S1", REFUSED),
        _outcome("loss", "two S0", RIGHT),
    ]

    standing = standing_of(outcomes)

    assert standing.theirs == {FULL: 2, PART: 1, NOTHING: 1}
    assert standing.ours == {FULL: 2, PART: 1, NOTHING: 1}
    assert [o.case.op for o in standing.behind] == ["eig"]
    assert standing.silent == {RIGHT: 1}
    assert standing.covered == {"add", "sort", "eig"}
    assert (standing.top_cut, standing.top_whole) == ({"add"}, {"add"})
    assert not is_good(standing)
    assert "Not with a cut: 2 (`eig`, `sort`)." in standing.lines()[2]


def test_a_silent_fault_that_is_one_here_is_not_good():
    assert is_good(standing_of(_pair("loss", WRONG, REFUSED)))
    assert not is_good(standing_of(_pair("loss", WRONG, WRONG)))


def test_ranks_outside_may_refuse_to_read():
    theirs, _ = _pair("narrow", RIGHT, REFUSED)
    ours = _outcome("narrow", "one S0", REFUSED, text="NonLocalError on the ranks outside")

    standing = standing_of([theirs, ours])

    assert is_good(standing)
    assert standing.reading == {"narrow"}
