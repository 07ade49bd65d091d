"""Operations and elements of a model's units, which all analytic costs are made of.

Letters: T tokens of a micro-batch, C context, h hidden, H heads, K heads of keys and values, d and v widths of a
head of keys and of values, f width of the MLP, V vocabulary, t degree of tensor parallelism. A product of
matrices (m, k) and (k, n) is 2mkn operations. A layer is the mean one, where first layers are dense and the
others have experts.
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
    """Return the elements of attention's projections on a rank; those to latent vectors are on each rank whole."""
    h, d = model.hidden, model.head_dim
    heads, value = model.num_heads / tp, model.value_dim or model.head_dim
    output = heads * value * h
    if not model.kv_rank:
        return h * (heads * d + kv_heads_per_rank(model, tp) * (d + value)) + output
    queries = model.q_rank * (h + heads * d) if model.q_rank else h * heads * d
    down = h * (model.kv_rank + model.rope_dim)
    up = model.kv_rank * heads * (d - model.rope_dim + value)
    return queries + down + up + output


class _Mlp(NamedTuple):
    """The mean MLP of a layer.

    Attributes:
        width: Inner width that a token sees.
        parameters: Elements, of all experts: a micro-batch reads them all.
    """

    width: float
    parameters: float


def _mlp(model: ModelShape) -> _Mlp:
    one = model.num_matrices * model.hidden
    if not model.num_experts:
        return _Mlp(model.ffn, one * model.ffn)
    dense = model.num_dense_layers / model.num_layers
    dense_width = model.dense_ffn or model.ffn
    seen = (model.experts_per_token + model.num_shared_experts) * model.ffn
    held = (model.num_experts + model.num_shared_experts) * model.ffn
    width = dense * dense_width + (1 - dense) * seen
    return _Mlp(width, one * (dense * dense_width + (1 - dense) * held))


def unit_parameters(model: ModelShape, unit: Unit, tp: int) -> float:
    """Return how many parameters of a unit a rank holds. All experts are on every stage's ranks."""
    match unit:
        case "embedding":
            return model.hidden * (model.vocab / tp + model.num_positions)
        case "head":
            return model.hidden * (1 + model.vocab / tp)
        case "layer":
            router = model.hidden * model.num_experts
            return (
                _attention_parameters(model, tp)
                + _mlp(model).parameters / tp
                + router
                + 2 * model.hidden
            )


def span_parameters(model: ModelShape, layers: LayerSpan, tp: int) -> float:
    """Return how many parameters of some layers a rank holds; a tied head is the embedding's where both are."""
    total = layers.num_layers * unit_parameters(model, "layer", tp)
    if layers.is_first:
        total += unit_parameters(model, "embedding", tp)
    if layers.is_last:
        total += unit_parameters(model, "head", tp)
    if layers.is_first and layers.is_last and model.is_tied:
        total -= model.hidden * model.vocab / tp
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
    projections, mlp = _attention_parameters(model, tp), _mlp(model)
    inner = mlp.width / tp
    router = model.hidden * model.num_experts
    heads, value = model.num_heads / tp, model.value_dim or model.head_dim
    moved = tokens * (
        10 * model.hidden / tp  # two norms and two residuals, cut by sequence
        + 2 * model.head_dim * (heads + kv_heads_per_rank(model, tp))  # positions
        + model.num_matrices * inner  # activation of the MLP
    )
    return Work(
        matmul=2 * tokens * (projections + model.num_matrices * model.hidden * inner + router),
        attention=tokens * context * heads * (model.head_dim + value),
        moved=moved,
        weights=projections + mlp.parameters / tp,
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
            heads, value = model.num_heads / tp, model.value_dim or model.head_dim
            kv = kv_heads_per_rank(model, tp)
            attention = model.head_dim * heads + value * heads + kv * (model.head_dim + value)
            latent = model.q_rank + model.kv_rank
            inner = model.num_matrices * _mlp(model).width / tp
            return tokens * (4 * model.hidden / tp + attention + latent + inner)
