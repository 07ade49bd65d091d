"""Losses as sums with counts, so that what is divided by is counted over all lanes and micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hdtensor.errors import PlanError


def causal_lm_loss(
    output: Any, labels: torch.Tensor, *, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of next tokens and the number of them, as ``transformers`` defines it.

    Args:
        output: Logits (batch, sequence, vocabulary), or what a model returns with ``logits`` in it.
        labels: (batch, sequence), not shifted.
        ignore_index: Labels that do not count.
    """
    logits = output if isinstance(output, torch.Tensor) else output.logits
    targets = labels[:, 1:].reshape(-1)
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    total = functional.cross_entropy(flat, targets, ignore_index=ignore_index, reduction="sum")
    return total, (targets != ignore_index).sum()


def read_loss(result: Any) -> tuple[torch.Tensor, Any]:
    """Return (sum, count) of what a user's ``loss_fn`` returned.

    Raises:
        PlanError: If it is anything else.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    if is_pair and isinstance(result[0], torch.Tensor) and result[0].ndim == 0:
        return result
    got = (
        f"a tensor of shape {tuple(result.shape)}"
        if isinstance(result, torch.Tensor)
        else repr(type(result).__name__)
    )
    raise PlanError(
        f"loss_fn must return (sum, count): the sum of the losses of what counts in the micro-batch, a tensor "
        f"without dims, and how many they are; got {got}. A mean of each micro-batch would weight tokens unequally: "
        f"use reduction='sum'."
    )
