"""The table of private names of torch: complete, true of the installed torch, and shown in the documentation."""

import importlib
import re

import pytest

from hdtensor._torch_names import PRIVATE_NAMES, TESTED_VERSIONS
from scripts import torch_compat_page


def _find(path):
    """Import as much of a dotted path as is a module, and read the rest."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("row", PRIVATE_NAMES, ids=lambda row: row.name.split(" ")[0])
def test_every_name_is_where_the_table_says(row):
    assert _find(row.name.split(" ")[0]) is not None
    assert re.fullmatch(r"2\.\d+-2\.\d+", row.versions)
    assert row.why


def test_every_private_name_in_use_has_a_row_and_every_row_is_used():
    assert torch_compat_page.missing_rows() == []
    assert torch_compat_page.unused_rows() == []
    assert {"_dtensor__new__", "_init_backend", "_MaskPartial", "_op_schema"} <= (
        torch_compat_page.private_names()
    )


def test_the_page_is_written_from_the_table():
    kept = torch_compat_page.PAGE.read_text(encoding="utf-8")
    assert kept == torch_compat_page.page(), "run: python scripts/torch_compat_page.py"
    assert all(version in kept for version in TESTED_VERSIONS)
