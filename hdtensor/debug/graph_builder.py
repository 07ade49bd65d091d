"""From a recorded run to an ``ExecutableGraph``: what is needed of it, with names, sizes and parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hdtensor.debug.graph import ExecutableGraph
from hdtensor.debug.graph_nodes import GraphNode, LocalTensor, Transfer
from hdtensor.debug.graph_parts import Parts, kind_of, name_of
from hdtensor.debug.played import Loan, local_of
from hdtensor.debug.recording import Call, Recording, is_communication, needed_calls
from hdtensor.tensor import HDTensor


#: They give a tensor another Python object: no node.
_TRANSPARENT = (
    "aten.alias",
    "aten.detach",
    "aten.lift_fresh",
    "aten.resolve_conj",
    "aten.resolve_neg",
)


class Builder:
    """Makes the graph of a recorded run.

    Args:
        recording: What ran.
        loan: The tensors from outside.
        outputs: What the function returned, with names.
    """

    def __init__(
        self, recording: Recording, loan: Loan, outputs: Sequence[tuple[str, Tensor]]
    ) -> None:
        self._loan = loan
        self._results = [
            *outputs,
            *((f"grad of {n}", t.grad) for n, t in loan.leaves.items() if t.grad is not None),
        ]
        gradients = [t.grad for t in loan.leaves.values() if isinstance(t.grad, HDTensor)]
        inputs = [t for t in loan.tensors if isinstance(t, HDTensor)]
        self._parts = Parts(recording, inputs, gradients)
        self._calls = recording.calls
        self._names: dict[int, str] = dict(loan.names)
        self._used: dict[str, LocalTensor] = {}
        self._counts: Counter[str] = Counter()
        self._outside = set(loan.names)

    def build(self, rank: int, title: str) -> ExecutableGraph:
        """Return the graph."""
        results = [local_of(value) for _, value in self._results]  # a compiler returns all of them
        nodes = []
        for call in needed_calls(self._calls, results, self._loan.inputs):
            if name_of(call.func) in _TRANSPARENT:
                self._names[id(call.outs[0])] = self._name(call.inputs[0])
            else:
                nodes.append(self._node(call))
        outputs = tuple(
            (what, "no part here" if _is_elsewhere(value) else self._name(local_of(value)))
            for what, value in self._results
        )
        return ExecutableGraph(
            rank=rank,
            title=title,
            inputs=tuple(self._used.values()),
            nodes=tuple(nodes),
            outputs=outputs,
        )

    def _node(self, call: Call) -> GraphNode:
        inputs = tuple(dict.fromkeys(self._name(x) for x in call.inputs))
        op = name_of(call.func)
        outputs = tuple(
            LocalTensor(self._new_name(x, op), tuple(x.shape), x.dtype) for x in call.outs
        )
        return GraphNode(
            name=outputs[0].name if outputs else op,
            op=op,
            phase=self._parts.of(call),
            kind=kind_of(call.func),
            inputs=inputs,
            outputs=outputs,
            transfer=_transfer(call) if is_communication(call.func) else None,
            module=call.module,
        )

    def _name(self, tensor: Tensor) -> str:
        """Return the name of a tensor that is read; one that nothing has made is from outside."""
        name = self._names.get(id(tensor))
        if name is None:
            name = self._names[id(tensor)] = self._next("constant")
            self._outside.add(id(tensor))
        if id(tensor) in self._outside:
            self._used.setdefault(name, LocalTensor(name, tuple(tensor.shape), tensor.dtype))
        return name

    def _new_name(self, tensor: Tensor, op: str) -> str:
        name = self._names.get(id(tensor))
        if name is None:
            name = self._names[id(tensor)] = self._next(op.partition(".")[2].strip("_"))
        return name

    def _next(self, base: str) -> str:
        count = self._counts[base]
        self._counts[base] += 1
        return f"{base}_{count}" if count else base


def _is_elsewhere(value: Tensor) -> bool:
    return isinstance(value, HDTensor) and not value.is_local


def _transfer(call: Call) -> Transfer:
    args: tuple[Any, ...] = call.args
    name = name_of(call.func)
    flat, out = args[0], call.outs[0]
    size = flat.element_size()
    if name == "hdtensor.send_recv":
        _, send_to, sent, receive_from, received, _ = args
        there = dict(zip(send_to, sent, strict=True))
        here = dict(zip(receive_from, received, strict=True))
        peers = tuple(sorted(there.keys() | here.keys()))
        return Transfer(
            kind="send_recv",
            ranks=peers,
            sent_bytes=tuple(there.get(peer, 0) * size for peer in peers),
            received_bytes=tuple(here.get(peer, 0) * size for peer in peers),
            why=call.why,
        )
    return Transfer(
        kind=name.removeprefix("hdtensor.split_"),
        ranks=tuple(args[-1]),
        sent_bytes=(flat.nbytes,),
        received_bytes=(out.nbytes,),
        op=next((a for a in args if isinstance(a, str)), ""),
        why=call.why,
    )
