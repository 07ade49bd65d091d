import pytest
from hypothesis import given, settings, strategies as st

from hdtensor.debug import svg
from hdtensor.debug.regions import regions
from hdtensor.errors import SpecError
from hdtensor.placements import HDSpec
from tests.debug.documents import read
from tests.placements.strategies import cut_tensors


HATCH = "url(#terms)"


def drawn_parts(drawing):
    """``(rectangle, label)`` of each part: the frames' rectangles, with the text in their middle."""
    parts = []
    for rectangle in drawing.rectangles:
        if rectangle.fill != HATCH and (rectangle.width, rectangle.height) != (12, 12):
            middle = rectangle.x + rectangle.width / 2
            inside = [
                text.value
                for text in drawing.texts
                if abs(text.x - middle) < 0.1
                and rectangle.y < text.y - 4 < rectangle.y + rectangle.height
            ]
            assert len(inside) == 1, f"{rectangle} holds {inside}"
            parts.append((rectangle, inside[0]))
    return parts


@given(cut_tensors(max_size=5))
def test_every_picture_is_well_formed_and_within_its_page(cut):
    drawing = read(svg(*cut))
    for rectangle in drawing.rectangles:
        assert rectangle.width > 0
        assert rectangle.height > 0
        assert rectangle.x >= 0
        assert rectangle.y >= 0
        assert rectangle.x + rectangle.width <= drawing.width
        assert rectangle.y + rectangle.height <= drawing.height
    assert str(cut[0]) in drawing.values


@given(cut_tensors(min_dims=1, max_dims=2, max_size=5, max_subgroups=3))
def test_frames_show_the_parts_of_the_tensor_or_of_each_subgroup(cut):
    spec, shape, top_sizes = cut
    if not regions(spec, shape, top_sizes):
        assert "(no elements)" in read(svg(*cut)).values
        return
    by_subgroup = spec.hdim < 0 and spec.num_subgroups > 1
    indices = range(spec.num_subgroups) if by_subgroup else [None]
    expected = [part for i in indices for part in regions(spec, shape, top_sizes, subgroup=i)]
    drawing = read(svg(*cut))
    parts = drawn_parts(drawing)
    assert sorted(label for _, label in parts) == sorted(part.label for part in expected)
    assert sum(r.fill == HATCH for r in drawing.rectangles) == sum("(" in p.label for p in expected)


@settings(max_examples=40)
@given(st.data())
def test_parts_do_not_overlap_and_keep_their_order(data):
    spec, shape, top_sizes = data.draw(
        cut_tensors(min_dims=2, max_dims=2, max_size=5, max_subgroups=3).filter(
            lambda cut: cut[0].hdim >= 0 and regions(*cut)
        )
    )
    parts = drawn_parts(read(svg(spec, shape, top_sizes)))
    expected = regions(spec, shape, top_sizes)
    drawn = [rectangle for rectangle, _ in parts]
    for one, box in zip(drawn, (part.box for part in expected), strict=True):
        for two, other in zip(drawn, (part.box for part in expected), strict=True):
            assert (box.start[0] < other.start[0]) == (one.y < two.y - 0.1)
            assert (box.start[1] < other.start[1]) == (one.x < two.x - 0.1)
            assert (box.stop[0] <= other.start[0]) == (one.y + one.height <= two.y + 0.1)
            assert (box.stop[1] <= other.start[1]) == (one.x + one.width <= two.x + 0.1)


def test_one_colour_per_subgroup_and_a_legend():
    drawing = read(svg(HDSpec.from_text("S0[3:1] / 0,1:S1 2:R"), (4, 4)))
    colour_of = {label: rectangle.fill for rectangle, label in drawn_parts(drawing)}
    assert colour_of["0"] == colour_of["1"] != colour_of["2"]
    swatches = {
        text.value: rectangle.fill
        for rectangle in drawing.rectangles
        for text in drawing.texts
        if rectangle.width == 12
        and abs(text.y - rectangle.y - 11) < 1
        and text.x == rectangle.x + 18
    }
    assert swatches == {"ranks 0,1": colour_of["0"], "rank 2": colour_of["2"]}


def test_areas_are_in_proportion():
    parts = drawn_parts(read(svg(HDSpec.from_text("S0[3:1] / 0,1:S1 2:R"), (400, 400))))
    area = {label: rectangle.width * rectangle.height for rectangle, label in parts}
    assert area["0"] == pytest.approx(area["1"], rel=1e-3)
    assert area["0"] / area["2"] == pytest.approx(1.5, rel=1e-2)


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("R / 0:R 1:R", "="),
        ("P / 0:R 1:R", "+"),
        ("P(max) / 0:R 1:R", "max"),
        ("P(avg) / 0:R 1:R", "avg"),
    ],
)
def test_the_top_tier_is_the_sign_between_frames(text, sign):
    assert read(svg(HDSpec.from_text(text), (2, 2))).values.count(sign) == 1


def test_dims_that_nobody_cuts_give_way():
    drawing = read(svg(HDSpec.from_text("S0[5:3] / 0,1:S2 2:R"), (16, 7, 64)))
    assert drawing.upright == ["dim 0"]
    assert {"dim 2", "10", "16", "32", "64"} <= set(drawing.values)
    assert len(drawn_parts(drawing)) == 3


def test_three_cut_dims_are_a_table():
    spec = HDSpec.from_text("S0 / 0-3(2x2):S1,S2 4:R")
    drawing = read(svg(spec, (4, 4, 4)))
    rows = [value for value in drawing.values if value.startswith("[") and ":" in value]
    assert len(rows) == len(regions(spec, (4, 4, 4))) == 5
    assert "[2:4, :, :]" in rows


def test_titles_and_names_are_text_and_not_markup():
    spec = HDSpec.from_text("S0 / 0:R 1:R")
    drawing = read(svg(spec, (4, 4), title='a<b>&"c"\x00\x1b', dim_names=("<rows>", "&cols")))
    assert 'a<b>&"c"??' in drawing.values
    assert drawing.upright == ["<rows>"]
    assert "&cols" in drawing.values


@pytest.mark.parametrize("names", [(), ("a",), ("a", "b", "c")], ids=str)
def test_names_must_fit_the_shape(names):
    with pytest.raises(SpecError, match="2 dims, got"):
        svg(HDSpec.from_text("R / 0:R"), (4, 4), dim_names=names)


def test_the_last_index_always_shows():
    drawing = read(svg(HDSpec.from_text("R / 0-15:S0"), (160000, 4)))
    assert {"160000", "0"} <= set(drawing.values)
