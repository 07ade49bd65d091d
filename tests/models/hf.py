"""Small Hugging Face models and the training step that tests compare with one device.

The models compute in float64 but cast logits to float32 for the loss; tolerances are float32's there. A large
``eps`` keeps AdamW from amplifying rounding where gradients are nearly zero.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

import hdtensor as hd
from hdtensor.tensor import HDTensor


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


def build(family: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Return a model in float64, the same for the same seed."""
    sizes = {**SIZES, **changes}
    if family == "llama":
        config = transformers.LlamaConfig(**sizes)
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).double()
    config = transformers.Qwen3Config(**sizes, head_dim=8)
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(config).double()


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


def strategy(*pipelines: tuple[list[int], int]) -> hd.AnnotationPlan:
    """Return a plan of one-stage pipelines, each ``(ranks, share)`` with all its ranks in TP."""
    return hd.AnnotationPlan.from_dict(
        {
            "version": 1,
            "pipelines": [
                {"stages": [{"ranks": ranks, "layers": [0, 1], "tp": len(ranks)}], "share": share}
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
    **options: Any,
) -> None:
    """Train beside one device; every step's loss, gradients and parameters must agree."""
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
            compare_gradient(name, p, q)
        plain.step(), mixed.step()
        plain.zero_grad(), mixed.zero_grad()
        for (name, p), q in zip(tested.named_parameters(), reference.parameters(), strict=True):
            whole = p.detach().full_tensor()
            torch.testing.assert_close(
                whole, q.detach(), rtol=1e-5, atol=1e-7, msg=f"{name} {step}"
            )


def compare_gradient(name: str, parameter: torch.Tensor, reference: torch.Tensor) -> None:
    """Compare a local part of a gradient, which must be in the parameter's spec."""
    assert isinstance(parameter, HDTensor)
    grad = parameter.grad
    if grad is None:
        assert not parameter.is_local, f"{name} has no gradient on a rank that holds it"
        return
    assert grad.spec is parameter.spec, f"{name}: {grad.spec} instead of {parameter.spec}"
    expected = hd.distribute_tensor(reference.grad.detach().clone(), grad.spec, src_data_rank=None)
    torch.testing.assert_close(
        grad.to_local(), expected.to_local(), rtol=1e-5, atol=1e-8, msg=lambda m: f"{name}: {m}"
    )
