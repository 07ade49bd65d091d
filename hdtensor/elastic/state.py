"""What a switch moves: parameters, gradients and whatever an optimizer keeps, as one list on every rank.

A rank that joins has no gradients and no optimizer state yet. Ranks compare what they have, and one that
lacks something, and holds no part of it, is given the empty shell of it: wrappers without elements, and
the values of plain numbers such as ``step``.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import new_wrapper
from hdtensor.api.agreement import attempt, communicates, exchange
from hdtensor.api.lbfgs import vector_spec
from hdtensor.errors import DisagreementError, SwitchError
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements import HDSpec, check_top_sizes
from hdtensor.placements.checks import is_cut, shard_dim
from hdtensor.placements.normal_form import normalized
from hdtensor.placements.text import as_spec
from hdtensor.tensor import HDTensor


class Slot(NamedTuple):
    """One tensor that is brought to another spec in place.

    Attributes:
        name: What errors and reports call it.
        tensor: The tensor.
        dst: What it shall be.
    """

    name: str
    tensor: HDTensor
    dst: BoundSpec


#: Where something lies: the optimizer's number (-1 for gradients), the parameter's, and keys.
_Path: TypeAlias = tuple[Any, ...]

#: Plain tensors up to this many elements are told to ranks that lack them.
_MAX_TOLD = 4096


def parameter_slots(
    parameters: Mapping[str, torch.Tensor], specs: Mapping[str, HDSpec]
) -> list[Slot]:
    """Return the slots of parameters.

    Raises:
        SwitchError: If a parameter is no ``HDTensor``, or the plan does not name it.
    """
    slots = []
    seen: dict[int, str] = {}
    for name, tensor in parameters.items():
        if id(tensor) in seen:
            raise SwitchError(
                f"{name!r} and {seen[id(tensor)]!r} are the same tensor; name it once."
            )
        seen[id(tensor)] = name
        if not isinstance(tensor, HDTensor):
            raise SwitchError(
                f"the parameter {name!r} is a plain {type(tensor).__name__}; only HDTensors are switched. "
                f"Call parallelize, or distribute_tensor, first."
            )
        if name not in specs:
            raise SwitchError(f"the plan says nothing of the parameter {name!r}.")
        slots.append(Slot(name, tensor, target(tensor._spec, specs[name])))
    return slots


def extra_slots(extra: Mapping[str, tuple[HDTensor, HDSpec | str]]) -> list[Slot]:
    """Return the slots of further tensors, name -> (tensor, new spec).

    Raises:
        SwitchError: As ``parameter_slots``.
        SpecError: If a spec is none.
    """
    slots = []
    for name, (tensor, spec) in extra.items():
        slots += parameter_slots({name: tensor}, {name: as_spec(spec)})
    return slots


def check_optimizers(
    parameters: Sequence[Slot], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise unless each optimizer has a parameter of the model.

    Raises:
        SwitchError: Otherwise.
    """
    known = {id(slot.tensor) for slot in parameters}
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SwitchError(f"optimizer {number} is a {type(optimizer).__name__}.")
        if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            raise SwitchError(
                f"optimizer {number} ({type(optimizer).__name__}) has no parameter of this model."
            )


def state_slots(
    parameters: Sequence[Slot], optimizers: Sequence[torch.optim.Optimizer]
) -> list[Slot]:
    """Return the slots of all gradients and optimizer states, the same list on every rank.

    Collective: every rank of the world calls it.

    Args:
        parameters: ``parameter_slots``'s.
        optimizers: Their parameters are among these.

    Raises:
        DisagreementError: If ranks of the source have unlike states.
        SwitchError: If a state cannot be moved: it is cut in a way that does not follow from its
            parameter's cut.
    """
    number_of = {id(slot.tensor): i for i, slot in enumerate(parameters)}
    found = dict(_walk(parameters, optimizers, number_of))
    _complete(found, parameters, optimizers)
    ranks = sorted({rank for slot in parameters for rank in slot.dst.spec.ranks})
    slots = []
    for path, value in sorted(found.items(), key=lambda pair: repr(pair[0])):
        if not isinstance(value, HDTensor):
            continue
        if path[0] >= 0 and isinstance(optimizers[path[0]], torch.optim.LBFGS):
            # A vector of all parameters: on the plan's ranks, until the next step takes it.
            slots.append(
                Slot(_name(path, parameters), value, target(value._spec, vector_spec(ranks)))
            )
        else:
            slots.append(_state_slot(path, value, parameters[path[1]]))
    return slots


