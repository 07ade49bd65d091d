import pytest

from scripts import draw_figures
from tests.debug.documents import read


@pytest.mark.parametrize("name", draw_figures.FIGURES)
def test_the_figure_in_docs_is_what_the_code_draws(name):
    drawn = draw_figures.FIGURES[name]()
    read(drawn)
    kept = (draw_figures.FOLDER / name).read_text(encoding="utf-8")
    assert kept == drawn, f"run: python scripts/draw_figures.py  ({name} is out of date)"


def test_no_figure_in_docs_is_without_its_drawing():
    assert {path.name for path in draw_figures.FOLDER.glob("*.svg")} == set(draw_figures.FIGURES)
