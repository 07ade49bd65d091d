"""Small Hugging Face models and the training step that tests compare with one device.

The models compute in float64 but cast logits to float32 for the loss, and some their norms; tolerances are
float32's there. A large ``eps`` keeps AdamW from amplifying rounding where gradients are nearly zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hdtensor as hd
from hdtensor.tensor import HDTensor
from tests.models.families import SIZES, build


__all__ = ["SIZES", "batch", "build", "compare_gradient", "compare_training", "strategy"]


def batch(
    step: int, size: int = 8, length: int = 12, masked: bool = False
) -> dict[str, torch.Tensor]:
    """Return ids and ragged labels: rows have unlike numbers of tokens that count."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 64, (size, length), generator=generator)
    labels = ids.clone()
    for row in range(size):
        labels[row, 3 + (row * 5 + step) % (length - 3) :] = -100
    out = {"input_ids": ids, "labels": labels}
    if masked:
        mask = torch.ones_like(ids)
        for row in range(size):
            mask[row, length - row % 4 :] = 0
        out["attention_mask"] = mask
    return out


def strategy(*pipelines: tuple[list[int], int], layers: int = 2, **keys: Any) -> hd.AnnotationPlan:
    """Return a plan of one-stage pipelines, each ``(ranks, share)`` with all its ranks in TP."""
    return hd.AnnotationPlan.from_dict(
        {
            "version": 1,
            **keys,
            "pipelines": [
                {
                    "stages": [{"ranks": ranks, "layers": [0, layers - 1], "tp": len(ranks)}],
                    "share": share,
                }
                for ranks, share in pipelines
            ],
        }
    )


def compare_training(
    family: str,
    plan: hd.AnnotationPlan,
    *,
    steps: int = 4,
    masked: bool = False,
    optimizer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    lengths: tuple[int, ...] = (12,),
    size: int = 8,
    rounding: float = 0.0,
    **options: Any,
) -> None:
    """Train beside one device; every step's loss, gradients and parameters must agree.

    ``rounding`` is for models that compute more than the loss in float32: what a gradient may differ by, as a part of
    its largest element.
    """
    reference = build(family, **(model or {}))
    tested = hd.parallelize(build(family, **(model or {})), plan, **options)
    extra = optimizer or {}
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    mixed = torch.optim.AdamW(tested.parameters(), lr=1e-2, eps=1e-3, **extra)
    for step in range(steps):
        data = batch(step, size=size, length=lengths[step % len(lengths)], masked=masked)
        expected = reference(**data).loss
        expected.backward()
        loss = tested(**hd.distribute_batch(tested, data)).loss
        loss.backward()
        torch.testing.assert_close(hd.item(loss), expected.item(), rtol=1e-6, atol=0)
        for (name, p), q in zip(tested.named_parameters(), reference.parameters(), strict=True):
            compare_gradient(name, p, q, rounding)
        plain.step(), mixed.step()
        plain.zero_grad(), mixed.zero_grad()
        for (name, p), q in zip(tested.named_parameters(), reference.parameters(), strict=True):
            whole = p.detach().full_tensor()
            torch.testing.assert_close(
                whole, q.detach(), rtol=1e-5, atol=1e-7 + rounding, msg=f"{name} {step}"
            )


def compare_gradient(
    name: str, parameter: torch.Tensor, reference: torch.Tensor, rounding: float = 0.0
) -> None:
    """Compare a local part of a gradient, which must be in the parameter's spec."""
    if reference.grad is None:
        assert parameter.grad is None, f"{name} has a gradient, on one device it has none"
        return
    assert isinstance(parameter, HDTensor)
    grad = parameter.grad
    if grad is None:
        assert not parameter.is_local, f"{name} has no gradient on a rank that holds it"
        return
    assert grad.spec is parameter.spec, f"{name}: {grad.spec} instead of {parameter.spec}"
    expected = hd.distribute_tensor(reference.grad.detach().clone(), grad.spec, src_data_rank=None)
    atol = 1e-8 + rounding * reference.grad.abs().max().item()
    torch.testing.assert_close(
        grad.to_local(), expected.to_local(), rtol=1e-5, atol=atol, msg=lambda m: f"{name}: {m}"
    )


def compare_gradients(model: nn.Module, reference: nn.Module, rounding: float = 0.0) -> None:
    """Compare the local parts of all gradients with one device's."""
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), plain in pairs:
        compare_gradient(name, parameter, plain, rounding)


def backward_as(reference: nn.Module, model: nn.Module, data: dict[str, torch.Tensor]) -> None:
    """Run a forward and a backward of both; the loss must be one device's.

    Args:
        reference: On one device.
        model: Parallelized; or what ``torch.compile`` made of it.
        data: The whole batch.
    """
    expected = reference(**data).loss
    loss = model(**hd.distribute_batch(model, data)).loss
    torch.testing.assert_close(hd.item(loss), expected.item(), rtol=1e-6, atol=0)
    expected.backward()
    loss.backward()
