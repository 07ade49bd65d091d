"""What ``parallelize`` puts around a model's ``forward`` and ``generate``.

Inside ``forward`` plain tensors (masks, positions, rotary tables) stand beside ``HDTensor``s. ``generate`` decides on the host
after every token, so each rank of the world calls it with the same whole prompt and runs the same loop on plain tensors: the
model's inputs are cut on the way in, its results are whole and plain on the way out, and the KV cache stays cut in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hdtensor.api.agreement import attempt, communicates, exchange, require_alike
from hdtensor.api.changes import Upkeep
from hdtensor.api.collect import full_tensor
from hdtensor.api.context_parallel import without_mask
from hdtensor.api.distribute import distribute_tensor
from hdtensor.api.implicit import implicit_replication
from hdtensor.collectives import observe
from hdtensor.errors import PlanError
from hdtensor.plan import ExpandedPlan
from hdtensor.tensor import HDTensor


class State(Protocol):
    """The part of ``ParallelState`` that is read and written here."""

    plan: ExpandedPlan
    upkeep: Upkeep
    depth: int
    generating: int
    wants_router_logits: bool
    runs_lane: bool

    @property
    def is_staged(self) -> bool: ...


#: Arguments of a forward that are cut as the batch; the rest (masks, positions, a cache) stays as it is.
_CUT = ("input_ids", "inputs_embeds")


def without_compiler(model: nn.Module) -> nn.Module:
    """Return the model that ``torch.compile`` wrapped; another model itself."""
    return model._modules.get("_orig_mod") or model


def accept_plain(model: nn.Module, state: State, reinstall: Callable[[], None]) -> None:
    """Let the model's forward take plain tensors beside ``HDTensor``s, and count its running calls.

    Args:
        model: The model.
        state: What ``parallelize`` knows of it.
        reinstall: Called before a forward if the model's parameters are others than at the last one.
    """
    forward = model.forward

    @functools.wraps(forward)
    def accepting(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            state.wants_router_logits = _wants_router_logits(model, kwargs)
            with implicit_replication():
                return forward(*args, **without_mask(kwargs))
        # While a lane runs, leaves of its own stand in for the parameters.
        if not state.runs_lane and not state.upkeep.is_current():
            state.upkeep.look(model, reinstall)
        if state.is_staged and not state.runs_lane:
            raise PlanError(
                "the model's plan has several stages in a pipeline, so that no rank can run it alone, or zero 1. Train it "
                "with hdtensor.pipeline.Runner(model, plan).step(batch), or use a plan of one stage in each pipeline and "
                "zero 0."
            )
        if observe.listeners and not state.depth:
            _announce_plain(model, args, kwargs)
        state.depth += 1
        state.wants_router_logits = _wants_router_logits(model, kwargs)
        try:
            with implicit_replication():
                if state.generating and state.depth == 1:
                    return _step(forward, state.plan, args, kwargs)
                return forward(*args, **kwargs)
        finally:
            state.depth -= 1

    model.forward = accepting


def _announce_plain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell who listens of the plain tensors among a forward's arguments, which must be the same on every rank."""
    if not communicates():
        return
    named = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
    facts = "; ".join(text for name, value in named.items() for text in _plain_in(name, value))
    if facts:
        observe.announce(
            f"the forward of {type(model).__name__} with plain tensors, which must be the same on every rank "
            f"(hdtensor.distribute_batch(model, batch) cuts a batch),",
            range(dist.get_world_size()),
            facts,
        )


def _plain_in(name: str, value: Any) -> list[str]:
    if isinstance(value, tuple | list):
        return [text for i, v in enumerate(value) for text in _plain_in(f"{name}[{i}]", v)]
    if isinstance(value, dict):
        return [text for k, v in value.items() for text in _plain_in(f"{name}[{k!r}]", v)]
    if not isinstance(value, torch.Tensor) or isinstance(value, HDTensor | DTensor):
        return []
    return [f"{name} {str(value.dtype)[6:]} {list(value.shape)} of checksum {_checksum(value)}"]


def _checksum(value: torch.Tensor) -> str:
    """Return a number that depends on every value and on its place."""
    numbers = torch.view_as_real(value) if value.is_complex() else value
    numbers = numbers.detach().double().flatten()
    weights = torch.arange(numbers.numel(), device=numbers.device) % 8191 + 1
    return f"{float((numbers * weights).sum()):.17g}"


def _wants_router_logits(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    config = getattr(model, "config", None)
    return bool(kwargs.get("output_router_logits", getattr(config, "output_router_logits", False)))


def make_generate_collective(model: nn.Module, state: State) -> None:
    """Have ``generate``, if the model has it, return plain tokens on every rank of the world."""
    generate = getattr(model, "generate", None)
    if not callable(generate):
        return

    @functools.wraps(generate)
    def generating(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_whole, args))
        kwargs = {name: _whole(value) for name, value in kwargs.items()}
        if communicates():
            _check_alike(model, args, kwargs)
        state.generating += 1
        # What model.compile() compiled keeps to HDTensors, while this loop's results are plain.
        compiled, model._compiled_call_impl = model._compiled_call_impl, None
        try:
            with torch.no_grad(), implicit_replication():
                return generate(*args, **kwargs)
        finally:
            state.generating -= 1
            model._compiled_call_impl = compiled

    model.generate = generating  # type: ignore[assignment]


def own_generate(model: nn.Module) -> None:
    """Give a model the ``generate`` of its class back."""
    if hasattr(model.__dict__.get("generate"), "__wrapped__"):
        del model.generate


def _step(
    forward: Callable[..., Any], plan: ExpandedPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the forward of one token, or of the prompt."""

    def cut(value: Any) -> Any:
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, HDTensor)
        return distribute_tensor(value, plan.inputs, src_data_rank=None) if is_plain else value

    args = (cut(args[0]), *args[1:]) if args else args
    result = forward(*args, **{k: cut(v) if k in _CUT else v for k, v in kwargs.items()})
    if isinstance(result, Mapping):
        for name, value in result.items():
            result[name] = _whole(value)  # type: ignore[index]
        return result
    return _whole(result)


def _whole(value: Any) -> Any:
    """Return a value with plain whole tensors in place of ``HDTensor``s; a cache is left alone."""
    if isinstance(value, HDTensor):
        return full_tensor(value)
    if type(value) in (tuple, list):
        return type(value)(map(_whole, value))
    return value


def _check_alike(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on every rank if the prompts differ, or, where tokens are drawn, the generators.

    Raises:
        DisagreementError: It lists what each rank passed.
    """

    def facts() -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        prompts = [(tuple(t.shape), str(t.dtype), float(t.double().sum())) for t in tensors]
        return prompts, _draws(model, kwargs) and hash(tuple(torch.get_rng_state().tolist()))

    said = exchange("generate", *attempt(facts))
    require_alike(
        "generate",
        said,
        "Every rank of the world passes the same whole prompt; to draw tokens call torch.manual_seed(n) with one n "
        "on every rank before.",
    )


def _draws(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    return bool(kwargs.get("do_sample", getattr(config, "do_sample", False)))
