"""The graphs that torch.compile hands to a backend, as this rank got them."""

from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


def captured(fn: Any, *args: Any) -> list[torch.fx.GraphModule]:
    """Compile a function, run it and its backward; return the graphs of the forward and of the backward."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, inference_compiler=keep)
    out = torch.compile(fn, fullgraph=True, backend=backend)(*args)
    outs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(
        [x for x in outs if x.requires_grad], [torch.ones_like(x) for x in outs]
    )
    return found


def operators_of(graph: torch.fx.GraphModule) -> list[tuple[Any, tuple[int, ...]]]:
    """Return a graph's operators in order, each with the shape of its first result.

    What keeps an operator's place in the order (``with_effects``) is left out.
    """
    found = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OperatorBase):
            continue
        is_ordered = node.target is torch.ops.higher_order.with_effects
        operator = node.args[1] if is_ordered else node.target
        values = [
            v
            for v in torch.utils._pytree.tree_leaves(node.meta["val"])
            if isinstance(v, torch.Tensor)
        ]
        found.append((operator, tuple(values[is_ordered].shape)))
    return found
