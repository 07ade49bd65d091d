import re

import pytest
from hypothesis import example, given, strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor._torch_compat import StridedShard
from hdtensor.errors import SpecError
from hdtensor.placements import HDSpec, Subgroup, parse_placement, parse_spec
from hdtensor.placements.text import parse_subgroup
from tests.placements.strategies import specs


any_spec = st.integers(0, 3).flatmap(specs)
VALID = ["S0[3:1] / 0,1:S1 2:R", "R / 0-3(2x2):S0,R 4,5:P(max)", "P / 0:S-1 7:S0x2"]


@given(any_spec)
def test_the_text_of_a_spec_parses_back_to_it(spec):
    assert parse_spec(str(spec)) is spec
    assert HDSpec.from_text(str(spec)) is spec
    assert str(spec) in repr(spec)
    for group in spec.subgroups:
        assert parse_subgroup(group.text()) == group


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("S0", Shard(0)),
        ("S12", Shard(12)),
        ("S-1", Shard(-1)),
        ("S1x4", StridedShard(1, split_factor=4)),
        ("R", Replicate()),
        ("P", Partial()),
        ("P(sum)", Partial()),
        ("P(max)", Partial("max")),
        ("P(avg)", Partial("avg")),
    ],
)
def test_parse_placement(text, placement):
    parsed = parse_placement(text)
    assert parsed == placement
    assert type(parsed) is type(placement)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("R / 0:R", HDSpec([Subgroup((0,))])),
        ("  S1   /  0:R   1:R ", HDSpec([Subgroup((0,)), Subgroup((1,))], Shard(1))),
        ("S0[6:2] / 0:R 1:R", HDSpec([Subgroup((0,)), Subgroup((1,))], Shard(0), (3, 1))),
        ("R / 3,0,1,2:S0", HDSpec([Subgroup((3, 0, 1, 2), Shard(0))])),
        (
            "R / 0-1,5,7-9(2x3):R,S1",
            HDSpec([Subgroup((0, 1, 5, 7, 8, 9), (Replicate(), Shard(1)), (2, 3))]),
        ),
    ],
)
def test_parse_spec(text, spec):
    assert parse_spec(text) is spec


def test_runs_of_three_or_more_ranks_are_joined():
    assert Subgroup((0, 1, 2, 3, 7, 9, 10)).text() == "0-3,7,9,10:R"
    assert Subgroup((2, 1, 0)).text() == "2,1,0:R"


BAD_SPECS = [
    "",
    "/",
    "R",
    "R / ",
    "R 0:R",
    "S / 0:R",
    "S0[] / 0:R 1:R",
    "S0[3:] / 0:R 1:R",
    "S0[3::1] / 0:R 1:R",
    "S0[3;1] / 0:R 1:R",
    "S0[-1:1] / 0:R 1:R",
    "R[1:1] / 0:R 1:R",
    "R / 0",
    "R / 0:",
    "R / :R",
    "R / 0:Q",
    "R / 0:P()",
    "R / 0:P(xor)",
    "R / 0:S0x0",
    "R / 0:S0x",
    "R / 0:R,",
    "R / 0,:R",
    "R / 0--1:R",
    "R / 3-1:R",
    "R / -1:R",
    "R / 0-3(2x):R,R",
    "R / 0-3(x2):R,R",
    "R / 0-3(2xx2):R,R",
    "R / 0-3(2x3):R,R",
    "R / 0,0:R",
    "R / 0:R 0:R",
    "R / 0-99999999:R",
    "R / 0-1048577:R",
    "R / 99999999999999999999:R",
    "R / 0:S99999999999999999999",
    "R / 0:S0x99999999999999999999",
    "S0[99999999999999999999:1] / 0:R 1:R",
    "R / 0:R / 1:R",
    "R / \u00b2:R",
    "R / 0:R\x00",
]


@pytest.mark.parametrize("text", BAD_SPECS, ids=repr)
def test_what_is_no_spec_is_refused(text):
    with pytest.raises(SpecError) as error:
        parse_spec(text)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("value", [None, 3, b"R / 0:R", ["R / 0:R"]], ids=repr)
def test_only_strings_are_parsed(value):
    with pytest.raises(SpecError, match="must be a string"):
        parse_spec(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S0 0:R", r"Write <top> / <ranks>:<placements> \.\.\., for example"),
        ("R / 0:Q", r"'Q' is no placement. Write S<dim>, R, P"),
        ("R / 0=R", r"'0=R' is no subgroup. Write <ranks>:<placements>"),
        ("R / 3-1:R", r"the range '3-1' in '3-1:R' must rise"),
        ("R / 0:P(xor)", "use one of"),
        ("R / 1000000000000:R", "more than 9 digits"),
    ],
)
def test_errors_say_what_to_write(text, message):
    with pytest.raises(SpecError, match=message):
        parse_spec(text)


def parses_or_refuses(text):
    try:
        spec = parse_spec(text)
    except SpecError:
        return
    assert parse_spec(str(spec)) is spec


@given(st.text(st.sampled_from("S0R12P(max)[3:1]/,-x \n"), max_size=30))
@example("R / 0:R\n")
def test_no_text_of_the_alphabet_escapes(text):
    parses_or_refuses(text)


@given(st.text(max_size=40))
def test_no_text_escapes(text):
    parses_or_refuses(text)
    parses_or_refuses("R / " + text)


@given(
    st.sampled_from(VALID),
    st.integers(0, 40),
    st.integers(0, 3),
    st.text("S0RPx:/-,[]() 9", max_size=3),
)
def test_no_damaged_spec_escapes(text, position, removed, inserted):
    parses_or_refuses(text[:position] + inserted + text[position + removed :])


@given(any_spec)
def test_a_spec_is_one_short_line_without_private_names(spec):
    assert re.fullmatch(r"[\w()\[\]:,/ \-]+", str(spec))
