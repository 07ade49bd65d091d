"""Rules for the parameter names of known model families.

Names mean the same in most families, so that one list serves all; where a family means something else by a name, the shape
or the kind of module tells (``sites.fits``). What no rule names is replicated.
"""

from __future__ import annotations

from hdtensor.plan.patterns import Pattern, Role


def _linear(role: Role, *names: str) -> tuple[Pattern, ...]:
    """Return one rule each for weights and biases."""
    return tuple(Pattern(f"{name}.{part}", role) for name in names for part in ("weight", "bias"))


#: Llama, Qwen2, Qwen3, Mistral, Gemma and models that name their parameters alike.
LLAMA_PATTERNS: tuple[Pattern, ...] = (
    *_linear(Role.HEADS, "q_proj"),
    *_linear(Role.KV_HEADS, "k_proj", "v_proj"),
    *_linear(Role.ROW, "o_proj"),
    *_linear(Role.COLUMN, "gate_proj", "up_proj"),
    *_linear(Role.ROW, "down_proj"),
    Pattern("embed_tokens.weight", Role.REPLICATE, "first"),
    Pattern("lm_head.weight", Role.REPLICATE, "last"),
    Pattern("lm_head.bias", Role.REPLICATE, "last"),
    # OPT registers it before the layers.
    Pattern("decoder.final_layer_norm.weight", Role.REPLICATE, "last"),
    Pattern("decoder.final_layer_norm.bias", Role.REPLICATE, "last"),
    Pattern("*norm.weight", Role.REPLICATE),
    Pattern("*norm.bias", Role.REPLICATE),
)

#: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek: stacked experts, routers, shared experts, latent attention.
MOE_PATTERNS: tuple[Pattern, ...] = (
    Pattern("experts.gate_up_proj", Role.EXPERT_GATE_UP),
    Pattern("experts.down_proj", Role.EXPERT_ROW),
    Pattern("mlp.gate.weight", Role.REPLICATE),
    Pattern("mlp.router.weight", Role.REPLICATE),
    Pattern("shared_expert_gate.weight", Role.REPLICATE),
    *_linear(Role.HEADS, "q_b_proj", "kv_b_proj"),
    *_linear(Role.REPLICATE, "q_a_proj", "kv_a_proj_with_mqa"),
)

_CODERS_FC1 = ("model.encoder.layers.*.fc1", "model.decoder.layers.*.fc1")
_CODERS_FC2 = ("model.encoder.layers.*.fc2", "model.decoder.layers.*.fc2")

#: GPT-2, GPT-J, GPT-NeoX, BLOOM, OPT, BART, Phi, Phi-3, StarCoder2, BERT, DistilBERT, ALBERT, MPNet, T5.
OTHER_PATTERNS: tuple[Pattern, ...] = (
    *_linear(Role.QKV, "attn.c_attn"),
    *_linear(Role.ROW, "attn.c_proj", "mlp.c_proj"),
    *_linear(Role.COLUMN, "mlp.c_fc"),
    *_linear(Role.HEADS, "attention.query_key_value", "self_attention.query_key_value"),
    *_linear(Role.ROW, "attention.dense", "self_attention.dense", "self_attn.dense"),
    *_linear(Role.COLUMN, "dense_h_to_4h"),
    *_linear(Role.ROW, "dense_4h_to_h"),
    *_linear(Role.ROW, "self_attn.out_proj", "attn.out_proj"),
    *_linear(Role.COLUMN, *_CODERS_FC1, "mlp.fc1", "mlp.fc_in"),
    *_linear(Role.ROW, *_CODERS_FC2, "mlp.fc2", "mlp.fc_out"),
    *_linear(Role.GATE_UP, "mlp.gate_up_proj"),
    *_linear(Role.HEADS, "attention.self.query"),
    *_linear(Role.KV_HEADS, "attention.self.key", "attention.self.value"),
    *_linear(Role.ROW, "attention.output.dense"),
    *_linear(Role.COLUMN, "layer.*.intermediate.dense"),
    *_linear(Role.ROW, "layer.*.output.dense"),
    *_linear(Role.HEADS, "attention.q_lin", "attention.attn.q"),
    *_linear(Role.KV_HEADS, "attention.k_lin", "attention.v_lin"),
    *_linear(Role.KV_HEADS, "attention.attn.k", "attention.attn.v"),
    *_linear(Role.ROW, "attention.out_lin", "attention.attn.o"),
    *_linear(Role.COLUMN, "ffn.lin1"),
    *_linear(Role.ROW, "ffn.lin2"),
    *_linear(Role.HEADS, "albert_layers.*.attention.query"),
    *_linear(Role.KV_HEADS, "albert_layers.*.attention.key", "albert_layers.*.attention.value"),
    *_linear(Role.COLUMN, "albert_layers.*.ffn"),
    *_linear(Role.ROW, "albert_layers.*.ffn_output"),
    *_linear(Role.HEADS, "SelfAttention.q", "EncDecAttention.q"),
    *_linear(Role.KV_HEADS, "SelfAttention.k", "SelfAttention.v"),
    *_linear(Role.KV_HEADS, "EncDecAttention.k", "EncDecAttention.v"),
    *_linear(Role.ROW, "SelfAttention.o", "EncDecAttention.o"),
    *_linear(Role.COLUMN, "DenseReluDense.wi", "DenseReluDense.wi_0", "DenseReluDense.wi_1"),
    *_linear(Role.ROW, "DenseReluDense.wo"),
    Pattern("wte.weight", Role.REPLICATE, "first"),
    Pattern("wpe.weight", Role.REPLICATE, "first"),
    Pattern("embed_in.weight", Role.REPLICATE, "first"),
    Pattern("embed_out.weight", Role.REPLICATE, "last"),
    Pattern("word_embeddings.weight", Role.REPLICATE, "first"),
    *_linear(Role.REPLICATE, "ln_1", "ln_2", "ln_f", "*norm1", "*norm2"),
)

#: The rules that every plan expands with, after the user's.
BUILT_IN_PATTERNS: tuple[Pattern, ...] = (*LLAMA_PATTERNS, *MOE_PATTERNS, *OTHER_PATTERNS)

#: Put before the built-in rules, these cut the vocabulary of the embedding and of the logits.
VOCAB_PARALLEL: tuple[Pattern, ...] = (
    Pattern("embed_tokens.weight", Role.VOCAB, "first"),
    Pattern("lm_head.weight", Role.COLUMN, "last"),
    Pattern("lm_head.bias", Role.COLUMN, "last"),
)
