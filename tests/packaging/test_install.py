"""hdtensor as other programs get it: from a wheel, and from an editable install.

Each install goes to a folder of its own and is used by a fresh interpreter that sees that folder and
the packages hdtensor depends on, but neither this repository nor the install of the running tests.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent.parent
SOURCES = ("hdtensor", "triton_kernels", "pyproject.toml", "setup.py", "LICENSE")
EDITABLE = "from setuptools import build_meta; build_meta.build_editable({folder!r})"
IMPORT = """
import importlib, json, site, sys
for folder in json.loads(sys.argv[1]):
    site.addsitedir(folder)  # runs the .pth file of an editable install
sys.path.append(sys.argv[2])  # dependencies: their folder, without its .pth files
found = {}
for name in sys.argv[3:]:
    try:
        found[name] = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        found[name] = f"ModuleNotFoundError: {error.name}"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what the build reads: building leaves traces beside its sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", str(sources), "--no-build-isolation", "--wheel-dir", str(folder))
    (path,) = folder.glob("*.whl")
    return path


def _pip(command, *options):
    _run(sys.executable, "-m", "pip", "-q", command, "--no-deps", "--no-index", *options)


def _run(*command, cwd=None):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _import(*modules, folders, cwd):
    """Import ``modules`` where only ``folders`` are installed; return the file of each."""
    dependencies = sysconfig.get_path("purelib")
    arguments = [json.dumps([str(folder) for folder in folders]), dependencies, *modules]
    # -I -S: neither this repository nor this environment's own hdtensor is in sight
    return json.loads(_run(sys.executable, "-I", "-S", "-c", IMPORT, *arguments, cwd=cwd))


def _modules_in(folder, package):
    return {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}


def test_wheel_holds_every_module_under_its_installed_name(wheel, sources):
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert {name for name in files if name.endswith(".py")} == {
        *_modules_in(sources / "hdtensor", "hdtensor"),
        *_modules_in(sources / "triton_kernels", "hdtensor/triton_kernels"),
    }
    assert "hdtensor/py.typed" in files
    assert {name.split("/")[0] for name in files} == {"hdtensor"}


def test_wheel_leaves_the_name_triton_kernels_to_others(wheel, tmp_path):
    site, others = tmp_path / "site", tmp_path / "others"
    _pip("install", "--target", str(site), str(wheel))
    (others / "triton_kernels").mkdir(parents=True)
    (others / "triton_kernels" / "__init__.py").write_text("")

    modules = ("hdtensor", "hdtensor.triton_kernels", "triton_kernels")
    for folders in ([site, others], [others, site]):
        found = _import(*modules, folders=folders, cwd=tmp_path)

        assert found == {
            "hdtensor": str(site / "hdtensor" / "__init__.py"),
            "hdtensor.triton_kernels": str(site / "hdtensor" / "triton_kernels" / "__init__.py"),
            "triton_kernels": str(others / "triton_kernels" / "__init__.py"),
        }


def test_editable_install_maps_the_kernels_and_exposes_nothing_else(sources, tmp_path):
    build, site = tmp_path / "build", tmp_path / "site"
    build.mkdir()
    _run(sys.executable, "-c", EDITABLE.format(folder=str(build)), cwd=sources)
    (path,) = build.glob("*.whl")
    _pip("install", "--target", str(site), str(path))
    modules = ("hdtensor", "hdtensor.placements", "hdtensor.triton_kernels", "triton_kernels")

    found = _import(*modules, folders=[site], cwd=tmp_path)

    assert found == {
        "hdtensor": str(sources / "hdtensor" / "__init__.py"),
        "hdtensor.placements": str(sources / "hdtensor" / "placements" / "__init__.py"),
        "hdtensor.triton_kernels": str(sources / "triton_kernels" / "__init__.py"),
        "triton_kernels": "ModuleNotFoundError: triton_kernels",
    }
