import copy
import json

import pytest
from hypothesis import given, strategies as st

from hdtensor.errors import SpecError
from hdtensor.placements import HDSpec, spec_from_json, spec_to_json
from tests.placements.strategies import specs


any_spec = st.integers(0, 3).flatmap(specs)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["S0", "R", "P", "0,1:R"])
)
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["top", "top_ratio", "subgroups", "ranks", "mesh_shape", "placements", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(any_spec)
def test_json_reads_back_to_the_same_spec(spec):
    text = json.dumps(spec_to_json(spec))
    assert spec_from_json(json.loads(text)) is spec
    assert spec_from_json(json.loads(json.dumps(str(spec)))) is spec


def test_the_form_of_the_json():
    spec = HDSpec.from_text("S0[3:1] / 0-3(2x2):S1,P(max) 5:R")
    assert spec_to_json(spec) == {
        "top": "S0",
        "top_ratio": [3, 1],
        "subgroups": [
            {"ranks": [0, 1, 2, 3], "mesh_shape": [2, 2], "placements": ["S1", "P(max)"]},
            {"ranks": [5], "mesh_shape": [1], "placements": ["R"]},
        ],
    }
    assert "top_ratio" not in spec_to_json(HDSpec.from_text("R / 0:R"))


def test_the_mesh_may_be_left_out():
    value = {"top": "R", "subgroups": [{"ranks": [0, 1], "placements": ["S0"]}]}
    assert spec_from_json(value) is HDSpec.from_text("R / 0,1:S0")


GROUP = {"ranks": [0], "placements": ["R"]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "w must be an object or a text, got NoneType"),
        ([], "w must be an object or a text, got list"),
        ("R / 0:Q", "w: 'Q' is no placement"),
        ({}, r"w lacks \['subgroups', 'top'\]"),
        ({"top": "R", "subgroups": [GROUP], "hdim": 0}, r"w has unknown keys \['hdim'\]; allowed"),
        ({"top": "R", "subgroups": {}}, "w.subgroups must be a list, got dict"),
        ({"top": "R", "subgroups": []}, "w: a spec needs at least one subgroup"),
        ({"top": "R", "subgroups": ["0:R"]}, r"w.subgroups\[0\] must be an object"),
        ({"top": 0, "subgroups": [GROUP]}, "w.top must be a text such as 'S0', got 0"),
        ({"top": "S", "subgroups": [GROUP]}, "w.top: 'S' is no placement"),
        ({"top": "R", "subgroups": [{"ranks": [0]}]}, r"w.subgroups\[0\] lacks \['placements'\]"),
        (
            {"top": "R", "subgroups": [GROUP | {"x": 1}]},
            r"w.subgroups\[0\] has unknown keys \['x'\]",
        ),
        ({"top": "R", "subgroups": [GROUP | {"ranks": "0"}]}, r"w.subgroups\[0\]: ranks must be"),
        (
            {"top": "R", "subgroups": [GROUP | {"ranks": [0.0]}]},
            r"w.subgroups\[0\]: ranks must hold",
        ),
        ({"top": "R", "subgroups": [GROUP | {"placements": "R"}]}, "placements must be a list"),
        (
            {"top": "R", "subgroups": [GROUP | {"placements": [1]}]},
            r"placements\[0\] must be a text",
        ),
        ({"top": "R", "subgroups": [GROUP | {"mesh_shape": 1}]}, "mesh_shape must be a sequence"),
        ({"top": "R", "subgroups": [GROUP, GROUP]}, "w: rank 0 is in subgroup 0"),
        (
            {"top": "S0", "top_ratio": "3:1", "subgroups": [GROUP]},
            "w: top_ratio must be a sequence",
        ),
        (
            {
                "top": "S0",
                "top_ratio": [1],
                "subgroups": [GROUP, {"ranks": [1], "placements": ["R"]}],
            },
            "2 subgroups",
        ),
    ],
)
def test_errors_name_the_field(value, message):
    with pytest.raises(SpecError, match=message):
        spec_from_json(value, where="w")


def reads_or_refuses(value):
    before = copy.deepcopy(value)
    try:
        spec = spec_from_json(value)
    except SpecError:
        pass
    else:
        assert spec_from_json(spec_to_json(spec)) is spec
    assert repr(value) == repr(before)


@given(json_values)
def test_no_json_value_escapes(value):
    reads_or_refuses(value)


@given(any_spec, st.data())
def test_no_damaged_spec_escapes(spec, data):
    value = spec_to_json(spec)
    place = data.draw(st.sampled_from(["spec", "subgroup"]))
    target = value if place == "spec" else value["subgroups"][0]
    key = data.draw(st.sampled_from(sorted(target)))
    if data.draw(st.booleans()):
        target[key] = data.draw(json_values)
    else:
        del target[key]
    reads_or_refuses(value)
