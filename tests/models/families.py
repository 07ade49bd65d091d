"""Small models of many families, each with the batch that it takes."""

from __future__ import annotations

from typing import Any

import torch
import transformers


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "use_cache": False,
}

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

#: Family -> configuration class, what it has beside or instead of ``SIZES``. The model is its ``ForCausalLM``.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "mistral": ("Mistral", {}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8}),
    "gemma3": ("Gemma3Text", {"head_dim": 8}),
    "olmo2": ("Olmo2", {}),
    "phi": ("Phi", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "starcoder2": ("Starcoder2", {}),
    "stablelm": ("StableLm", {}),
    "granite": ("Granite", {}),
    "opt": ("OPT", {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32}),
    "bloom": (
        "Bloom",
        {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gptj": (
        "GPTJ",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 24}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
_MODELS = {"GPT2": "GPT2LMHeadModel"}
_GPT2_LIKE = ("gpt2", "gptj", "bloom")


def build(family: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Return a model in float64, the same for the same seed.

    Experts run one by one: the grouped kernels take no float64.
    """
    name, own = _CONFIGS[family]
    sizes = {} if family in _GPT2_LIKE else SIZES
    base = {"vocab_size": 64, "hidden_size": 32, "use_cache": False} if family in _GPT2_LIKE else {}
    if family in ("gpt2", "gptj"):
        base.pop("hidden_size")
    config = getattr(transformers, f"{name}Config")(**{**sizes, **base, **own, **changes})
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model_name = name.removesuffix("Text") + "ForCausalLM"
    return getattr(transformers, _MODELS.get(name, model_name))(config).double()
