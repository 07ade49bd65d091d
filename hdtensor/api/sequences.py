"""Batches whose sequences are shared: padded to whole shares, labels shifted before they are cut, rows in the plan's order."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from hdtensor.api.context_parallel import Order, PlanOrder
from hdtensor.api.distribute import distribute_tensor
from hdtensor.errors import PlanError
from hdtensor.ops.attention.shares import block_sizes, order_of, padded_length
from hdtensor.ops.attention.tiles import Span, arranged
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec
from hdtensor.plan import ExpandedPlan


_IGNORED = -100

_BATCH, _SEQUENCE = 0, 1

#: What a longer batch is filled up with, by name; 0 for other names.
_FILL = {"labels": _IGNORED, "shift_labels": _IGNORED}


def order_in(plan: ExpandedPlan) -> Order | None:
    """Return the order of the rows of a plan's sequences, by their length; None for that of the positions."""
    sharing = plan.shared_sequences
    if sharing is None or sharing.order == "contiguous":
        return None
    return PlanOrder(plan.inputs, sharing.order)


@dataclass(frozen=True, slots=True)
class _Shares:
    """How the tensors of one batch are cut.

    Attributes:
        spec: Spec of what has a sequence.
        length: Number of positions, as given.
        padded: Number of positions of what the model gets.
        order: Positions of the rows, None for their own order.
    """

    spec: HDSpec
    length: int
    padded: int
    order: tuple[Span, ...] | None

    def has_sequence(self, value: torch.Tensor) -> bool:
        return value.ndim > _SEQUENCE and value.shape[_SEQUENCE] == self.length

    def arrange(self, value: torch.Tensor, fill: Any, dim: int = _SEQUENCE) -> torch.Tensor:
        """Return a tensor of the padded length, its rows in the plan's order."""
        missing = self.padded - self.length
        if missing:
            shape = list(value.shape)
            shape[dim] = missing
            value = torch.cat([value, value.new_full(shape, fill)], dim)
        return arranged(value, self.order, dim)

    def cut(self, value: torch.Tensor) -> Any:
        """Distribute a tensor that is arranged."""
        sizes = block_sizes(self.spec, self.padded)
        return distribute_tensor(value, self.spec, src_data_rank=None, top_sizes=sizes)

    def cut_without_sequence(self, value: torch.Tensor) -> Any:
        """Distribute a tensor that has no sequence: by the batch, if pipelines share that."""
        whole = self.spec.map_bottom(lambda _: Replicate())
        if checks.shard_dim(whole.top) == _SEQUENCE:
            whole = whole.replace(top=Replicate())
        return distribute_tensor(value, whole, src_data_rank=None)


