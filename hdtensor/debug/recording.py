"""What one rank runs, recorded operator by operator: on tensors without values, and without anything being sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hdtensor._torch_compat import FakeTensorMode, TorchDispatchMode, in_backward, storage_of
from hdtensor.collectives import observe
from hdtensor.tensor import HDTensor


@dataclass(slots=True, kw_only=True)
class Logical:
    """One operator of the program that all ranks share: its tensors are ``HDTensor``s.

    Attributes:
        func: The operator.
        inputs: Marks of its tensors (``mark_of``).
        outs: Marks of those that it returned.
    """

    func: Any
    inputs: list[int]
    outs: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Call:
    """One operator that ran on local tensors.

    Attributes:
        func: The operator.
        args: Its positional arguments.
        inputs: Its tensors.
        outs: The tensors it returned.
        written: Its tensors that it wrote into.
        logical: The operator of the program that it is a part of, None for one on plain tensors.
        is_backward: Whether a backward ran it.
        why: The reason of the communication around it, "" for none.
        module: Path of the module that ran it, or whose backward did.
    """

    func: Any
    args: tuple[Any, ...]
    inputs: list[Tensor]
    outs: list[Tensor]
    written: list[Tensor]
    logical: Logical | None
    is_backward: bool
    why: str
    module: str


@dataclass(slots=True)
class Recording:
    """The calls of one run.

    Attributes:
        calls: What ran on local tensors, in order.
        logical: What ran on ``HDTensor``s, in order.
        has_backward: Whether a backward ran, also one in which this rank had no part.
    """

    calls: list[Call] = field(default_factory=list)
    logical: list[Logical] = field(default_factory=list)
    has_backward: bool = False


class Recorder(TorchDispatchMode):
    """Notes every operator while it is entered.

    Enter it inside of a ``FakeTensorMode``: then nothing is computed, and what communicates gives its result's shape only.

    Args:
        meet: Called with each ``HDTensor`` before an operator sees it.
        module: Returns the path of the module that is running.
    """

    def __init__(self, meet: Callable[[HDTensor], None], module: Callable[[], str]) -> None:
        super().__init__()
        self.recording = Recording()
        self._meet, self._module = meet, module
        self._logical: Logical | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return that placements are to be deduced outside of this mode, as outside of those of a compiler."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_backward = in_backward()
        self.recording.has_backward |= is_backward
        inputs = list(tensors_in((args, kwargs)))
        wrapped = [x for x in inputs if isinstance(x, HDTensor)]
        if wrapped:
            return self._run_logical(func, types, args, kwargs, wrapped)
        result = func(*args, **kwargs)
        self.recording.calls.append(
            Call(
                func=func,
                args=args,
                inputs=inputs,
                outs=list(tensors_in(result)),
                written=list(_written(func, args, kwargs)),
                logical=self._logical,
                is_backward=is_backward,
                why=observe.reason(),
                module=self._module(),
            )
        )
        return result

    def _run_logical(
        self, func: Any, types: Any, args: Any, kwargs: Any, wrapped: list[HDTensor]
    ) -> Any:
        for tensor in wrapped:
            self._meet(tensor)
        before = self._logical
        logical = Logical(func=func, inputs=[mark_of(tensor) for tensor in wrapped])
        self.recording.logical.append(logical)
        if before is None:
            self._logical = logical
        try:
            with self:  # the operators on local tensors come here
                result = HDTensor.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._logical = before
        logical.outs = [mark_of(out) for out in tensors_in(result)]
        return result


_marks = itertools.count()


def mark_of(tensor: Tensor) -> int:
    """Return a number that no other tensor has, or ever had.

    Gradients must not be held here: autograd copies one that somebody else holds.
    """
    mark: int | None = getattr(tensor, "_hdtensor_mark", None)
    if mark is None:
        mark = next(_marks)
        tensor._hdtensor_mark = mark  # type: ignore[attr-defined]
    return mark


def fake_mode() -> FakeTensorMode:
    """Return the mode in which tensors have shapes and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    if not func._schema.is_mutable:
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def needed_calls(
    calls: Sequence[Call], results: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Call]:
    """Return the calls that results, communication, or writes into inputs need, as a compiler would keep them.

    Args:
        calls: All calls in order.
        results: What the run returned, and gradients.
        inputs: Tensors from outside.
    """
    needed = {id(x) for x in results}
    storages = {storage_of(x) for x in (*results, *inputs)}
    kept = []
    for call in reversed(calls):
        is_needed = _has_effects(call.func) or any(id(x) in needed for x in call.outs)
        if is_needed or any(storage_of(x) in storages for x in call.written):
            kept.append(call)
            needed.update(id(x) for x in (*call.inputs, *call.outs))
            storages.update(storage_of(x) for x in call.inputs)
    return kept[::-1]


def _has_effects(func: Any) -> bool:
    return is_communication(func) or func.name() == "hdtensor::draw_key"


def is_communication(func: Any) -> bool:
    """Return whether an operator sends or receives."""
    return str(func.name()).startswith(("hdtensor::split_", "hdtensor::send_recv"))
