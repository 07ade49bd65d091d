"""``save_checkpoint``, ``load_checkpoint``: a training's state, under whatever plan it was and will be.

Both call ``torch.distributed.checkpoint``, and its files are torch's: ``dcp.load`` reads them, and these read what
``dcp.save`` wrote under the names ``model`` and ``optimizer``. What they add: every problem is found before a tensor
changes, listed at once, and raised alike on every rank.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hdtensor._rank import current_rank
from hdtensor.api.agreement import attempt, communicates
from hdtensor.api.forward import without_compiler
from hdtensor.api.masters import Masters, masters_of
from hdtensor.checkpoint import history
from hdtensor.checkpoint.agreement import agree, describe, listing
from hdtensor.checkpoint.checks import CheckedPlanner, CheckedReader, folder_of
from hdtensor.checkpoint.option_groups import regrouped, saved_groups
from hdtensor.errors import CheckpointError


#: Where a checkpoint has the masters that have more bits than the parameters.
MASTERS = "masters"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model's and an optimizer's state into a folder; every rank of the world calls it.

    Args:
        path: The folder; all ranks must see the same file system.
        model: Its parameters and persistent buffers are written.
        optimizer: Its states and options are written, under the parameters' names; and what it updates, where that has more
            bits than the parameters (zero 1).
        extra: Plain values and tensors, such as the number of steps; rank 0's are written.

    Raises:
        CheckpointError: On every rank, if one cannot write, or a tensor has a reduction pending.
    """
    model = without_compiler(model)
    state, problem = attempt(lambda: _state_to_save(path, model, optimizer, extra))
    agree("save_checkpoint", problem)
    assert state is not None, "without a problem there is a state"
    with _converted("save_checkpoint"):
        dcp.save(state, checkpoint_id=path, no_dist=not communicates())


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Read a model's and an optimizer's state, in place, whatever plan wrote them; every rank of the world calls it.

    Args:
        path: The folder.
        model: Parallelized by any plan, or plain.
        optimizer: Need not have made a step.
        strict: Raise where the checkpoint lacks a tensor or has others. Otherwise those stay as they are.

    Returns:
        What was saved as ``extra``; ``{}`` without.

    Raises:
        CheckpointError: Alike on every rank: a file is missing, cut off or damaged, or names, shapes or dtypes differ;
            all of them are listed. Nothing was changed then, unless a file is damaged inside, as the message says.
    """
    model = without_compiler(model)
    ready, problem = attempt(lambda: _to_read(path, model, optimizer))
    agree("load_checkpoint", problem)
    assert ready is not None, "without a problem there is a state"
    reader, state = ready
    groups = None if optimizer is None else _groups(path, state["optimizer"], strict)
    planner = CheckedPlanner(strict, tuple(f"{name}." for name in state))
    with _converted("load_checkpoint"):
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=not communicates())
    masters = _masters(model, optimizer)
    if masters is not None:
        # First of all: setting an optimizer's state may take a step of size 0, after which parameters are gathered.
        masters.follow_parameters(but=state.get(MASTERS, {}))
        if MASTERS in state:
            masters.gather()
    if optimizer is not None:
        if groups is not None:
            state["optimizer"]["param_groups"] = groups
        # LBFGS has one state for all parameters.
        is_partial = isinstance(optimizer, torch.optim.LBFGS)
        options = StateDictOptions(strict=not is_partial)
        owner = _owner(model, masters)
        set_optimizer_state_dict(owner, optimizer, state["optimizer"], options=options)
    packed = state.get("extra")
    return {} if packed is None else torch.load(io.BytesIO(packed), weights_only=True)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    masters = _masters(model, optimizer)
    if optimizer is not None:
        if isinstance(optimizer, torch.optim.LBFGS):
            history.begin(optimizer)
        with _without_gradients(optimizer):
            state["optimizer"] = get_optimizer_state_dict(_owner(model, masters), optimizer)
    beyond = {} if masters is None else masters.beyond_parameters()
    if beyond:
        state[MASTERS] = beyond
    return state


def _masters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Masters | None:
    return None if optimizer is None else masters_of(model, optimizer)


def _owner(model: nn.Module, masters: Masters | None) -> nn.Module:
    """Return the module that has what the optimizer updates, under the model's names."""
    return model if masters is None else masters.module


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put gradients aside: where there are some, torch makes no state for an optimizer that has none."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in params]
    if optimizer.state:
        yield
        return
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad


def _state_to_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    state = _state(model, optimizer)
    folder = folder_of(path)
    if current_rank() == 0:
        if extra is not None:
            state["extra"] = _pack(extra)
        # A checkpoint that was here ends now: half of it beside half of the new one would look whole.
        (folder / ".metadata").unlink(missing_ok=True)
    return state


def _to_read(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[CheckedReader, dict[str, Any]]:
    reader = CheckedReader(folder_of(path))
    metadata = reader.metadata_or_error()
    state = _state(model, optimizer)
    if not any(name.startswith(f"{MASTERS}.") for name in metadata.state_dict_metadata):
        state.pop(MASTERS, None)  # then masters begin as the parameters
    if isinstance(optimizer, torch.optim.LBFGS):
        history.expect(state["optimizer"], "optimizer", metadata)
    if "extra" in metadata.state_dict_metadata:
        state["extra"] = b""
    return reader, state


def _groups(
    path: str | os.PathLike[str], state: dict[str, Any], strict: bool
) -> list[dict[str, Any]] | None:
    """Return the optimizer's groups with the checkpoint's options where its groups are others, and make room for these."""
    reader = CheckedReader(path)
    saved = saved_groups(reader.metadata_or_error(), "optimizer")
    if not saved:
        return None
    wanted = {"optimizer": {"param_groups": saved}}
    with _converted("load_checkpoint"):
        dcp.load(
            wanted,
            storage_reader=reader,
            planner=CheckedPlanner(False, ()),
            no_dist=not communicates(),
        )
    saved = wanted["optimizer"]["param_groups"]
    groups, problem = attempt(lambda: regrouped(state["param_groups"], saved, strict))
    agree("load_checkpoint", problem)
    if groups is not None:
        state["param_groups"] = saved
    return groups


def _pack(extra: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(dict(extra), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"extra takes plain values and tensors, which load without running code ({error}). Turn what else there is "
            f"into a dict, as its state_dict() does."
        ) from error
    return buffer.getvalue()


@contextmanager
def _converted(function: str) -> Iterator[None]:
    """Raise torch's error, which is the same on every rank, as ours."""
    try:
        with warnings.catch_warnings():
            # One process is what the caller has, and knows.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        failures = {rank: describe(met[0]) for rank, met in error.failures.items()}
        raise CheckpointError(f"{function}: {listing(failures)}") from error