def target(bound: BoundSpec, spec: HDSpec) -> BoundSpec:
    """Return what a tensor becomes under another spec; its shape and strides stay."""
    spec = normalized(spec, len(bound.shape))
    sizes = check_top_sizes(spec, bound.shape, None)
    return BoundSpec.of(spec, bound.shape, bound.stride, bound.dtype, sizes)


def _walk(
    parameters: Sequence[Slot],
    optimizers: Sequence[torch.optim.Optimizer],
    number_of: Mapping[int, int],
) -> Iterator[tuple[_Path, Any]]:
    for i, slot in enumerate(parameters):
        if slot.tensor.grad is not None:
            yield (-1, i), slot.tensor.grad
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            place = number_of.get(id(parameter))
            if place is not None:
                yield from _leaves((number, place), state)


def _leaves(path: _Path, value: Any) -> Iterator[tuple[_Path, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
        for key, inner in enumerate(value):
            yield from _leaves((*path, key), inner)
    else:
        yield path, value


def _describe(value: Any) -> tuple[Any, ...]:
    """Return what another rank must know to have the same, without the elements of shards."""
    if isinstance(value, HDTensor):
        bound = value._spec
        return "cut", bound.spec, tuple(bound.shape), bound.stride, bound.dtype, bound.top_sizes
    if isinstance(value, torch.Tensor):
        told = value.detach().cpu() if value.numel() <= _MAX_TOLD else None
        return "plain", tuple(value.shape), value.dtype, told
    return "value", value


def _kind(description: tuple[Any, ...]) -> Any:
    """Return the part of a description that ranks must agree in."""
    return description[:-1] if description[0] == "plain" else description


def _complete(
    found: dict[_Path, Any],
    parameters: Sequence[Slot],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Give this rank what the others have and it lacks."""
    if not communicates():
        return
    mine = {path: _describe(value) for path, value in found.items()}
    digest = hashlib.sha256(
        repr(sorted((repr(path), repr(_kind(d))) for path, d in mine.items())).encode()
    ).hexdigest()
    said = exchange("switch", (len(mine), digest), None)
    if all(other == said[0] for other in said):
        return
    leader = max(range(len(said)), key=lambda rank: (said[rank][0], -rank))
    is_leader = dist.get_rank() == leader
    packed, problem = attempt(lambda: pickle.dumps(mine) if is_leader else b"")
    exchange("switch", None, problem)
    told: list[Any] = [packed]
    dist.broadcast_object_list(told, src=leader)
    _, problem = attempt(lambda: _adopt(found, mine, pickle.loads(told[0]), parameters, optimizers))
    exchange("switch", None, problem)


def _adopt(
    found: dict[_Path, Any],
    mine: Mapping[_Path, tuple[Any, ...]],
    theirs: Mapping[_Path, tuple[Any, ...]],
    parameters: Sequence[Slot],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    rank = dist.get_rank()
    for path, description in mine.items():
        if path not in theirs or _kind(theirs[path]) != _kind(description):
            raise DisagreementError(
                f"rank {rank} has {_name(path, parameters)} as {_shown(description)}, another rank "
                f"{_shown(theirs.get(path))}. Every rank must have made the same optimizer steps."
            )
    for path, description in theirs.items():
        if path in mine:
            continue
        if description[0] == "cut" and rank in description[1].ranks:
            raise DisagreementError(
                f"rank {rank} holds a part of {parameters[path[1]].name!r} but lacks "
                f"{_name(path, parameters)}, which others have. Load it from a checkpoint."
            )
        found[path] = _build(path, description, parameters)
        _put(path, found[path], parameters, optimizers)


def _build(path: _Path, description: tuple[Any, ...], parameters: Sequence[Slot]) -> Any:
    match description:
        case ("cut", spec, shape, stride, dtype, top_sizes):
            bound = BoundSpec.of(spec, shape, stride, dtype, top_sizes)
            local = parameters[path[1]].tensor._local_tensor.new_empty(0, dtype=dtype)
            return new_wrapper(HDTensor, local, bound, False)
        case ("plain", _, _, told) if told is not None:
            return told.clone()
        case ("value", value):
            return value
    raise DisagreementError(
        f"{_name(path, parameters)} is a plain tensor of {description[1]}; it is too large to be told to "
        f"a rank that lacks it. Distribute it, or load it from a checkpoint."
    )


def _put(
    path: _Path,
    value: Any,
    parameters: Sequence[Slot],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    number, place, *keys = path
    tensor = parameters[place].tensor
    if number == -1:
        tensor.grad = value
        return
    home: Any = optimizers[number].state[tensor]
    for key, after in itertools.pairwise(keys):
        empty: Any = [] if isinstance(after, int) else {}
        if isinstance(home, list):
            home.extend([None] * (key + 1 - len(home)))
            home[key] = empty if home[key] is None else home[key]
            home = home[key]
        else:
            home = home.setdefault(key, empty)
    if isinstance(home, list):
        home.extend([None] * (keys[-1] + 1 - len(home)))
    home[keys[-1]] = value


def _state_slot(path: _Path, tensor: HDTensor, parameter: Slot) -> Slot:
    """Return the slot of a gradient or a state: cut as its parameter is, on the dims that it has."""
    name = _name(path, [parameter] * (path[1] + 1))
    bound, spec = tensor._spec, parameter.dst.spec
    if bound.spec.has_partial():
        raise SwitchError(
            f"{name} has a pending reduction, {bound.spec}; call sync_gradients, or redistribute it, first."
        )
    is_alike = tensor.shape == parameter.tensor.shape
    if not _is_cut(bound.spec) and not (is_alike and not _is_cut(parameter.tensor._spec.spec)):
        spec = _without_cuts(spec)  # whole on every rank, as Adafactor's factors are: it stays so
    elif not is_alike:
        spec = _on_dims(tensor, parameter)
    return Slot(name, tensor, target(bound, spec))


def _is_cut(spec: HDSpec) -> bool:
    return is_cut(spec.top) or any(is_cut(p) for group in spec.subgroups for p in group.placements)


def _without_cuts(spec: HDSpec) -> HDSpec:
    return spec.map_bottom(lambda p: Replicate() if is_cut(p) else p).replace(top=Replicate())


def _on_dims(tensor: HDTensor, parameter: Slot) -> HDSpec:
    """Return the parameter's new spec with Replicate where the tensor's dim is not the parameter's."""
    shape, whole = tuple(tensor.shape), tuple(parameter.tensor.shape)
    spec = parameter.dst.spec
    same_dims = len(shape) == len(whole)
    if same_dims and any(a not in (b, 1) for a, b in zip(shape, whole, strict=True)):
        same_dims = False

    def keep(p: Placement) -> Placement:
        dim = shard_dim(p)
        return p if dim is None or (same_dims and shape[dim] == whole[dim]) else Replicate()

    return spec.map_bottom(keep).replace(top=keep(spec.top))


def _name(path: _Path, parameters: Sequence[Slot]) -> str:
    number, place, *keys = path
    if number == -1:
        return f"{parameters[place].name}.grad"
    return f"{parameters[place].name}:{'.'.join(map(str, keys))}"


def _shown(description: tuple[Any, ...] | None) -> str:
    match description:
        case ("cut", spec, shape, _, dtype, _):
            return f"a {dtype} of shape {shape} cut by {spec}"
        case ("plain", shape, dtype, _):
            return f"a plain {dtype} of shape {shape}"
        case ("value", value):
            return repr(value)
    return "not at all"
