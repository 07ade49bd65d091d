"""Which line of the user's program called."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch


#: Folders whose code is not the user's.
_LIBRARIES = tuple(
    str(folder) for folder in (Path(__file__).parent.parent, Path(torch.__file__).parent)
)


def calling_line() -> str:
    """Return ``file:line`` of the innermost frame outside hdtensor and torch, "backward" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"
