"""Pictures of plans: every message and collective is drawn, and nothing leaves its page."""

import itertools

import pytest
import torch
from hypothesis import given, settings

from hdtensor.debug import canvas, transfer_svg, write_transfer_picture
from hdtensor.debug.transfers import MAX_LINES
from hdtensor.errors import SpecError, TopologyError
from hdtensor.redistribute import resolve
from hdtensor.redistribute.cost import cost
from hdtensor.redistribute.topology import Topology
from tests.debug.documents import read
from tests.redistribute.strategies import any_pairs, layout_pairs, moved_pairs


TWO_NODES = Topology.of_nodes(8, 16)


def plan_of(src, dst):
    return resolve(
        src.spec, dst.spec, src.shape, src_top_sizes=src.top_sizes, dst_top_sizes=dst.top_sizes
    )


def check_page(drawing):
    for rectangle in drawing.rectangles:
        assert rectangle.x >= 0
        assert rectangle.y >= 0
        assert rectangle.x + rectangle.width <= drawing.width
        assert rectangle.y + rectangle.height <= drawing.height
    points = [point for line in drawing.lines for point in line] + drawing.circles
    for x, y in points:
        assert 0 <= x <= drawing.width
        assert 0 <= y <= drawing.height
    for text in drawing.texts:
        assert 0 <= text.x <= drawing.width
        assert 0 <= text.y <= drawing.height


def arrows(drawing):
    """(x from, x to) of each level line that has a head at its end."""
    heads = {line[1] for line in drawing.lines if len(line) == 3}
    return [
        (line[0][0], line[1][0])
        for line in drawing.lines
        if len(line) == 2 and line[0][1] == line[1][1] and line[1] in heads
    ]


def column_of(drawing, first, last):
    """Rank -> x of its line, from the bold numbers of one step."""
    return {
        int(text.value): text.x
        for text in drawing.texts
        if text.bold and text.value.isdigit() and first < text.y < last
    }


@settings(max_examples=60)
@given(layout_pairs() | any_pairs() | moved_pairs())
def test_every_plan_has_a_picture_within_its_page(pair):
    plan = plan_of(*pair)
    drawing = read(transfer_svg(plan))
    check_page(drawing)
    assert f"{plan.src} -> {plan.dst}" in drawing.values
    messages = {
        (i, t.src, t.dst)
        for i, step in enumerate(plan.steps)
        for t in getattr(step, "transfers", ())
        if t.src != t.dst and t.box.numel
    }
    if len({*plan.src.ranks, *plan.dst.ranks}) <= MAX_LINES:
        assert len(arrows(drawing)) == len(messages)


def test_arrows_go_from_sender_to_receiver():
    plan = resolve("S0 / 1,2:R 9:R", "R / 1,3-5:S0 8:R", (8, 4), topology=TWO_NODES)
    drawing = read(transfer_svg(plan, topology=TWO_NODES))
    x_of = column_of(drawing, 0, drawing.height)
    assert list(x_of) == [1, 2, 3, 4, 5, 8, 9]
    rank_at = {x: rank for rank, x in x_of.items()}
    drawn = [(rank_at[a], rank_at[b]) for a, b in arrows(drawing)]
    assert drawn == [(1, 3), (1, 8), (2, 8), (9, 4), (9, 5), (9, 8)]
    assert "[4:8, 0:4], 64 bytes over nvlink" in drawing.values
    assert "stays on rank 1: 32 bytes" in drawing.values
    assert {"nvlink: 96 bytes", "ib: 128 bytes"} <= set(drawing.values)


def test_a_collective_is_a_line_through_its_ranks():
    drawing = read(transfer_svg(resolve("P / 0,1:R 2:R", "R / 0,1:R 2:R", (4,))))
    x_of = column_of(drawing, 0, drawing.height)
    assert [x for x, _ in drawing.circles] == [x_of[0], x_of[1], x_of[2]]
    assert "all-reduce sum of ranks 0-2 (no term from 1): [0:4]" in drawing.values
    assert arrows(drawing) == []


