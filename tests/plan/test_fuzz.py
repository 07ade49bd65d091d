"""What escapes from random input: a plan that survives a round trip, or a ``PlanError``."""

import json

from hypothesis import given, strategies as st

from hdtensor.errors import PlanError
from hdtensor.plan import AnnotationPlan
from tests.plan.documents import EXPANDED, GOOD, changed, uniform


SPEC_TEXT = st.text("SRP/0123 ,:-[]()x", max_size=24)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 8)
    | st.floats()
    | st.text(max_size=8)
    | SPEC_TEXT
)
KEYS = st.sampled_from(
    [
        "ranks",
        "layers",
        "tp",
        "cp",
        "stages",
        "pipelines",
        "mbs",
        "share",
        "tensors",
        "top",
        "x",
        "",
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


def paths(document, prefix=()):
    """Yield the path of every node of a document but the root."""
    items = document.items() if isinstance(document, dict) else ()
    items = enumerate(document) if isinstance(document, list) else items
    for key, value in items:
        yield (*prefix, key)
        yield from paths(value, (*prefix, key))


def accept_or_plan_error(read, source):
    try:
        plan = read(source)
    except PlanError:
        return
    assert AnnotationPlan.from_json(plan.to_json()) == plan
    assert str(plan)


@given(document=st.sampled_from([GOOD, EXPANDED, uniform()]), data=st.data())
def test_only_plan_errors_escape_from_changed_plans(document, data):
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(paths(document)) or [("x",)]
        path = data.draw(st.sampled_from(found))
        if data.draw(st.booleans()) and isinstance(path[-1], str):
            path = (*path[:-1], data.draw(KEYS))
        document = changed(document, path, data.draw(VALUES))
    accept_or_plan_error(AnnotationPlan.from_dict, document)


@given(VALUES)
def test_only_plan_errors_escape_from_any_value(value):
    accept_or_plan_error(AnnotationPlan.from_dict, value)
    accept_or_plan_error(AnnotationPlan.from_json, json.dumps(value))


@given(st.text() | st.binary() | st.text('{}[]",:0123456789eE.-+NaInfty \\u', max_size=60))
def test_only_plan_errors_escape_from_any_text(text):
    accept_or_plan_error(AnnotationPlan.from_json, text)


@given(
    text=st.sampled_from([json.dumps(GOOD), json.dumps(EXPANDED)]),
    cut=st.tuples(st.integers(0, 400), st.integers(0, 12)),
    put=st.text('{}[]",:0123 eE.-SRP/', max_size=6),
)
def test_only_plan_errors_escape_from_damaged_text(text, cut, put):
    start, length = cut
    accept_or_plan_error(AnnotationPlan.from_json, text[:start] + put + text[start + length :])
