import doctest
from pathlib import Path


def test_the_examples_of_the_documentation_print_what_it_says():
    page = Path(__file__).parents[2] / "docs" / "redistribute.md"

    # Markdown's fences end each example.
    results = doctest.testfile(str(page), module_relative=False)

    assert results.attempted > 8
    assert results.failed == 0
