import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st

from hdtensor.debug import write_training_picture
from hdtensor.debug.training import (
    Phase,
    log_ticks,
    nice_ticks,
    write_phased_training_picture,
)
from hdtensor.errors import SpecError
from hdtensor.placements import HDSpec
from tests.debug.documents import read


SPECS = {
    "batch": (HDSpec.from_text("S0[5:3] / 0,1:R 2:R"), (16, 64)),
    "q_proj.weight": (HDSpec.from_text("R / 0,1:S0 2:R"), (32, 32)),
    "exact": (HDSpec.from_text("S0 / 0,1:R 2:R"), (16, 64), (13, 3)),
}
SHARES = {0: 10, 1: 10, 2: 6, 3: 0}


def draw(tmp_path, losses, reference=None, *, shares=SHARES, specs=SPECS, **options):
    path = tmp_path / "picture.svg"
    assert (
        write_training_picture(path, losses, reference, shares=shares, specs=specs, **options)
        == path
    )
    return read(path.read_text(encoding="utf-8"))


def curves(drawing):
    """Lines of more than two points that are not the axes."""
    return [line for line in drawing.lines if len(line) > 3]


def test_the_picture_holds_curve_shares_and_specs(tmp_path):
    losses = [5.5, 5.0, 4.4, 4.0, 3.1]
    drawing = draw(tmp_path, losses, [5.5, 5.0], title="Llama")
    bold = {text.value for text in drawing.texts if text.bold}
    assert bold == {"Llama", "Share of the work", "Who owns what", *SPECS}
    assert {"38.5 %", "23.1 %", "0 %", "rank 3"} <= set(drawing.values)
    assert "S0 / 0,1:R 2:R  on [16, 64]" in drawing.values
    assert "13" in drawing.values
    assert drawing.upright.count("loss") == 1
    (curve,) = curves(drawing)
    assert len(curve) == len(losses)


@pytest.mark.parametrize("log_scale", [False, True])
def test_the_curve_is_the_losses(tmp_path, log_scale):
    losses = [5.5, 2.0, 3.0, 0.5, 1.0]
    drawing = draw(tmp_path, losses, log_scale=log_scale)
    (curve,) = curves(drawing)
    steps = [x for x, _ in curve]
    assert [b - a for a, b in itertools.pairwise(steps)] == pytest.approx(
        [steps[1] - steps[0]] * 4, abs=0.02
    )
    values = [math.log(loss) if log_scale else loss for loss in losses]
    low, high = values.index(min(values)), values.index(max(values))
    scale = (curve[high][1] - curve[low][1]) / (values[high] - values[low])
    expected = [curve[low][1] + scale * (value - values[low]) for value in values]
    assert scale < 0  # larger losses are further up
    assert [y for _, y in curve] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("log_scale", [False, True])
def test_ticks_stand_where_their_numbers_are(tmp_path, log_scale):
    losses = [50.0, 30.0, 20.0, 10.0]
    drawing = draw(tmp_path, losses, log_scale=log_scale, shares={}, specs={})
    (curve,) = curves(drawing)
    y_of = {text.value: text.y - 4 for text in drawing.texts}
    ticked = [(y, f"{loss:g}") for (_, y), loss in zip(curve, losses, strict=True)]
    assert [y for y, tick in ticked if tick in y_of] == pytest.approx(
        [y_of[tick] for _, tick in ticked if tick in y_of], abs=0.02
    )
    assert {"10", "20", "50"} <= set(y_of)


def test_a_reference_is_drawn_with_its_distance(tmp_path):
    drawing = draw(tmp_path, [4.0, 3.0, 2.0], [4.0, 2.0])
    assert "the first 2 steps on one device; largest relative difference 5.0e-01" in drawing.values
    assert len(drawing.circles) == 2 + 1  # and the one that explains them


def test_a_long_reference_is_a_line(tmp_path):
    losses = [5.0 / step for step in range(1, 101)]
    drawing = draw(tmp_path, losses, losses[:60])
    assert sorted(map(len, curves(drawing))) == [60, 100]
    assert drawing.circles == []


def test_values_without_a_place_leave_gaps_and_are_counted(tmp_path):
    losses = [5.0, 4.0, 3.0, 3.0, float("nan"), 2.0, 2.0, 2.0, 2.0, float("inf"), 1.0]
    drawing = draw(tmp_path, losses)
    assert [len(line) for line in curves(drawing)] == [4, 4]
    assert len(drawing.circles) == 1
    assert "2 of 11 values cannot be drawn and are left out" in drawing.values


def test_a_logarithmic_axis_leaves_zero_and_below_out(tmp_path):
    drawing = draw(tmp_path, [4.0, 3.0, 2.0, 1.0, 0.0, -1.0], log_scale=True)
    assert "2 of 6 values cannot be drawn and are left out" in drawing.values


@pytest.mark.parametrize(
    ("losses", "options"),
    [([], {}), ([float("nan")], {}), ([0.0, -1.0], {"log_scale": True})],
    ids=str,
)
def test_no_loss_to_draw_is_refused(tmp_path, losses, options):
    with pytest.raises(ValueError, match="no loss to draw"):
        draw(tmp_path, losses, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [-1.0, float("nan"), float("inf")])