def test_steps_have_titles_in_their_order():
    drawing = read(transfer_svg(resolve("P / 0,1:P 2:R", "S0 / 0,1:S1 2:R", (4, 4))))
    titles = [text for text in drawing.texts if text.bold and text.value[:2] in ("1.", "2.")]
    assert [text.value for text in titles] == [
        "1. bottom step in subgroup 0 along mesh axis 0, 0,1:P -> 0,1:S1",
        "2. SplitReduceScatter, top P -> S0",
    ]
    assert titles[0].y < titles[1].y
    assert drawing.values.count("64 bytes sent, about 3.2 ns") == 2


def test_what_is_local_is_drawn_too():
    values = read(transfer_svg(resolve("S0 / 0:R 1:R", "P / 0:R 1:R", (2,)))).values
    assert "nothing is sent" in values
    values = read(transfer_svg(resolve("R / 0:R 1:R", "P / 0:R 1:R", (2,)))).values
    assert {"stays on rank 0", "filled with 0: rank 1"} <= set(values)
    values = read(transfer_svg(resolve("R / 0:R", "P / 1,2:R 3:R", (2,)))).values
    assert "filled with 0: rank 3" in values
    same = resolve("R / 0:R", "R / 0:R", ())
    assert "[] of float32: every rank keeps its local tensor" in read(transfer_svg(same)).values


LARGE = [
    ("S0 / 0-15:S1 16-23:R", "R / 0-7:S0 24-47:S1"),
    ("P / 0-23:S1 24-47:S1", "R / 0-23:S1 24-47:S1"),
    ("R / 0-47:S0", "R / 0-47:S1"),
    ("R / 0-47:P", "R / 0-47:R"),
    ("R / 0-8:S0", "R / 9:R"),
]


@pytest.mark.parametrize(("src", "dst"), LARGE)
def test_many_ranks_are_a_matrix(src, dst):
    plan = resolve(src, dst, (480, 480))
    flows = list(cost(plan, itemsize=4).flows())
    drawing = read(transfer_svg(plan))
    check_page(drawing)
    assert arrows(drawing) == []
    fields = [r for r in drawing.rectangles if r.width == r.height and 12 < r.width < 60]
    assert len(fields) == len(flows)
    senders = sorted({flow.src for flow in flows})
    rows = sorted({round(field.y, 1) for field in fields})
    assert len(rows) == len(senders)
    columns = sorted({round(field.x, 1) for field in fields})
    assert len(columns) == len({flow.dst for flow in flows})
    assert {"to rank", "from", "sent", "received"} <= set(drawing.values)


def test_fields_with_room_show_their_bytes():
    values = read(transfer_svg(resolve("R / 0-8:S0", "R / 9:R", (9, 1 << 18)))).values
    assert values.count("1M") == 9 + 9  # each field, and what each rank sent
    assert "9 MiB sent, about 944 us" in values


def test_labels_of_a_chart_do_not_overlap():
    plan = resolve("R / 0-7:S0", "R / 0-7:S1", (64, 64))
    plan_by_messages = resolve("R / 0-7:S0", "R / 1,0,3,2,5,4,7,6:S1", (64, 64))
    for picture in map(transfer_svg, (plan, plan_by_messages)):
        drawing = read(picture)
        labels = [t for t in drawing.texts if not t.bold and ("over any" in t.value)]
        for one, two in itertools.pairwise(sorted(labels, key=lambda text: text.y)):
            assert two.y - one.y >= 14
        x_of = column_of(drawing, 0, drawing.height)
        for text in labels[1:]:
            assert text.x > max(x_of.values())
            assert text.x + canvas.text_width(text.value, 11) <= drawing.width


def test_writing_a_file(tmp_path):
    plan = resolve("R / 0:R", "R / 1:R", (4,))
    path = write_transfer_picture(tmp_path / "a" / "plan.svg", plan, dtype=torch.int8, title="<m>")
    assert path == tmp_path / "a" / "plan.svg"
    drawing = read(path.read_text(encoding="utf-8"))
    assert {"<m>", "[0:4], 4 bytes over any"} <= set(drawing.values)


def test_wrong_arguments():
    plan = resolve("R / 0:R", "R / 5:R", (4,))
    with pytest.raises(SpecError, match="one name per dim"):
        transfer_svg(plan, dim_names=("a", "b"))
    with pytest.raises(TopologyError, match="not 5"):
        transfer_svg(plan, topology=Topology.of_nodes(2, 4))
