"""Models with task heads, encoders, pairs of encoder and decoder, and vision models, each with a batch that it takes.

``docs/plans.md`` lists them; a test there compares the two lists.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.models.families import SIZES


NUM_ROWS, LENGTH = 8, 12

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {**SIZES, **_TOKENS}
_ENCODER = {
    **{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "use_cache")},
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
_BOTH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "vocab_size": 64,
    "decoder_start_token_id": 2,
    "use_cache": False,
    **_TOKENS,
}
_BART = {**_BOTH, "max_position_embeddings": 64}
_IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
}
_CLIP = {k: v for k, v in _ENCODER.items() if "dropout" not in k}
_SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "drop_path_rate": 0.0,
    "num_labels": 3,
}
_DISTIL = {
    "vocab_size": 64,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
_MPNET = {k: v for k, v in _ENCODER.items() if k != "pad_token_id"}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32}
_ONE_LABEL = {"problem_type": "single_label_classification", "num_labels": 3}
_GPT_OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
_MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}

#: Class of the model -> class of its configuration, what that gets, kind of batch.
TASKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "LlamaForSequenceClassification": ("Llama", {**_DECODER, "num_labels": 3}, "padded rows"),
    "GPT2ForSequenceClassification": (
        "GPT2",
        {**_GPT2, "num_labels": 3, "pad_token_id": 0},
        "padded rows",
    ),
    "LlamaForTokenClassification": (
        "Llama",
        {**_DECODER, "num_labels": 3, "classifier_dropout": 0.0},
        "classes of tokens",
    ),
    "LlamaForQuestionAnswering": ("Llama", _DECODER, "spans"),
    "CLIPTextModel": ("CLIPText", {**_CLIP, "eos_token_id": 63}, "texts"),
    "BertForSequenceClassification": ("Bert", {**_ENCODER, "num_labels": 3}, "rows"),
    "BertForMaskedLM": ("Bert", _ENCODER, "masked tokens"),
    "RobertaForMaskedLM": ("Roberta", _ENCODER, "tokens"),
    "DistilBertForMaskedLM": ("DistilBert", _DISTIL, "tokens"),
    "AlbertForMaskedLM": ("Albert", {**_ENCODER, "embedding_size": 16}, "tokens"),
    "MPNetForMaskedLM": ("MPNet", _MPNET, "tokens"),
    "DebertaV2ForSequenceClassification": (
        "DebertaV2",
        {**_ENCODER, **_DEBERTA, **_ONE_LABEL},
        "rows",
    ),
    "T5ForConditionalGeneration": ("T5", _T5, "tokens"),
    "BartForConditionalGeneration": ("Bart", _BART, "tokens"),
    "MarianMTModel": ("Marian", _BART, "tokens"),
    "WhisperForConditionalGeneration": ("Whisper", {**_BOTH, **_WHISPER}, "sounds"),
    "ViTForImageClassification": ("ViT", _IMAGES, "images"),
    "DeiTForImageClassification": ("DeiT", _IMAGES, "images"),
    "Dinov2ForImageClassification": ("Dinov2", {**_IMAGES, "mlp_ratio": 2}, "images"),
    "SwinForImageClassification": ("Swin", _SWIN, "images"),
    "GptOssForCausalLM": ("GptOss", {**_DECODER, **_GPT_OSS}, "tokens"),
    "MambaForCausalLM": ("Mamba", {**_MAMBA, "use_cache": False}, "tokens"),
    "Cohere2ForCausalLM": ("Cohere2", _DECODER, "tokens"),
    "Olmo3ForCausalLM": ("Olmo3", _DECODER, "tokens"),
    "SmolLM3ForCausalLM": ("SmolLM3", _DECODER, "tokens"),
    "GlmForCausalLM": ("Glm", {**_DECODER, "head_dim": 8}, "tokens"),
    "NemotronForCausalLM": ("Nemotron", _DECODER, "tokens"),
    "GraniteMoeForCausalLM": (
        "GraniteMoe",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        "tokens",
    ),
}

#: Likewise, of models that are refused where a plan has several subgroups, with what the error names.
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "Llama4ForCausalLM": (
        "Llama4Text",
        {**_DECODER, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4},
        "tokens",
        r"aten\.repeat.*Insert before it",
    ),
    "BartForSequenceClassification": (
        "Bart",
        {**_BART, "num_labels": 3},
        "rows",
        "unique_consecutive.*shape depends on the data",
    ),
    "CLIPModel": (
        "CLIP",
        {
            "text_config": {**_CLIP, "eos_token_id": 63},
            "vision_config": {k: v for k, v in _IMAGES.items() if "dropout" not in k},
            "projection_dim": 16,
        },
        "pairs",
        r"aten\.mm.*Insert before it",
    ),
}


def build(name: str, attention: str = "sdpa") -> torch.nn.Module:
    """Return a model in float64, the same on every call; experts run one by one."""
    kind, keys, *_ = {**TASKS, **REFUSED}[name]
    config = getattr(hf, f"{kind}Config")(**keys)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(hf, name)(config).double()
    if attention == "eager":
        model.set_attn_implementation("eager")
    return model.train()


def batch(name: str) -> dict[str, Any]:
    """Return the batch that a model takes, with what its loss needs."""
    kind = {**TASKS, **REFUSED}[name][2]
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (NUM_ROWS, LENGTH), generator=draw)
    labels = ids.clone()
    for row in range(NUM_ROWS):
        labels[row, 4 + row :] = -100
    classes = torch.randint(0, 3, (NUM_ROWS,), generator=draw)
    images = torch.randn(NUM_ROWS, 3, 16, 16, generator=draw, dtype=torch.double)
    ends = ids.clone()
    padded = ids.clone()
    for row in range(NUM_ROWS):
        ends[row, 5 + row % 4] = 63
        padded[row, LENGTH - row % 4 :] = 0
    batches: dict[str, dict[str, Any]] = {
        "tokens": {"input_ids": ids, "labels": labels},
        "masked tokens": {
            "input_ids": padded,
            "labels": labels,
            "attention_mask": (padded != 0).long(),
        },
        "rows": {"input_ids": ids, "labels": classes},
        "padded rows": {"input_ids": padded, "labels": classes},
        "classes of tokens": {
            "input_ids": ids,
            "labels": torch.randint(0, 3, ids.shape, generator=draw),
        },
        "spans": {
            "input_ids": ids,
            "start_positions": classes,
            "end_positions": classes + 4,
        },
        "texts": {"input_ids": ends},
        "sounds": {
            "input_features": images[:, :1].reshape(NUM_ROWS, 8, 32)[..., :20],
            "labels": labels,
        },
        "images": {"pixel_values": images, "labels": classes},
        "pairs": {"input_ids": ends, "pixel_values": images, "return_loss": True},
    }
    return batches[kind]


def loss_of(out: Any) -> Any:
    """Return the model's loss, or a number that takes its place where it has none."""
    found = getattr(out, "loss", None)
    return out.pooler_output.square().sum() if found is None else found
