"""The same Llama on each side: plain torch, DTensor and hdtensor, with the same plan."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from transformers import LlamaConfig, LlamaForCausalLM

import hdtensor as hd


NUM_HEADS = 4
NUM_KV_HEADS = 2


def config(
    num_layers: int,
    *,
    hidden: int = 128,
    degree: int = 1,
    heads: int = NUM_HEADS,
    kv_heads: int = NUM_KV_HEADS,
) -> LlamaConfig:
    """Return a small Llama's configuration.

    Attention is "eager": DTensor has no rule for the CPU's fused attention.

    Args:
        num_layers: Decoder layers.
        hidden: Hidden size.
        degree: Tensor-parallel degree of which this is one rank's part, for the plain side.
        heads: Attention heads of the whole model.
        kv_heads: Key and value heads of the whole model.
    """
    return LlamaConfig(
        hidden_size=hidden,
        head_dim=hidden // heads,
        intermediate_size=2 * hidden // degree,
        num_hidden_layers=num_layers,
        num_attention_heads=heads // degree,
        num_key_value_heads=kv_heads // degree,
        vocab_size=256,
        max_position_embeddings=512,
        attn_implementation="eager",
        use_cache=False,
    )


def model(
    num_layers: int, *, hidden: int = 128, heads: int = NUM_HEADS, kv_heads: int = NUM_KV_HEADS
) -> LlamaForCausalLM:
    """Return the plain model; the same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config(num_layers, hidden=hidden, heads=heads, kv_heads=kv_heads))


def tensor_parallel(num_layers: int, ranks: tuple[int, ...]) -> hd.AnnotationPlan:
    """Return the plan of one subgroup that shares each layer.

    For one rank the plan is that of two with the second left out: weights are cut over a mesh of size 1.
    """
    if len(ranks) > 1:
        return _plan(num_layers, [ranks])
    pair = (ranks[0], ranks[0] + 1)
    text = _plan(num_layers, [pair]).expand(model(num_layers)).to_json()
    return hd.AnnotationPlan.from_json(text.replace(f"{pair[0]},{pair[1]}:", f"{ranks[0]}:"))


def data_parallel(num_layers: int, ranks: tuple[int, ...]) -> hd.AnnotationPlan:
    """Return the plan of one subgroup for each rank, with equal shares of the batch."""
    return _plan(num_layers, [(rank,) for rank in ranks])


def _plan(num_layers: int, subgroups: list[tuple[int, ...]]) -> hd.AnnotationPlan:
    stages = [{"ranks": list(g), "layers": [0, num_layers - 1], "tp": len(g)} for g in subgroups]
    pipelines = [{"stages": [stage], "share": 1} for stage in stages]
    return hd.AnnotationPlan.from_dict({"version": 1, "pipelines": pipelines})


# -- DTensor --------------------------------------------------------------------------------------------------


def parallelize_with_dtensor(
    module: nn.Module, plan: hd.AnnotationPlan, mesh: DeviceMesh
) -> nn.Module:
    """Give a model the same plan with DTensor, in place.

    Parameters get the plan's placements and its redistribute points become hooks, as with
    ``parallelize_module``'s styles, but outputs stay DTensors (``use_local_output=False``). A plan with one
    subgroup for each rank is DTensor's replication over the mesh.
    """
    expanded = plan.expand(module)
    for owner_name, owner in module.named_modules():
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None:
                spec = expanded.tensors[f"{owner_name}.{key}"]
                placements = (
                    [Replicate()] if spec.num_subgroups > 1 else spec.subgroups[0].placements
                )
                tensor = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                owner._parameters[key] = nn.Parameter(tensor)
    for point in expanded.points:
        target = module.get_submodule(point.module)
        if point.side == "output":
            target.register_forward_hook(_replicate_output)
        else:
            target.register_forward_pre_hook(_replicate_inputs, with_kwargs=True)
    return module


def _replicate_output(module: nn.Module, args: Any, output: Any) -> Any:
    return output.redistribute(placements=[Replicate()])


def _replicate_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Do nothing in forward; in backward bring the gradient, which is pending, to ``Replicate``."""

    def mark(value: Any) -> Any:
        is_input = isinstance(value, DTensor) and value.requires_grad
        return value.redistribute(placements=[Replicate()]) if is_input else value

    return tuple(map(mark, args)), {name: mark(value) for name, value in kwargs.items()}


def bring_gradients_home(module: nn.Module) -> None:
    """Redistribute DTensor gradients to their parameters' placements, as hdtensor does by itself."""
    for parameter in module.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


@contextlib.contextmanager
def plain_tensors_allowed() -> Iterator[None]:
    """Let DTensor and hdtensor operators take plain tensors as replicated."""
    with implicit_replication(), hd.implicit_replication():
        yield


# -- plain torch, one rank's part -------------------------------------------------------------------------------


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        torch.distributed.all_reduce(total)
        return total


def plain_part(whole: LlamaForCausalLM, degree: int, rank: int) -> LlamaForCausalLM:
    """Return one rank's part of a tensor-parallel Llama by hand: smaller layers and four all-reduces a layer."""
    if degree == 1:
        return copy.deepcopy(whole)
    old = whole.config
    sizes = {"heads": old.num_attention_heads, "kv_heads": old.num_key_value_heads}
    part = LlamaForCausalLM(
        config(old.num_hidden_layers, hidden=old.hidden_size, degree=degree, **sizes)
    )
    state = dict(whole.state_dict())
    for name, wanted in part.state_dict().items():
        for dim, (mine, theirs) in enumerate(zip(wanted.shape, state[name].shape, strict=True)):
            if mine != theirs:
                state[name] = state[name].narrow(dim, rank * mine, mine)
    part.load_state_dict(state)
    for layer in part.model.layers:
        for block in (layer.self_attn, layer.mlp):
            block.register_forward_pre_hook(_sum_backward_hook, with_kwargs=True)
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.register_forward_hook(lambda module, args, output: _SumForward.apply(output))
    return part


def _sum_backward_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
    if args:
        return (_SumBackward.apply(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _SumBackward.apply(kwargs["hidden_states"])}


def sum_gradients(module: nn.Module) -> None:
    """All-reduce a plain model's gradients over all ranks in one buffer, as data-parallel training does."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    torch.distributed.all_reduce(flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def training_step(
    module: nn.Module,
    batch: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    after_backward: Callable[[nn.Module], None] | None = None,
) -> torch.Tensor:
    """Run forward, backward and optimizer; return the loss. Gradients are gone afterwards."""
    loss = module(**batch).loss
    loss.backward()
    if after_backward is not None:
        after_backward(module)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()
