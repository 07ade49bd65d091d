"""``description_of``: the parameters of a model of some sizes, under the names that Hugging Face gives."""

from __future__ import annotations

from collections.abc import Iterator

from hdtensor.plan import ModelDescription, ParameterDescription
from hdtensor.planner.model import ModelShape


#: A parameter's name within its layer, and its shape.
_Part = tuple[str, tuple[int, ...]]

_EMBEDDING = "model.embed_tokens.weight"


def description_of(model: ModelShape) -> ModelDescription:
    """Return what a plan needs to know of a model, from its sizes alone.

    Names are those of Llama, Mixtral and DeepSeek, whatever the family: the rules of plans find them. Biases, and norms beside
    those of a layer and the last one, are left out, as in ``ModelShape``.

    >>> from hdtensor.planner.models import find_model
    >>> description = description_of(find_model("mixtral-8x7B"))
    >>> description.shapes["model.layers.0.mlp.experts.down_proj"]
    (8, 4096, 14336)

    Args:
        model: Sizes.
    """
    hidden = model.hidden
    parameters = [ParameterDescription(_EMBEDDING, (model.vocab, hidden))]
    if model.num_positions:
        parameters.append(ParameterDescription("model.wpe.weight", (model.num_positions, hidden)))
    for layer in range(model.num_layers):
        parameters += [
            ParameterDescription(f"model.layers.{layer}.{name}", shape)
            for name, shape in (*_attention(model), *_mlp(model, layer), *_norms(model))
        ]
    parameters += [
        ParameterDescription("model.norm.weight", (hidden,)),
        ParameterDescription(
            "lm_head.weight", (model.vocab, hidden), _EMBEDDING if model.is_tied else None
        ),
    ]
    return ModelDescription(
        parameters=tuple(parameters),
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        hidden_size=hidden,
        intermediate_size=model.ffn,
        tie_word_embeddings=model.is_tied,
    )


def _attention(model: ModelShape) -> Iterator[_Part]:
    hidden, heads, values = model.hidden, model.num_heads, model.value_dim or model.head_dim
    queries = heads * model.head_dim
    if model.q_rank:
        yield "self_attn.q_a_proj.weight", (model.q_rank, hidden)
        yield "self_attn.q_b_proj.weight", (queries, model.q_rank)
    else:
        yield "self_attn.q_proj.weight", (queries, hidden)
    if model.kv_rank:
        expanded = heads * (model.head_dim - model.rope_dim + values)
        yield "self_attn.kv_a_proj_with_mqa.weight", (model.kv_rank + model.rope_dim, hidden)
        yield "self_attn.kv_b_proj.weight", (expanded, model.kv_rank)
    else:
        yield "self_attn.k_proj.weight", (model.num_kv_heads * model.head_dim, hidden)
        yield "self_attn.v_proj.weight", (model.num_kv_heads * values, hidden)
    yield "self_attn.o_proj.weight", (hidden, heads * values)


def _mlp(model: ModelShape, layer: int) -> Iterator[_Part]:
    hidden, width, ups = model.hidden, model.ffn, model.num_matrices - 1
    if not model.num_experts:
        yield from _dense("mlp", model, width)
        return
    if layer < model.num_dense_layers:
        yield from _dense("mlp", model, model.dense_ffn or width)
        return
    yield "mlp.gate.weight", (model.num_experts, hidden)
    yield "mlp.experts.gate_up_proj", (model.num_experts, ups * width, hidden)
    yield "mlp.experts.down_proj", (model.num_experts, hidden, width)
    if model.num_shared_experts:
        yield from _dense("mlp.shared_experts", model, model.num_shared_experts * width)


def _dense(path: str, model: ModelShape, width: int) -> Iterator[_Part]:
    if model.num_matrices == 3:
        yield f"{path}.gate_proj.weight", (width, model.hidden)
    yield f"{path}.up_proj.weight", (width, model.hidden)
    yield f"{path}.down_proj.weight", (model.hidden, width)


def _norms(model: ModelShape) -> Iterator[_Part]:
    yield "input_layernorm.weight", (model.hidden,)
    yield "post_attention_layernorm.weight", (model.hidden,)
