"""Which module is running, in forward and in backward, without hooks on gradients.

autograd numbers the nodes it makes in one rising sequence. A module's nodes are those numbered while it runs, so the
number of the node that backward is at tells whose it is.
"""

from __future__ import annotations

import bisect
import functools
from types import TracebackType
from typing import Any

from torch import nn

from hdtensor._torch_compat import node_in_backward, number_of_next_node


class ModuleTracker:
    """Follows a model's modules while it is entered.

    Args:
        model: Whose modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[str] = []
        self._starts: list[int] = []  # rising numbers of nodes
        self._owners: list[str] = []  # who made the nodes from there on
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleTracker:
        for path, module in self._model.named_modules():
            if hasattr(module, "forward"):
                enter = _observer(functools.partial(self._enter, path))
                leave = _observer(self._leave)
                # First before and last after: the plan's own redistributions count as the module's.
                self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
                self._handles.append(module.register_forward_hook(leave, always_call=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def current(self) -> str:
        """Return the path of the innermost module that runs, or whose node backward is at; "" for none."""
        if self._stack:  # also where a checkpoint runs a forward again inside backward
            return self._stack[-1] or type(self._model).__name__
        node = node_in_backward()
        place = -1 if node is None else bisect.bisect_right(self._starts, node) - 1
        return self._owners[place] if place >= 0 else ""

    def _enter(self, path: str, *_: Any) -> None:
        self._stack.append(path)
        self._mark()

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()
            self._mark()

    def _mark(self) -> None:
        owner = "" if not self._stack else self._stack[-1] or type(self._model).__name__
        number = number_of_next_node()
        if self._starts and self._starts[-1] == number:
            self._owners[-1] = owner
        else:
            self._starts.append(number)
            self._owners.append(owner)


def _observer(call: Any) -> Any:
    """Return a hook that parallelized models need not make way for: it looks at no tensor."""

    def hook(*args: Any) -> None:
        call(*args)

    hook.only_observes = True  # type: ignore[attr-defined]
    return hook