def test_shares_are_finite_and_not_negative(tmp_path, share):
    with pytest.raises(ValueError, match="share of rank 7 must be finite"):
        draw(tmp_path, [1.0], shares={7: share})


def test_a_spec_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(SpecError, match="needs dim 3"):
        draw(tmp_path, [1.0], specs={"w": (HDSpec.from_text("S3 / 0:R 1:R"), (2, 2))})


def test_bars_are_in_proportion_and_in_their_subgroups_colour(tmp_path):
    drawing = draw(tmp_path, [1.0, 2.0], specs={"batch": SPECS["batch"]})
    bars = [r for r in drawing.rectangles if r.height == 18 and r.fill.startswith("#")][:4]
    assert bars[2].width / bars[0].width == pytest.approx(0.6, abs=0.01)
    assert bars[0].fill == bars[1].fill != bars[2].fill
    assert bars[3].width == 1
    assert bars[3].fill not in {bars[0].fill, bars[2].fill}


OTHER = {"batch": (HDSpec.from_text("S0[3:1] / 2,3:R 1:R"), (16, 64))}


def test_a_switch_is_marked_between_its_steps_and_both_plans_are_shown(tmp_path):
    path = write_phased_training_picture(
        tmp_path / "picture.svg",
        [5.0, 4.0, 3.0, 2.0, 1.0, 1.0],
        phases=[Phase(3, SHARES, SPECS), Phase(3, {0: 0, 1: 1, 2: 2, 3: 2}, OTHER)],
    )
    drawing = read(path.read_text(encoding="utf-8"))
    headings = [text.value for text in drawing.texts if text.bold]
    assert headings == [
        "Training loss",
        "Share of the work, steps 1 to 3",
        "Share of the work, steps 4 to 6",
        "Who owns what, steps 1 to 3",
        *SPECS,
        "Who owns what, steps 4 to 6",
        "batch",
    ]
    (curve,) = curves(drawing)
    (name,) = [text for text in drawing.texts if text.value == "switch"]
    marks = [line for line in drawing.lines if len(line) == 2 and line[0][0] == line[1][0]]
    (mark,) = {x for (x, y), (_, end) in marks if abs(end - y) > 100}
    assert mark == pytest.approx((curve[2][0] + curve[3][0]) / 2, abs=0.02)
    assert abs(name.x - mark) < 10
    bars = [r for r in drawing.rectangles if r.height == 18][:8]
    assert [bar.width > 1 for bar in bars] == [True] * 3 + [False] * 2 + [True] * 3
    assert bars[0].fill == bars[1].fill != bars[2].fill
    assert bars[5].fill != bars[6].fill == bars[7].fill  # rank 1 alone, ranks 2 and 3 together
    assert bars[4].fill == bars[3].fill  # outside


def test_a_phase_without_a_step_is_refused(tmp_path):
    phases = [Phase(4, {}, {}), Phase(0, {}, {})]
    with pytest.raises(ValueError, match=r"every phase must have a step, got \[4, 0\]"):
        write_phased_training_picture(tmp_path / "picture.svg", [4.0, 3.0, 2.0, 1.0], phases=phases)
    assert list(tmp_path.iterdir()) == []


def test_folders_are_made_and_tensors_are_losses(tmp_path):
    path = write_training_picture(
        tmp_path / "a" / "b.svg", list(torch.tensor([3.0, 2.0])), shares={}, specs={}
    )
    assert read(path.read_text(encoding="utf-8")).lines


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.booleans())
def test_any_losses_give_a_well_formed_picture_or_the_error(tmp_path_factory, losses, log_scale):
    folder = tmp_path_factory.getbasetemp()
    arguments = {"shares": {}, "specs": {}, "log_scale": log_scale}
    if not any(math.isfinite(loss) and (loss > 0 or not log_scale) for loss in losses):
        with pytest.raises(ValueError, match="no loss to draw"):
            draw(folder, losses, losses[:2], **arguments)
        return
    drawing = draw(folder, losses, losses[:2], **arguments)
    for x, y in [point for line in drawing.lines for point in line] + drawing.circles:
        assert 0 <= x <= drawing.width
        assert 0 <= y <= drawing.height


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_nice_ticks_are_few_round_and_within(low, extent, num):
    high = low + extent
    ticks = nice_ticks(low, high, num)
    assert len(ticks) <= num + 1
    assert len(ticks) >= num / 3 - 1
    assert all(low - extent * 1e-6 <= tick <= high + extent * 1e-6 for tick in ticks)
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert steps == pytest.approx(
        steps[:1] * len(steps), abs=1e-9 * max(map(abs, ticks), default=0)
    )


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e4))
def test_log_ticks_are_rising_and_within(low, factor):
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(set(ticks))
    assert all(low * (1 - 1e-6) <= tick <= low * factor * (1 + 1e-6) for tick in ticks)
    assert len(ticks) >= 2
