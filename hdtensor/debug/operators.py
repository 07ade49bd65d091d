"""A record of each operator that runs on ``HDTensor``s, for the errors of ``HDTENSOR_DEBUG=2``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hdtensor.tensor import HDTensor


def log_operators(note: Callable[[str], None]) -> None:
    """Call ``note`` with each operator, its operands and the line that called it, from now on.

    The type's dispatch function is replaced, so that programs which do not ask for it pay nothing. Modules that run as
    a region, on plain tensors, are one event to nobody: their operators do not come here.
    """
    dispatch = HDTensor.__torch_dispatch__

    def logged(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        shapes = ", ".join(f"{x._spec}" for x in args if isinstance(x, HDTensor))
        note(f"{func}({shapes})")
        return dispatch(func, types, args, kwargs)

    HDTensor.__torch_dispatch__ = staticmethod(logged)
