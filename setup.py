"""The package list; everything else about the build is in pyproject.toml.

``triton_kernels/`` lies at the top of the repository and installs as ``hdtensor.triton_kernels``. The
explicit mapping does that in wheels. In editable installs it also makes setuptools choose its import
finder, which knows the mapping, and not a path entry for this folder, which would expose ``tests`` and
a top-level ``triton_kernels`` to every program.
"""

from setuptools import find_packages, setup


KERNELS = "hdtensor.triton_kernels"

setup(
    packages=[
        *find_packages(include=["hdtensor", "hdtensor.*"]),
        KERNELS,
        *(f"{KERNELS}.{name}" for name in find_packages("triton_kernels")),
    ],
    package_dir={KERNELS: "triton_kernels"},
)
