import re

import pytest
import torch
from hypothesis import given

from hdtensor import distribute_tensor
from hdtensor._rank import as_rank
from hdtensor._torch_compat import StridedShard
from hdtensor.debug import visualize
from hdtensor.debug.regions import idle_ranks, regions
from hdtensor.errors import SpecError
from hdtensor.placements import HDSpec, Subgroup
from hdtensor.placements.layout import owned_boxes
from tests.placements.strategies import cut_tensors


def picture(text, shape, top_sizes=None):
    """The drawing or table alone, without heading and notes."""
    lines = visualize(HDSpec.from_text(text), shape, top_sizes).splitlines()[2:]
    return "\n".join(line for line in lines if not re.match(r"op\(|no element:", line))


def fields(lines):
    """The texts in the closed fields of a drawing, found by filling each from a point inside."""
    width = max(map(len, lines))
    grid = [list(line.ljust(width)) for line in lines]
    walls = {(i, j) for i, row in enumerate(grid) for j, c in enumerate(row) if c in "+-|"}
    dashes = {(i, j) for i, j in walls if grid[i][j] == "-"}
    # A '-' of a label such as 0-3 stands between digits.
    walls -= {(i, j) for i, j in dashes if not {grid[i][j - 1], grid[i][j + 1]} & {"+", "-"}}
    left = min(j for _, j in walls)
    top = min(i for i, _ in walls)
    seen, texts = set(walls), []
    for start in ((i, j) for i in range(top, len(grid)) for j in range(left, width)):
        if start in seen:
            continue
        area, queue = set(), [start]
        while queue:
            i, j = queue.pop()
            if (i, j) in seen or not (0 <= i < len(grid) and 0 <= j < width):
                continue
            seen.add((i, j))
            area.add((i, j))
            queue += [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)]
        texts.append("".join(grid[i][j] for i, j in sorted(area)).strip())
    return texts


@given(cut_tensors(min_dims=1, max_dims=2, max_size=5, max_subgroups=3))
def test_each_field_of_a_drawing_is_a_region(cut):
    spec, shape, top_sizes = cut
    lines = visualize(spec, shape, top_sizes).splitlines()
    parts = regions(spec, shape, top_sizes)
    drawing = [line for line in lines[2:] if re.match(r" *\d* *[+|]", line)]
    if "across" in lines[1]:
        assert sorted(fields(drawing)) == sorted(part.label for part in parts)
    else:
        assert not drawing


@given(cut_tensors(max_size=5))
def test_a_picture_names_its_spec_shape_and_idle_ranks(cut):
    spec, shape, top_sizes = cut
    lines = visualize(spec, shape, top_sizes).splitlines()
    assert lines[0] == str(spec)
    assert lines[1].startswith(f"shape {list(shape)}")
    if top_sizes is not None:
        assert f"subgroups hold {' + '.join(map(str, top_sizes))} of dim {spec.hdim}" in lines[1]
    idle = idle_ranks(spec, regions(spec, shape, top_sizes))
    assert bool(idle) == lines[-1].startswith("no element: rank")
    assert all(line == line.rstrip() for line in lines)


@given(cut_tensors(min_dims=3, max_size=5))
def test_a_table_lists_every_region_as_an_index(cut):
    spec, shape, top_sizes = cut
    rows = re.findall(r"^(\[.*\]) +(\S.*)$", visualize(spec, shape, top_sizes), re.MULTILINE)
    full = torch.zeros(shape)
    parts = regions(spec, shape, top_sizes)
    assert [label for _, label in rows] == [part.label for part in parts]
    for (index, _), part in zip(rows, parts, strict=True):
        slices = [
            slice(*map(int, piece.split(":"))) if piece != ":" else slice(None)
            for piece in index[1:-1].split(", ")
        ]
        assert tuple(full[tuple(slices)].shape) == part.box.shape
        assert [s.indices(n)[0] for s, n in zip(slices, shape, strict=True)] == list(part.box.start)


PICTURES = [
    (
        "S0[3:1] / 0,1:S1 2:R",
        (4, 4),
        """\
  0   2   4
0 +---+---+
  |   |   |
  | 0 | 1 |
  |   |   |
3 +---+---+
  |   2   |
4 +-------+""",
    ),
    (
        "S1[1:3] / 0,1:S0 2:R",
        (4, 4),
        """\
  0   1         4
0 +---+---------+
  | 0 |         |
2 +---+    2    |
  | 1 |         |
4 +---+---------+""",
    ),
    (
        "R / 0,1:S1 2:R",
        (2, 4),
        """\
  0     2     4
0 +-----+-----+
  | 0,2 | 1,2 |
2 +-----+-----+""",
    ),
    (
        "S0 / 0-3(2x2):S0,R 4,5:P(max)",
        (7, 3),
        """\
  0          3
0 +----------+
  |   0,1    |
2 +----------+
  |   2,3    |
4 +----------+
  | max(4,5) |
  |          |
7 +----------+""",
    ),
    (
        "R / 0-3(2x2):S0x2,S0",
        (8,),
        """\
0   2   4   6   8
+---+---+---+---+
| 0 | 2 | 1 | 3 |
+---+---+---+---+""",
    ),
    (
        "S0[2:3:0:5] / 0:R 1:R 2:R 3:R",
        (10,),
        """\
0   2    5        10
+---+----+--------+
| 0 | 1  |   3    |
+---+----+--------+""",
    ),
    (
        "S0[5:3] / 0,1:S2 2:R",
        (16, 7, 64),
        """\
slice             ranks
[0:10, :, 0:32]   0
[0:10, :, 32:64]  1
[10:16, :, :]     2""",
    ),
    ("R / 0:R 1,2:P", (), "slice  ranks\n[]     0, sum(1,2)"),
    ("S0 / 0:R 1:R", (0, 4), "(no elements)"),
]


