"""docs/paper_map.md: every file, name and test that it points to exists."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
ROWS = [
    re.split(r"(?<!\\) \| ", line.strip("| "))
    for line in (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| paper |")
]
#: A file, and what follows it in parentheses.
REFERENCE = re.compile(r"`([\w/]+\.py)`(?: \(([^)]*)\))?")


def find(name):
    """Return a file that is named from the root, or from the package."""
    return next((p for p in (ROOT / name, ROOT / "hdtensor" / name) if p.is_file()), None)


def test_the_page_has_rows_of_four_cells():
    assert len(ROWS) > 30
    assert {len(row) for row in ROWS} == {4}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_row_points_to_exists(row):
    paper, _, code, tests = row
    references = REFERENCE.findall(code) + REFERENCE.findall(tests)
    assert code == "the same" or REFERENCE.search(code) or "DTensor" in code, paper
    assert "tests/" in tests or "the same" in tests, paper
    for name, remark in references:
        path = find(name)
        assert path is not None, f"{paper}: {name} does not exist"
        text = path.read_text(encoding="utf-8")
        for identifier in re.findall(r"`(\w+)`", remark):
            assert re.search(rf"\b{identifier}\b", text), f"{paper}: {name} has no {identifier}"
            if identifier.startswith("test_"):
                assert f"def {identifier}(" in text, f"{paper}: {name} has no test {identifier}"
