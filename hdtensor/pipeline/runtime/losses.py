"""Losses as sums and counts, so that the mean over all tokens does not depend on how they were cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from hdtensor._torch_compat import new_wrapper, pytree
from hdtensor.api.region_nodes import enter
from hdtensor.errors import PlanError
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements import HDSpec
from hdtensor.tensor import HDTensor


#: ``loss_fn(output, target)`` returns the sum of a micro-batch's losses, and how many they are; or a mean alone.
LossFunction = Callable[[Any, Any], tuple[torch.Tensor, Any] | torch.Tensor]


#: torch's losses ignore this target.
_IGNORED = -100


def causal_lm_loss(
    output: Any, labels: torch.Tensor, *, ignore_index: int = _IGNORED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of next tokens and the number of them, as ``transformers`` defines it.

    Args:
        output: Logits (batch, sequence, vocabulary), or what a model returns with ``logits`` in it.
        labels: (batch, sequence), not shifted.
        ignore_index: Labels that do not count.

    Raises:
        PlanError: If the batch has no labels.
    """
    if not isinstance(labels, torch.Tensor):
        raise PlanError(
            f"causal_lm_loss needs a batch with 'labels', a tensor of (batch, sequence), got {type(labels).__name__}. Add "
            f"them, or name what the batch has instead: Runner(..., targets=('name',))."
        )
    logits = output if isinstance(output, torch.Tensor) else output.logits
    targets = labels[:, 1:].reshape(-1)
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    total = functional.cross_entropy(flat, targets, ignore_index=ignore_index, reduction="sum")
    return total, (targets != ignore_index).sum()


def read_loss(result: Any) -> tuple[torch.Tensor, Any]:
    """Return (sum, count) of what a user's ``loss_fn`` returned, or (mean, None) where it is a mean alone.

    Raises:
        PlanError: If it is anything else.
    """
    if isinstance(result, tuple) and len(result) == 2:
        total, count = result
        if isinstance(total, torch.Tensor) and total.ndim == 0:
            return total, count
    if isinstance(result, torch.Tensor) and result.ndim == 0:
        return result, None
    got = (
        f"a tensor of shape {tuple(result.shape)}"
        if isinstance(result, torch.Tensor)
        else repr(type(result).__name__)
    )
    raise PlanError(
        f"loss_fn must return (sum, count): the sum of the losses of what counts in the micro-batch, a tensor "
        f"without dims (reduction='sum'), and how many they are; got {got}. A mean alone, a tensor without dims, will do "
        f"where all micro-batches have equally many targets."
    )


def num_targets(target: Any, num_rows: int) -> Any:
    """Return how many targets a micro-batch has, as a mean over them would count: a number, or a tensor without dims.

    Integer targets of -100, which torch's losses ignore, do not count. Without any tensor it is the samples.

    Args:
        target: What ``loss_fn`` gets.
        num_rows: The micro-batch's samples.
    """
    found = [t for t in pytree.tree_leaves(target) if isinstance(t, torch.Tensor)]
    if not found:
        return num_rows
    nums = [t.numel() if t.is_floating_point() else (t != _IGNORED).sum() for t in found]
    return sum(nums[1:], nums[0])


def check_means(least: float, most: float) -> Exception | None:
    """Return what is wrong with means over at least and at most so many targets; None where they weigh the same."""
    if least == most:
        return None
    return PlanError(
        f"loss_fn returns a mean alone, and the step's micro-batches have from {least:g} to {most:g} targets: the means "
        f"would weight them unequally. Return (sum, count), with reduction='sum' and the number of targets that count."
    )


class ModelLoss:
    """A ``transformers`` model's own causal loss, summed.

    The model divides its sum by the number of tokens that it is told, which here is one.
    """

    #: What the model is called with beside the labels.
    arguments: ClassVar[dict[str, Any]] = {"num_items_in_batch": 1}

    def __init__(self, model: nn.Module) -> None:
        """Look whether the model has one.

        Raises:
            PlanError: If what the model's loss counts is not known.
        """
        kind = getattr(model, "loss_type", None)
        if kind != "ForCausalLM":
            raise PlanError(
                f"loss_fn=None takes the model's own loss, which is known for causal language models of transformers "
                f"(loss_type 'ForCausalLM'), not for {type(model).__name__} (loss_type {kind!r}). Pass a loss_fn that "
                f"returns (sum, count)."
            )

    def __call__(self, output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum, and how many tokens it is over."""
        return output.loss, (labels[:, 1:] != -100).sum()


def check_auxiliary(model: nn.Module) -> None:
    """Refuse losses that are no sums over samples.

    Raises:
        PlanError: If the model computes routers' losses.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise PlanError(AUXILIARY)


#: Why routers' losses are refused.
AUXILIARY = (
    "output_router_logits: a router's auxiliary loss is a product of means over the whole batch, and no sum over "
    "micro-batches. Set config.output_router_logits = False, and add a loss that is a sum over tokens in loss_fn."
)


def plain_of(output: Any) -> Any:
    """Return what a model returned with this rank's plain local tensors in place of ``HDTensor``s."""
    if type(output) is HDTensor:
        return enter(output)
    return pytree.tree_map(lambda x: enter(x) if type(x) is HDTensor else x, output)


def zero_loss(output: Any) -> torch.Tensor | None:
    """Return a loss of zero whose backward gives every stage the zeros that it waits for; None without a graph."""
    for value in pytree.tree_leaves(output):
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if not isinstance(value, HDTensor) or value.is_local:
            return (value * 0.0).sum()
    return None


def values_of(found: Sequence[Any]) -> list[float]:
    """Return the values of losses or counts; the ranks of their stage call it together, and sum what is pending once."""
    values = [0.0 if isinstance(x, HDTensor) else float(x) for x in found]
    by_spec: defaultdict[HDSpec, list[int]] = defaultdict(list)
    for number, x in enumerate(found):
        if isinstance(x, HDTensor):
            by_spec[x.spec].append(number)
    for spec, numbers in by_spec.items():
        locals_ = torch.stack([found[i]._local_tensor.detach().double() for i in numbers])
        bound = BoundSpec.bind(spec, locals_.shape, None, locals_.dtype)
        dtensor = new_wrapper(HDTensor, locals_, bound, False).to_dtensor()
        for number, value in zip(numbers, dtensor.full_tensor().tolist(), strict=True):
            values[number] = value
    return values
