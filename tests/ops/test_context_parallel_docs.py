"""docs/context_parallel.md says what the code does."""

import doctest
import re
from pathlib import Path

from hdtensor.plan import AnnotationPlan, ModelDescription


PATH = Path(__file__).parents[2] / "docs" / "context_parallel.md"


def test_the_examples_run():
    result = doctest.testfile(str(PATH), module_relative=False)
    assert result.attempted > 4
    assert result.failed == 0


def test_the_plan_is_a_plan():
    (text,) = re.findall(r"```json\n(.*?)```", PATH.read_text(encoding="utf-8"), flags=re.DOTALL)
    plan = AnnotationPlan.from_json(text)
    assert AnnotationPlan.from_json(plan.to_json()) == plan
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    model = ModelDescription.llama(num_layers=4, num_key_value_heads=2, vocab_size=32, **sizes)
    expanded = plan.expand(model)
    assert str(expanded.inputs) == "S0[2:1] / 0-3(2x2):S1,R 4:R"
    assert "shared sequences: ring, zigzag, in 4 modules" in str(expanded)
    assert AnnotationPlan.from_json(expanded.to_json()) == expanded
