"""``ExecutableGraph``: what one rank runs, as a value: operators, local shapes, communication, in the paper's four parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hdtensor.debug.graph_nodes import PHASES, GraphNode, LocalTensor, Phase
from hdtensor.debug.graph_svg import draw
from hdtensor.redistribute.explain import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutableGraph:
    """The graph of one rank: the operators that it runs, in order, and nothing of what other ranks run.

    Paper: section 6 and appendix A.2. The parts are ``pre`` (what brings parameters and inputs to where the first operator
    needs them: gathers, redistributes, conversions of dtypes), ``forward``, ``backward`` and ``post`` (what brings gradients
    home, and the optimizer).

    Attributes:
        rank: Whose graph.
        title: Name of the function.
        inputs: Tensors from outside that it uses.
        nodes: The operators in order.
        outputs: Names of what the function returns, then of gradients, each with what it is.
    """

    rank: int
    title: str
    inputs: tuple[LocalTensor, ...]
    nodes: tuple[GraphNode, ...]
    outputs: tuple[tuple[str, str], ...]

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        return self.text

    def part(self, phase: Phase) -> tuple[GraphNode, ...]:
        """Return the nodes of one part, in order."""
        return tuple(node for node in self.nodes if node.phase == phase)

    @property
    def pre(self) -> tuple[GraphNode, ...]:
        """Nodes of pre-processing."""
        return self.part("pre")

    @property
    def forward(self) -> tuple[GraphNode, ...]:
        """Nodes of the forward."""
        return self.part("forward")

    @property
    def backward(self) -> tuple[GraphNode, ...]:
        """Nodes of the backward."""
        return self.part("backward")

    @property
    def post(self) -> tuple[GraphNode, ...]:
        """Nodes of post-processing."""
        return self.part("post")

    @property
    def communication(self) -> tuple[GraphNode, ...]:
        """Nodes that send or receive, in order."""
        return tuple(node for node in self.nodes if node.transfer is not None)

    @property
    def heading(self) -> str:
        """One line: whose graph, how large."""
        compute = sum(node.kind == "compute" for node in self.nodes)
        sent = sum(sum(node.transfer.sent_bytes) for node in self.nodes if node.transfer)
        moved = len(self.communication)
        return (
            f"rank {self.rank}, {self.title}: {_count(compute, 'operator')}, "
            f"{_count(moved, 'communication')} ({bytes_text(sent)} put in)"
        )

    @property
    def text(self) -> str:
        """The graph, one operator a line, part by part; parts without operators are left out."""
        lines = [self.heading]
        if self.inputs:
            lines += ["", "inputs", *(f"  {tensor}" for tensor in self.inputs)]
        for phase in PHASES:
            nodes = self.part(phase)
            if nodes:
                lines += ["", phase, *_lines_of(nodes)]
        if self.outputs:
            lines += ["", "outputs", *(f"  {what}: {name}" for what, name in self.outputs)]
        return "\n".join(lines)

    @property
    def svg(self) -> str:
        """The graph as an SVG file."""
        return draw(self.heading, self.inputs, self.nodes, self.outputs)


def _lines_of(nodes: Iterable[GraphNode]) -> Iterable[str]:
    module = ""
    for node in nodes:
        if node.module != module:
            module = node.module
            yield f"  [{module or 'outside of modules'}]"
        yield f"  {node}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
