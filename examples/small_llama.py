"""The model that the examples train, and how: the same wherever it is built."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from stdlib_functions import BEGIN, END, VOCABULARY_SIZE
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR
from transformers import LlamaConfig, LlamaForCausalLM


SEED = 0
WARMUP_STEPS = 10


def build_model(context: int) -> LlamaForCausalLM:
    """Return the model, with the same weights wherever it is built.

    Args:
        context: Tokens of the longest row.
    """
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=BEGIN,
        eos_token_id=END,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def build_optimizer(parameters: Iterable[Tensor], lr: float) -> tuple[torch.optim.AdamW, LinearLR]:
    """Return AdamW and its warmup.

    Args:
        parameters: What to update.
        lr: Learning rate after the warmup.
    """
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    warmup = LinearLR(optimizer, start_factor=1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    return optimizer, warmup
