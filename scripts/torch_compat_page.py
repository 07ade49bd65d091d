"""Write docs/torch_compat.md from the table in hdtensor/_torch_names.py, and look for private names that lack a row.

Run ``python scripts/torch_compat_page.py`` after a change there; a test compares.
"""

import ast
import re
import sys
from pathlib import Path

from hdtensor import _torch_names
from hdtensor._torch_names import PRIVATE_NAMES, TESTED_VERSIONS


ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "torch_compat.md"
SOURCES = [ROOT / "hdtensor" / name for name in ("_torch_compat.py", "_torch_compilers.py")]

_HEAD = """\
# Private names of torch

Written by `scripts/torch_compat_page.py` from the table in `hdtensor/_torch_names.py`. The only files that use
private names of torch are `hdtensor/_torch_compat.py` and, for compiled programs, `hdtensor/_torch_compilers.py` (`scripts/check_private_torch.py` checks it). The test suite passes on torch {tested}.
Importing hdtensor looks all of them up, compiling those of compilers; a torch without one is refused by one `TorchVersionError`.

The two releases differ in one name: `register_opaque_type` became `register_custom_class` in 2.14, where the old one logs a
warning. They differ more in DTensor's rules; where a rule got narrower, `hdtensor/ops/special/` has
one for all releases: copies of pending products and norms (`copies.py`), `any` and `all` (`reductions.py`), and
in-place operators whose rule would change the layout of what they write to (`ops/writes.py`).

What 2.14 alone has works there: `maximize` of LBFGS, `linalg.polar` and `linalg.matrix_sqrth`. `t.data = other` in a compiled
function is another operator there, and refused alike. Compiled DTensors have torch 2.14.1 log that `is_opaque_value`, which
it calls itself, is deprecated; compiled HDTensors do not.

| name | what for | kept its place over |
|---|---|---|
"""


def page() -> str:
    """Return what docs/torch_compat.md must be."""
    head = _HEAD.format(tested=" and ".join(TESTED_VERSIONS))
    rows = [f"| `{row.name}` | {row.why} | {row.versions} |" for row in PRIVATE_NAMES]
    return head + "\n".join(rows) + "\n"


def private_names() -> set[str]:
    """Return the private parts of all names of torch that the sources import or read."""
    return set().union(*(_private_names(path.read_text(encoding="utf-8")) for path in SOURCES))


def _private_names(source: str) -> set[str]:
    found = set()
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {
        t.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign)
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hdtensor"):
            continue
        if isinstance(node, ast.ImportFrom):
            parts = f"{node.module}.".split(".") + [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and not _is_self(node.value):
            parts = [node.attr]
        elif isinstance(node, ast.keyword) and node.arg:
            parts = [node.arg]
        else:
            continue
        found |= {part for part in parts if re.match(r"_(?!_)", part) and part not in own}
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def missing_rows() -> list[str]:
    """Return the private names that no row speaks of."""
    known = {part for row in PRIVATE_NAMES for part in re.split(r"[^\w]+", row.name)}
    return sorted(private_names() - known)


def unused_rows() -> list[str]:
    """Return the rows whose name the sources do not use."""
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    return [row.name for row in PRIVATE_NAMES if re.findall(r"\w+", row.name)[-1] not in code]


def main() -> int:
    """Write the page; return 1 where a name has no row, or a row no name."""
    wrong = [f"{name}: no row in {_torch_names.__name__}" for name in missing_rows()]
    wrong += [f"{name}: a row in {_torch_names.__name__}, but not used" for name in unused_rows()]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    PAGE.write_text(page(), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