def share_batch(
    model: nn.Module, plan: ExpandedPlan, batch: Any, keep_plain: Collection[str]
) -> Any:
    """Cut a batch whose sequences, dim 1, are shared.

    For a causal language model of Hugging Face the batch is filled up to a length that all ranks share evenly, and
    ``shift_labels`` are added, which its loss takes instead of shifting the labels itself. Under another order than the
    positions' it also gets ``position_ids`` and, where some positions are padding, a mask [batch, 1, rows, keys].

    Args:
        model: A parallelized model.
        plan: Its plan.
        batch: As ``distribute_batch`` takes it.
        keep_plain: Names in mappings that stay plain tensors.

    Raises:
        PlanError: If rows in another order would not be told their positions.
    """
    is_causal_lm = isinstance(batch, Mapping) and _shifts_labels(model)
    shares = _shares_of(plan, batch, fill_up=is_causal_lm)
    if isinstance(batch, Mapping):
        batch = dict(batch)
        if is_causal_lm:
            _shift_labels(batch)
    if shares.order is not None:
        _tell_positions(model, batch, shares)

    def cut(value: Any, name: str = "") -> Any:
        if isinstance(value, torch.Tensor) and value.ndim:
            if not shares.has_sequence(value):
                return value if name in keep_plain else shares.cut_without_sequence(value)
            filled = _filled(shares, value, name)
            stays = name in keep_plain or (name == "position_ids" and value.shape[_BATCH] == 1)
            return filled if stays else shares.cut(filled)
        if isinstance(value, Mapping):
            return {k: cut(v, str(k)) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(cut(v) for v in value)
        return value

    cut_batch = cut(batch)
    if shares.order is not None:
        _replace_mask(model, batch, cut_batch, shares)
    return cut_batch


def _shares_of(plan: ExpandedPlan, batch: Any, fill_up: bool) -> _Shares:
    length = _length_of(batch)
    sharing = plan.shared_sequences
    assert sharing is not None, "asked for plans that share sequences"
    padded = padded_length(plan.inputs, length) if fill_up else length
    return _Shares(plan.inputs, length, padded, order_of(plan.inputs, padded, sharing.order))


def _length_of(batch: Any) -> int:
    """Return the number of positions: dim 1 of the input ids, or of the first tensor that has one."""
    if isinstance(batch, Mapping):
        named = [batch[name] for name in ("input_ids", "inputs_embeds") if name in batch]
        values = [v for v in (*named, *batch.values()) if v is not None]
    else:
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim > _SEQUENCE:
            return value.shape[_SEQUENCE]
    raise PlanError(
        "distribute_batch: the plan shares sequences, dim 1 of the batch's tensors, but no tensor has one. Pass "
        "tensors [batch, sequence, ...]."
    )


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the loss is that of causal models of ``transformers``, the default of older names (GPT-2)."""
    kind = getattr(model, "loss_type", "")
    return kind == "ForCausalLM" or (kind is None and type(model).__name__.endswith("LMHeadModel"))


def _shift_labels(batch: dict[str, Any]) -> None:
    """Put each position's next label at the position, before the sequence is cut."""
    labels = batch.get("labels")
    if labels is None:
        return
    if batch.get("shift_labels") is None:
        following = labels[:, 1:]
        end = labels.new_full((labels.shape[0], 1), _IGNORED)
        batch["shift_labels"] = torch.cat([following, end], _SEQUENCE)
    batch["labels"] = batch["shift_labels"]  # says that a loss is wanted; its values are not read


def _filled(shares: _Shares, value: torch.Tensor, name: str) -> torch.Tensor:
    if name == "position_ids" and shares.padded > shares.length:
        more = torch.arange(1, shares.padded - shares.length + 1, device=value.device)
        value = torch.cat([value, value[:, -1:] + more], _SEQUENCE)
        return _Shares(shares.spec, shares.padded, shares.padded, shares.order).arrange(value, 0)
    return shares.arrange(value, _FILL.get(name, 0))


# -- another order ----------------------------------------------------------------------------------------------------


def _tell_positions(model: nn.Module, batch: Any, shares: _Shares) -> None:
    """Add the rows' positions to a batch.

    Raises:
        PlanError: If the model does not take them, or the batch has others.
    """
    takes = "position_ids" in inspect.signature(type(model).forward).parameters
    if not isinstance(batch, dict) or not takes:
        raise PlanError(
            f"sequence_order: rows are not in the order of their positions, so the model must take position_ids; "
            f"{type(model).__name__}.forward does not, or the batch is no mapping. Use sequence_order 'contiguous'."
        )
    positions = torch.arange(shares.length, device=_device_of(batch)).unsqueeze(0)
    given = batch.get("position_ids")
    if given is not None and not torch.equal(given, positions.expand_as(given)):
        raise PlanError(
            "sequence_order: the batch has position_ids other than 0, 1, 2, ..., such as several texts in a row, and "
            "causal attention by position would mix them. Use sequence_order 'contiguous'."
        )
    batch["position_ids"] = positions
    if batch.get("attention_mask") is None:
        # With a mask, Hugging Face models do not look for texts in a row among the positions.
        rows = next(
            v.shape[_BATCH]
            for v in batch.values()
            if isinstance(v, torch.Tensor) and shares.has_sequence(v) and v is not positions
        )
        batch["attention_mask"] = torch.ones(
            rows, shares.length, dtype=torch.long, device=positions.device
        )


def _window_of(model: nn.Module) -> int | None:
    """Return how many positions attention of a model of ``transformers`` reaches back at least, None for all."""
    config = getattr(model, "config", None)
    windows = [
        getattr(config, name, None)
        for name in ("sliding_window", "attention_chunk_size")
        if getattr(config, "use_sliding_window", True)
    ]
    return min((w for w in windows if w), default=None)


def _device_of(batch: Mapping[str, Any]) -> torch.device:
    return next(v.device for v in batch.values() if isinstance(v, torch.Tensor))


def _replace_mask(
    model: nn.Module, batch: Mapping[str, Any], cut_batch: dict[str, Any], shares: _Shares
) -> None:
    """Put a mask by positions in the place of one that the model would take by rows.

    Raises:
        PlanError: If the mask would also take the place of a window that the model has.
    """
    mask = batch["attention_mask"]
    window = _window_of(model)
    has_window = window is not None and shares.padded >= window
    if mask.ndim == 2 and bool(mask.all()):
        rows = torch.ones(mask.shape[0], shares.padded, dtype=mask.dtype, device=mask.device)
        rows._hides_nothing = not has_window  # type: ignore[attr-defined]
        cut_batch["attention_mask"] = rows
        return
    if has_window:
        raise PlanError(
            f"sequence_order: the model's attention has a window of {window} positions, and a mask that hides some of "
            f"{shares.padded} in another order than theirs would take its place. Use sequence_order 'contiguous'."
        )
    if mask.ndim == 2:
        seen = torch.ones(shares.length, shares.length, dtype=torch.bool, device=mask.device).tril()
        mask = seen & mask.bool()[:, None, None, :]
    fill: Any = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    ordered = shares.arrange(shares.arrange(mask, fill, 2), fill, 3)
    ordered._is_ordered = True  # type: ignore[attr-defined]
    cut_batch["attention_mask"] = ordered