@pytest.mark.parametrize(("text", "shape", "expected"), PICTURES, ids=[p[0] for p in PICTURES])
def test_pictures(text, shape, expected):
    assert picture(text, shape) == expected


def test_exact_extents_are_drawn():
    spec = HDSpec.from_text("S0 / 0:R 1:R")
    assert picture("S0 / 0:R 1:R", (4, 4), (1, 3)).splitlines()[3].startswith("1 +")
    assert "subgroups hold 1 + 3 of dim 0" in visualize(spec, (4, 4), (1, 3))


def test_notes_explain_reductions_only_where_there_are_some():
    assert "each rank holds one term, to be reduced." in visualize(
        HDSpec.from_text("R / 0,1:P"), (2,)
    )
    assert "hold the same term" in visualize(HDSpec.from_text("P / 0,1:R 2:R"), (2,))
    assert "term" not in visualize(HDSpec.from_text("R / 0,1:R 2:R"), (2,))


def test_a_drawing_that_would_be_too_large_is_a_table():
    assert "slice" in visualize(HDSpec.from_text("R / 0-63:S1"), (4, 640))
    assert "slice" in visualize(HDSpec.from_text("R / 0-63:S0"), (640, 4))
    drawn = visualize(HDSpec.from_text("R / 0-15:S1"), (4, 16)).splitlines()
    assert "slice" not in drawn[2]
    assert max(map(len, drawn)) <= 104


def test_a_long_thin_part_keeps_the_drawing_readable():
    drawn = picture("S0 / 0:R 1:R", (1001, 8), (1, 1000)).splitlines()
    assert len(drawn) < 15
    assert [line.split()[0] for line in drawn if "+" in line] == ["0", "1", "1001"]


def test_any_process_sees_the_same_picture():
    """Symptom of pytorch 108746: only 1-D and 2-D, only members, only the first rank."""
    spec = HDSpec.from_text("S0[3:1] / 0,1:S1 2:R")
    views = set()
    for rank in range(5):
        with as_rank(rank):
            views.add(visualize(spec, (4, 4)))
    assert len(views) == 1
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "message"),
    [
        ("S2 / 0:R 1:R", (4, 4), None, "needs dim 2"),
        ("R / 0,1:S2", (4, 4), None, "has 2 dims"),
        ("S0 / 0:R 1:R", (4, 4), (3, 2), "add up to 4"),
        ("S0 / 0:R 1:R", (4, -4), None, "sizes >= 0"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(text, shape, sizes, message):
    with pytest.raises(SpecError, match=message):
        visualize(HDSpec.from_text(text), shape, sizes)


@given(cut_tensors(min_dims=3, max_size=4))
def test_every_element_of_a_table_is_with_the_ranks_that_hold_it(cut):
    """Case 46, for any number of dims: each element is in one slice, whose ranks are those that own it."""
    spec, shape, top_sizes = cut
    rows = re.findall(r"^(\[.*\]) +(\S.*)$", visualize(spec, shape, top_sizes), re.MULTILINE)
    times = torch.zeros(shape, dtype=torch.int)
    held = torch.zeros((16, *shape), dtype=torch.bool)
    for index, label in rows:
        box = tuple(
            slice(*map(int, piece.split(":"))) if piece != ":" else slice(None)
            for piece in index[1:-1].split(", ")
        )
        times[box] += 1
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", label):
            held[(slice(int(first), int(last or first) + 1), *box)] = True
    assert bool((times == 1).all())
    for rank in range(16):
        want = torch.zeros(shape, dtype=torch.bool)
        for owned in owned_boxes(spec, shape, top_sizes, rank) if rank in spec.ranks else ():
            want[owned.box.slices_from((0,) * len(shape))] = True
        assert torch.equal(held[rank], want)


def test_a_strided_shard_is_several_slices():
    spec = HDSpec((Subgroup((0, 1), (StridedShard(0, split_factor=2),)),))
    assert visualize(spec, (8, 2, 3)).splitlines()[2:] == [
        "slice        ranks",
        "[0:2, :, :]  0",
        "[2:4, :, :]  1",
        "[4:6, :, :]  0",
        "[6:8, :, :]  1",
    ]


def test_a_tensor_tells_its_own_layout():
    spec = HDSpec.from_text("S0[3:1] / 0,1:S1 2:R")
    views = set()
    for rank in range(4):
        with as_rank(rank):
            x = distribute_tensor(torch.zeros(6, 4), spec, top_sizes=(5, 1), src_data_rank=None)
            views.add(visualize(x))
            assert visualize(x.sum(1)) == visualize("S0[3:1] / 0,1:P 2:R", (6,), (5, 1))
    assert views == {visualize(spec, (6, 4), (5, 1))}


def test_a_shape_is_asked_for_once():
    with pytest.raises(SpecError, match=r"needs the shape .*visualize\(spec, shape\)"):
        visualize("R / 0:R")
    with as_rank(0):
        x = distribute_tensor(torch.zeros(2), "R / 0:R", src_data_rank=None)
    with pytest.raises(SpecError, match="Pass the tensor alone"):
        visualize(x, (2,))
