"""Run a static tool where the packages lie as they are installed.

mypy and import-linter read folders and know nothing of the mapping in setup.py. This script makes a
temporary folder ``hdtensor`` out of links to the entries of the repository's ``hdtensor/``, with
``triton_kernels/`` among them, and runs the tool there. The paths in the tool's report are those of
the repository, except that kernels show as ``hdtensor/triton_kernels/...``.

    python scripts/installed_view.py mypy
    python scripts/installed_view.py lint-imports
"""

import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
SETTINGS = str(ROOT / "pyproject.toml")
COMMANDS = {
    "mypy": ["mypy", "--config-file", SETTINGS, "--cache-dir", str(ROOT / ".mypy_cache")],
    "lint-imports": ["lint-imports", SETTINGS, "--cache-dir", str(ROOT / ".import_linter_cache")],
}


def link_packages(view: Path) -> None:
    """Fill ``view`` with the packages under their installed names."""
    package = view / "hdtensor"
    package.mkdir()
    for entry in (ROOT / "hdtensor").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    (package / "triton_kernels").symlink_to(ROOT / "triton_kernels")


def main() -> int:
    """Run the tool that the command line names; return its exit status."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: installed_view.py {{{','.join(COMMANDS)}}} [options of the tool]")
    program, *options = COMMANDS[sys.argv[1]]
    executable = str(Path(sys.executable).parent / program)
    with tempfile.TemporaryDirectory(prefix="hdtensor-view-") as view:
        link_packages(Path(view))
        command = [executable, *options, *sys.argv[2:]]
        return subprocess.run(command, cwd=view, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
