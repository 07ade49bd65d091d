"""A sample of PyTorch's operator database on four ranks; ``scripts/opinfo_report.py`` runs the whole of it."""

import importlib
import re
from pathlib import Path

import pytest

from tests.ops.outcomes import BOTH, CRASH, PARTLY, REFUSED, RIGHT, WRONG
from tests.support.world import run_world


TABLE = Path(__file__).resolve().parent.parent.parent / "docs" / "ops.md"
LAYOUTS = ("one any", "two S0", "one P")
EVERY = 9

#: Operators that a training step cannot do without, whichever others are sampled.
_CORE = """
add bmm cat clamp cumsum div.no_rounding_mode exp expand gather linalg.vector_norm masked_fill matmul mean mm mul
nn.functional.binary_cross_entropy nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu
nn.functional.layer_norm nn.functional.linear nn.functional.mse_loss nn.functional.relu nn.functional.rms_norm
nn.functional.scaled_dot_product_attention nn.functional.silu permute pow reshape rsqrt select sigmoid softmax split
stack sub sum transpose tril unsqueeze view where
"""
CORE = _CORE.split()


def _in_table():
    """Return each operator's class in docs/ops.md."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    matches = (re.match(r"\| `([^`]+)` \| ([^|]+) \|", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


@pytest.fixture(scope="module")
def opinfo():
    # The database takes seconds to import, which every process that only collects tests would pay for.
    return importlib.import_module("tests.ops.opinfo")


@pytest.mark.dist(4)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_are_right_or_refused_as_the_table_says(opinfo, layout):
    named = opinfo.ops()
    names = sorted({*list(named)[::EVERY], *CORE} & set(named))

    outcomes = run_world(opinfo.run_ops, opinfo.WORLD_SIZE, names, [layout], 1, timeout=100.0)[0]

    bad = [str(outcome) for outcome in outcomes if outcome.kind in (WRONG, CRASH)]
    assert not bad, "\n".join(bad)
    classes = _in_table()
    stale = [
        str(outcome)
        for outcome in outcomes
        if outcome.kind == REFUSED and classes.get(outcome.case.op) == BOTH and layout != "one P"
    ]
    assert not stale, "right in docs/ops.md, refused here:\n" + "\n".join(stale)
    assert sum(outcome.kind == RIGHT for outcome in outcomes) > len(outcomes) // 2


def test_operators_of_a_training_step_are_in_the_table():
    classes = _in_table()

    assert {
        name: classes.get(name) for name in CORE if classes.get(name) not in (BOTH, PARTLY)
    } == {}
