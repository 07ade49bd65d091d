"""The table of private names of torch: complete, true of the installed torch, and shown in the documentation."""

import re
import subprocess
import sys

import pytest

from hdtensor._torch_names import (
    PRIVATE_NAMES,
    TESTED_VERSIONS,
    PrivateName,
    require_names,
)
from hdtensor.errors import TorchVersionError
from scripts import torch_compat_page


@pytest.mark.parametrize("row", PRIVATE_NAMES, ids=lambda row: row.name.split(" ")[0])
def test_every_name_is_where_the_table_says(row):
    assert row.missing() == []
    assert re.fullmatch(r"2\.\d+-2\.\d+", row.versions)
    assert row.why


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("torch._C._gone", ["torch._C._gone"]),
        ("torch.nn._gone.modules", ["torch.nn._gone.modules"]),
        ("torch.nn -> Linear, _gone, _lost or ReLU", ["torch.nn._gone"]),
        ("torch.nn -> _gone or _lost (holds _more)", ["torch.nn._gone or _lost"]),
        ("torch._functorch._aot_autograd.runtime_wrappers", []),
    ],
)
def test_a_name_that_torch_lacks_is_told(name, missing):
    row = PrivateName(name, "to show an error", "2.13-2.14")

    assert row.missing() == missing
    if missing:
        with pytest.raises(TorchVersionError) as error:
            require_names([PRIVATE_NAMES[0], row])
        assert f"{missing[0]} (to show an error)" in str(error.value)
        assert PRIVATE_NAMES[0].name not in str(error.value)
        assert all(version in str(error.value) for version in TESTED_VERSIONS)


def _python(code):
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_import_prints_nothing():
    done = _python("import hdtensor")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_with_a_torch_that_lacks_names_is_one_error():
    done = _python(
        "import torch; del torch.library._register_effectful_op, torch._dynamo.maybe_mark_dynamic\n"
        "try: import hdtensor\n"
        "except ImportError as error: print(error)"
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(
        r"torch \S+ lacks private names that this hdtensor uses: torch.library._register_effectful_op \(.*\); "
        r"torch._dynamo.maybe_mark_dynamic \(.*\)\. It is tested with torch .*: install one of these",
        done.stdout,
    )


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
