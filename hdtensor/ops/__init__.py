"""Operators on ``HDTensor``s: two-tier deduction, records, dispatch."""

from hdtensor.ops import special


__all__ = ["special"]
