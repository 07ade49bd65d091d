"""``redistribute``: a pure plan (``resolve``), and what carries it out (``simulate``, ``execute``).

``execute`` is imported from its own module: this package can be had without process groups.
"""

from hdtensor.redistribute.explain import explain
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.simulate import simulate
from hdtensor.redistribute.steps import (
    RedistributePlan,
)


__all__ = ["RedistributePlan", "explain", "resolve", "simulate"]
