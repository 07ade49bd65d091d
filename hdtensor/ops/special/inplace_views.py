"""Operators that change a tensor's shape in place, such as ``squeeze_``: torch's own ``matmul`` ends in one."""

from __future__ import annotations

from typing import Any

import torch

from hdtensor._torch_compat import change_outer_shape
from hdtensor.ops.registry import call, special


aten = torch.ops.aten

_OUT_OF_PLACE = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


@special(*_OUT_OF_PLACE, is_local=True)
def _change_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take over the layout and the local tensor of the out-of-place operator's result."""
    view = _OUT_OF_PLACE[func]

    def run(x: Any, *rest: Any) -> Any:
        *given, kw = rest
        out = call(view, x, *given, **(kw or {}))
        change_outer_shape(func, x, given, kw or {})
        x._local_tensor, x._spec = out._local_tensor, out._spec
        return x

    return run
