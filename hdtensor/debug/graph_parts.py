"""Which part of a step an operator belongs to, by where its tensors come from in the program that all ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hdtensor.debug.graph_nodes import Kind, Phase
from hdtensor.debug.recording import Call, Logical, Recording, is_communication, mark_of


# Operators that compute nothing: they give another name to memory, move, copy, or fill it.
_LAYOUT = frozenset(
    [
        "alias",
        "as_strided",
        "cat",
        "clone",
        "contiguous",
        "copy",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "fill",
        "full",
        "full_like",
        "lift_fresh",
        "narrow",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "ones_like",
        "permute",
        "reshape",
        "resolve_conj",
        "resolve_neg",
        "scalar_tensor",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
        "view_as",
        "_reshape_alias",
        "_unsafe_view",
        "zero",
        "zeros",
        "zeros_like",
    ]
)


#: Python's names of the operators behind ``&``, ``|`` and ``^``, and those that compilers know.
_BITWISE = {
    f"__{i}{name}__": f"bitwise_{name}{'_' if i else ''}"
    for name in ("and", "or", "xor")
    for i in ("", "i")
}


def name_of(func: object) -> str:
    """Return an operator's name without its overload, such as "aten.mm"."""
    home, _, name = str(func._schema.name).partition("::")  # type: ignore[attr-defined]
    return f"{home}.{_BITWISE.get(name, name)}"


def kind_of(func: object) -> Kind:
    """Return what an operator does: communication, layout, or computing."""
    if is_communication(func):
        return "communication"
    return "layout" if name_of(func).partition(".")[2].rstrip("_") in _LAYOUT else "compute"


class Parts:
    """Tells the part of each call of a recording.

    ========  ==========================================================================================
    part      calls
    ========  ==========================================================================================
    pre       of a redistribute, or conversion of dtype, of what came from outside as it is, before backward
    forward   others before a backward
    backward  others inside of a backward
    post      of a redistribute, or conversion, whose result goes out as a gradient as it is; those that bring
              gradients home; everything after the last backward
    ========  ==========================================================================================

    All ranks have the same parts, also those that a redistribute begins or ends at.

    Args:
        recording: What ran.
        inputs: ``HDTensor``s from outside.
        gradients: Those that go out.
    """

    def __init__(
        self, recording: Recording, inputs: Iterable[Tensor], gradients: Iterable[Tensor]
    ) -> None:
        self._calls = recording.calls
        self._moves_inputs = _follow(recording.logical, inputs, is_forward=True)
        self._moves_gradients = _follow(recording.logical[::-1], gradients, is_forward=False)
        backwards = [i for i, call in enumerate(self._calls) if call.is_backward]
        end = backwards[-1] if backwards else len(self._calls)
        self._after = {id(call) for call in self._calls[end + 1 :] if not call.is_backward}

    def of(self, call: Call) -> Phase:
        """Return the part of one call."""
        logical = id(call.logical)
        if call.why == "gradients" or id(call) in self._after:
            return "post"
        if call.is_backward:
            return "post" if logical in self._moves_gradients else "backward"
        return "pre" if logical in self._moves_inputs else "forward"


def _follow(logical: Sequence[Logical], begin: Iterable[Tensor], *, is_forward: bool) -> set[int]:
    """Return the operators that move tensors or convert them, from or to ``begin`` without any other between."""
    known = {mark_of(x) for x in begin}
    found = set()
    for op in logical:
        name = name_of(op.func).partition(".")[2]
        is_move = name in ("redistribute", "_to_copy")
        before, after = (op.inputs, op.outs) if is_forward else (op.outs, op.inputs)
        if (is_move or kind_of(op.func) == "layout") and before and known.issuperset(before):
            known.update(after)
            if is_move:
                found.add(id(op))
    return found
