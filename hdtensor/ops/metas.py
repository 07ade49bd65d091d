"""Output metadata of a call whose like was seen with other sizes.

Running an operator's meta function costs 10 us where it is C++ and 100 to 500 us where it is Python. A batch of another
length changes every call of a model, so shapes are computed by formula (``exact_metas``), or derived from those seen before
(``shape_rule``), where they can be.
"""

from __future__ import annotations

from typing import Any

import torch

from hdtensor._torch_compat import TensorMeta
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.calls import Call, as_list
from hdtensor.ops.exact_metas import exact_metas
from hdtensor.ops.propagate import output_metas
from hdtensor.ops.shape_rule import Shape, ShapeRule
from hdtensor.placements.layout import contiguous_stride


#: Rules kept; past it the table starts anew.
MAX_RULES = 16384

aten = torch.ops.aten

#: Operators beside the pointwise ones each of whose result's dims is some operand's dim or a constant, for all sizes. What
#: lengths were seen proves nothing of others: ``x[:5]`` is as long as ``x`` until that is longer than 5.
_DIM_BY_DIM = {
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._to_copy.default,
    aten.addmm.default,
    aten.alias.default,
    aten.amax.default,
    aten.amin.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.clone.default,
    aten.cumsum.default,
    aten.detach.default,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
    aten.mean.default,
    aten.mean.dim,
    aten.mm.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.permute.default,
    aten.select.int,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
}

_rules: dict[Any, _MetaRule] = {}


class _MetaRule:
    """The shapes of one operator's results, and what does not change with sizes."""

    __slots__ = ("container", "dtypes", "shapes")

    def __init__(self, metas: Any) -> None:
        self.shapes = ShapeRule()
        self.container = type(metas)
        self.dtypes = [None if m is None else m.dtype for m in as_list(metas)]

    def build(self, shapes: list[Shape | None]) -> Any:
        """Return metadata as ``output_metas`` does."""
        metas = [
            None
            if shape is None or dtype is None
            else TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
            for shape, dtype in zip(shapes, self.dtypes, strict=True)
        ]
        return metas[0] if self.container is TensorMeta else self.container(metas)


def metas_of(call: Call, key: Any) -> Any:
    """Return the metadata of a call's results.

    Args:
        call: The call.
        key: What it has in common with calls of other sizes (``record.sizeless_key``), or None.
    """
    exact = exact_metas(call)
    if exact is not None:
        return exact
    bounds = list(call.specs.values())
    same = _same_as_operands(call, bounds)
    inputs = (
        None if key is None or not _is_derivable(call, bounds) else [tuple(b.shape) for b in bounds]
    )
    rule = _rules.get(key) if inputs is not None or same else None
    if rule is not None and same and len(rule.dtypes) == 1 and rule.dtypes[0] is not None:
        return TensorMeta(bounds[0].shape, bounds[0].stride, rule.dtypes[0])
    if rule is not None and inputs is not None:
        shapes = rule.shapes.derive(inputs)
        if shapes is not None:
            return rule.build(shapes)
    args, kwargs = call.tier(lambda b: b.top())
    metas = output_metas(call.func, args, kwargs)
    if metas is not None and key is not None and (same or inputs is not None):
        _observe(key, inputs, metas)
    return metas


def _observe(key: Any, inputs: list[Shape] | None, metas: Any) -> None:
    rule = _rules.get(key)
    if rule is None:
        if len(_rules) >= MAX_RULES:
            _rules.clear()
        rule = _rules[key] = _MetaRule(metas)
    if inputs is None:
        return
    listed = as_list(metas)
    if any(m is not None and m.stride != contiguous_stride(m.shape) for m in listed):
        rule.shapes.is_usable = False
    rule.shapes.observe(inputs, [None if m is None else tuple(m.shape) for m in listed])


def _is_derivable(call: Call, bounds: list[BoundSpec]) -> bool:
    """Whether shapes follow from the operands' alone, dim by dim; nothing strided."""
    is_plain = torch.Tag.pointwise in call.func.tags or call.func in _DIM_BY_DIM
    return is_plain and all(b.stride == contiguous_stride(b.shape) for b in bounds)


def _same_as_operands(call: Call, bounds: list[BoundSpec]) -> bool:
    """Whether this is a pointwise operator on tensors of one dense layout, which its result has too."""
    if torch.Tag.pointwise not in call.func.tags or len(call.func._schema.returns) != 1:
        return False
    if call.kwargs.get("memory_format") is not None:
        return False
    first = bounds[0]
    return _is_dense(first) and all(
        b.shape == first.shape and b.stride == first.stride for b in bounds[1:]
    )


def _is_dense(bound: BoundSpec) -> bool:
    """Whether every element has a place of its own and no place is left out."""
    numel, last = 1, 0
    for size, step in zip(bound.shape, bound.stride, strict=True):
        if size > 1 and step == 0:
            return False
        numel *= size
        last += (size - 1) * step
    return numel == last + 1
