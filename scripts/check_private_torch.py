"""Fail if a module of hdtensor other than ``_torch_compat.py`` and ``_torch_compilers.py`` imports a private torch name.

Private is every import of ``torch`` with an underscored part in its dotted path:
``import torch._inductor``, ``from torch._C import x``, ``from torch.distributed.tensor import _api``.
Attributes of the public package, such as ``torch._foreach_add_``, are calls and not imports.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
EXEMPT = [ROOT / "hdtensor" / name for name in ("_torch_compat.py", "_torch_compilers.py")]


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything that ``tree`` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_private(name: str) -> bool:
    """Whether ``name`` is a private part of torch.

    >>> [is_private(n) for n in ("torch._C._dist", "torch.nn", "torch.x._y", "torchft._a")]
    [True, False, True, False]
    """
    package, *parts = name.split(".")
    return package == "torch" and any(
        part.startswith("_") and part != "__version__" for part in parts
    )


def main() -> int:
    """Print each private import with its place; return the exit status."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}; import it in hdtensor/_torch_compat.py"
        for path in sorted((ROOT / "hdtensor").rglob("*.py"))
        if path not in EXEMPT
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")))
        if is_private(name)
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
