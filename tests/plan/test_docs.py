"""docs/plans.md says what the code does."""

import re
from pathlib import Path

import pytest

from hdtensor.errors import PlanError
from hdtensor.plan import AnnotationPlan, Role, StrategyPlan
from tests.plan.documents import GOOD, changed


DOCS = Path(__file__).parents[2] / "docs" / "plans.md"
TEXT = DOCS.read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_json_examples_are_plans():
    plans = [AnnotationPlan.from_json(block) for block in blocks("json")]
    assert [type(plan).__name__ for plan in plans] == [
        *("StrategyPlan", "StrategyPlan", "ExpandedPlan")
    ]
    example = AnnotationPlan.load(DOCS.parents[1] / "examples" / "plans" / "two_unlike.json")
    assert example.pipelines == plans[0].pipelines
    assert plans[0].table(world_size=4) + "\n" == blocks("text")[0]


def test_the_tables_name_every_key_and_role():
    strategy = AnnotationPlan.from_json(blocks("json")[0])
    assert isinstance(strategy, StrategyPlan)
    pipeline, stage = strategy.pipelines[0], strategy.pipelines[0].stages[0]
    names = ["pipelines", "uniform", "zero", "version", *Role]
    for value in (strategy.about, pipeline, stage):
        names += type(value).__dataclass_fields__
    missing = [name for name in names if f"`{name}`" not in TEXT]
    assert missing == []


@pytest.mark.parametrize(
    ("line", "field", "value"), [(0, "ranks", [1, 2]), (1, "layers", [3, 3]), (2, "rank", [2])]
)
def test_the_errors_are_the_ones_that_are_raised(line, field, value):
    with pytest.raises(PlanError) as error:
        AnnotationPlan.from_dict(changed(GOOD, ("pipelines", 0, "stages", 1, field), value))
    assert str(error.value) == blocks("text")[1].splitlines()[line]
