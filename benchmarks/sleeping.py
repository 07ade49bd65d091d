"""Layers that sleep instead of computing, so that the number of cores does not matter."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    """Passes a tensor on after a while, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        _wait(x, seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _wait(grad, 2 * ctx.seconds)
        return grad, None


def _wait(x: torch.Tensor, seconds: float) -> None:
    """Sleep where the rank holds a part of the tensor."""
    if getattr(x, "is_local", True):
        time.sleep(seconds)


class _Layer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a product, some time later."""
        return _Sleep.apply(self.proj(x), self.seconds)


class SleepingModel(nn.Module):
    """Embedding, layers that take a given time forward and twice that backward, and a head."""

    def __init__(self, num_layers: int, seconds: float, width: int = 16) -> None:
        """Build the model.

        Args:
            num_layers: Number of layers.
            seconds: How long the forward of one takes on this rank.
            width: Size of hidden states.
        """
        super().__init__()
        self.embed_tokens = nn.Embedding(32, width)
        self.layers = nn.ModuleList(_Layer(width, seconds) for _ in range(num_layers))
        self.lm_head = nn.Linear(width, 32, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, sequence, 32)."""
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def batch(num: int, length: int = 8) -> dict[str, torch.Tensor]:
    """Return token ids and labels, the same on every rank."""
    ids = torch.randint(0, 32, (num, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}
