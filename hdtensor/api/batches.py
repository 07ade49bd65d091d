"""``distribute_batch``: every rank's part of a batch; ``restore_sequence``: what comes out of it, in order again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from hdtensor.api.agreement import attempt, communicates, exchange, require_alike
from hdtensor.api.collect import full_tensor
from hdtensor.api.distribute import distribute_tensor
from hdtensor.api.forward import without_compiler
from hdtensor.api.parallelize import state_of
from hdtensor.api.sequences import order_in, share_batch
from hdtensor.errors import PlanError
from hdtensor.ops.attention.tiles import in_order
from hdtensor.tensor import HDTensor


def distribute_batch(
    model: nn.Module, batch: Any, *, keep_plain: Collection[str] = ("attention_mask",)
) -> Any:
    """Cut a batch as the model's plan says: dim 0, or dim 1, in the pipelines' shares, and dim 1 inside a stage with cp.

    Args:
        model: A parallelized model.
        batch: A tensor, or a mapping, list or tuple of them; the same whole batch on every rank. Other
            values pass.
        keep_plain: Names in mappings that stay plain tensors. Hugging Face models read attention masks on
            the host to see whether they mask at all; the model's forward takes their part by itself.

    Returns:
        The same structure of ``HDTensor``s.

    Raises:
        DisagreementError: On every rank, if the ranks' first batches differ: each rank must pass the whole batch, not a
            part of its own as a distributed sampler gives. Later batches are not compared.
    """
    state = state_of(model)
    spec = state.plan.inputs
    if not state.is_batch_checked and communicates():
        _check_same_batch(batch)
        state.is_batch_checked = True
    if state.plan.shared_sequences is not None:
        return share_batch(without_compiler(model), state.plan, batch, keep_plain)

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim:
            return distribute_tensor(value, spec, src_data_rank=None)
        if isinstance(value, Mapping):
            return {k: v if k in keep_plain else cut(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(cut(v) for v in value)
        return value

    return cut(batch)


def _check_same_batch(batch: Any) -> None:
    """Compare a batch's shapes and checksums over all ranks."""
    mine, problem = attempt(lambda: batch_facts(batch))
    require_alike(
        "distribute_batch",
        exchange("distribute_batch", mine, problem),
        "Every rank passes the same whole batch; distribute_batch takes each rank's part.",
    )


def batch_facts(value: Any) -> Any:
    """Return shapes, element types and checksums of a batch's tensors, to be compared with other ranks'."""
    if isinstance(value, torch.Tensor):
        total = value.double().sum().item() if not value.is_complex() else 0.0
        return (tuple(value.shape), str(value.dtype), repr(total))
    if isinstance(value, Mapping):
        return tuple((str(k), batch_facts(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(batch_facts(v) for v in value)
    return type(value).__name__


def restore_sequence(
    model: nn.Module, tensor: HDTensor, length: int, *, dim: int = 1
) -> torch.Tensor:
    """Return a result of the model whole and plain, its positions in order; every rank of the world calls it.

    A plan that shares sequences may fill them up and order them anew (``distribute_batch``); this undoes both.

    Args:
        model: A parallelized model.
        tensor: A result with a sequence, such as logits.
        length: Number of positions of the batch that ``distribute_batch`` was given.
        dim: The dim of the sequence.

    Raises:
        PlanError: If the tensor has fewer positions than that.
    """
    plan = state_of(model).plan
    padded = tensor.shape[dim]
    if padded < length:
        raise PlanError(
            f"restore_sequence: dim {dim} of the tensor of shape {tuple(tensor.shape)} has fewer than "
            f"{length} positions. Give the length of the batch, and the dim of its sequence."
        )
    whole = full_tensor(tensor)
    order = order_in(plan)
    spans = None if order is None else order(padded)
    return in_order(whole, spans, dim).narrow(dim, 0, length)
