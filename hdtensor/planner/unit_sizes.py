"""Operations and elements of a model's units, which all analytic costs are made of.

Letters: T tokens of a micro-batch, h hidden, H heads, K heads of keys and values, d their width, f width of the
MLP, V vocabulary, t degree of tensor parallelism. A matrix product of (m, k) with (k, n) is 2mkn operations.
"""

from __future__ import annotations

from typing import NamedTuple

from hdtensor.planner.costs import LayerSpan, Unit
from hdtensor.planner.model import ModelShape


class Work(NamedTuple):
    """What a device does for one unit's forward.

    Attributes:
        matmul: Operations of matrix products with parameters.
        attention: Operations of products of queries, keys and values; half of the square, by causality.
        moved: Elements read and written by all that is no matrix product.
        weights: Elements of parameters that are read.
        num_kernels: Launches, roughly.
    """

    matmul: float
    attention: float
    moved: float
    weights: float
    num_kernels: int


def kv_heads_per_rank(model: ModelShape, tp: int) -> float:
    """Return how many heads of keys and values a rank holds; below one each they are copied."""
    return max(model.num_kv_heads / tp, 1.0)


def _attention_parameters(model: ModelShape, tp: int) -> float:
    heads = model.num_heads / tp + 2 * kv_heads_per_rank(model, tp)
    return model.hidden * model.head_dim * (heads + model.num_heads / tp)


def _expert_parameters(model: ModelShape, tp: int) -> float:
    return model.num_matrices * model.hidden * model.ffn / tp


def unit_parameters(model: ModelShape, unit: Unit, tp: int) -> float:
    """Return how many parameters of a unit a rank holds. All experts are on every stage's ranks."""
    match unit:
        case "embedding":
            return model.vocab * model.hidden / tp
        case "head":
            return model.hidden * (1 + (0 if model.is_tied else model.vocab / tp))
        case "layer":
            num_mlps = max(model.num_experts, 1) + model.num_shared_experts
            router = model.hidden * model.num_experts
            mlps = num_mlps * _expert_parameters(model, tp)
            return _attention_parameters(model, tp) + mlps + router + 2 * model.hidden


def span_parameters(model: ModelShape, layers: LayerSpan, tp: int) -> float:
    """Return how many parameters of some layers a rank holds; a tied head has its own copy on a later stage."""
    total = layers.num_layers * unit_parameters(model, "layer", tp)
    if layers.is_first:
        total += unit_parameters(model, "embedding", tp)
    if layers.is_last:
        total += unit_parameters(model, "head", tp)
        if model.is_tied and not layers.is_first:
            total += unit_parameters(model, "embedding", tp)
    return total


def unit_work(model: ModelShape, unit: Unit, tp: int, tokens: float, context: int) -> Work:
    """Return what each rank does in a unit's forward.

    Args:
        model: Sizes.
        unit: Which unit.
        tp: Degree of tensor parallelism.
        tokens: Tokens of the micro-batch on the rank.
        context: Tokens that one token may attend to.
    """
    match unit:
        case "embedding":
            return Work(0.0, 0.0, 2 * tokens * model.hidden, 0.0, 2)
        case "head":
            rows = model.vocab / tp
            moved = tokens * (
                2 * model.hidden / tp + 4 * rows
            )  # softmax in float32, and the logits
            return Work(2 * tokens * model.hidden * rows, 0.0, moved, model.hidden * rows, 8)
        case "layer":
            return _layer_work(model, tp, tokens, context)


def _layer_work(model: ModelShape, tp: int, tokens: float, context: int) -> Work:
    num_seen = (model.experts_per_token if model.num_experts else 1) + model.num_shared_experts
    projections = _attention_parameters(model, tp)
    mlp = num_seen * _expert_parameters(model, tp)
    router = model.hidden * model.num_experts
    heads = model.num_heads / tp
    inner = num_seen * model.ffn / tp
    moved = tokens * (
        10 * model.hidden / tp  # two norms and two residuals, cut by sequence
        + 2 * model.head_dim * (heads + kv_heads_per_rank(model, tp))  # positions
        + model.num_matrices * inner  # activation of the MLP
    )
    read = projections + max(model.num_experts, 1) * _expert_parameters(model, tp)
    return Work(
        matmul=2 * tokens * (projections + mlp + router),
        attention=2 * tokens * context * heads * model.head_dim,  # 4 T C H d, halved by causality
        moved=moved,
        weights=read,
        num_kernels=20 + 6 * model.num_experts,
    )


def unit_activations(model: ModelShape, unit: Unit, tp: int, tokens: float) -> float:
    """Return the elements of a unit's activations that a rank keeps for backward, with fused attention."""
    match unit:
        case "embedding":
            return 0.0
        case "head":
            return tokens * (2 * model.hidden / tp + 2 * model.vocab / tp)  # logits, and in float32
        case "layer":
            num_seen = model.experts_per_token if model.num_experts else 1
            inner = (num_seen + model.num_shared_experts) * model.ffn / tp
            heads = model.num_heads / tp
            attention = model.head_dim * (2 * heads + 2 * kv_heads_per_rank(model, tp))
            return tokens * (4 * model.hidden / tp + attention + model.num_matrices * inner)
