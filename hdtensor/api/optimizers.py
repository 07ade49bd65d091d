"""Optimizers that look at whole matrices or read values: Adafactor, Muon and LBFGS by torch's own calls.

Adafactor and Muon take a matrix at a time: it is brought to one rank, the first that holds a part, torch's own code runs
there, and each rank gets back what it holds. So copies of a parameter stay alike to the bit, on unlike devices too, and a
rank that holds nothing has nothing to do. Momentum and moments stay cut as the parameters are. LBFGS is in ``lbfgs.py``.

Importing this module puts these functions before two of torch's own, which run as they are where no ``HDTensor`` is passed:
Muon's and Adafactor's ``step`` take all parameters at a time, so that a hook around it could not bring them one by one. LBFGS
needs no more than torch's hooks around a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hdtensor._torch_compat import extend_optimizers, new_wrapper
from hdtensor.api import lbfgs
from hdtensor.api.distribute import distribute_tensor
from hdtensor.collectives import observe
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.tensor import HDTensor


def orthogonalize(
    original: Callable[..., torch.Tensor], update: torch.Tensor, *options: Any, **named: Any
) -> torch.Tensor:
    """Return Muon's orthogonal matrix for an update, cut as the update is."""
    if not isinstance(update, HDTensor):
        return original(update, *options, **named)
    with observe.because("Muon"):
        home = _home(update)
        # torch's code begins with this conversion: half as many bytes move.
        half: Any = update.bfloat16()
        local = _at_home(half, home)
        return _back(original(local, *options, **named), update, home)


def factorize(
    original: Callable[..., None],
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    *others: Any,
    **options: Any,
) -> None:
    """Take Adafactor's step: ``others`` are the lists of row, column and whole moments, of steps, and what follows them."""
    lists, rest = [params, grads, *others[:4]], others[4:]
    cut = [i for i, p in enumerate(params) if isinstance(p, HDTensor)]
    if not cut:
        original(params, grads, *others, **options)
        return
    plain = [i for i, p in enumerate(params) if not isinstance(p, HDTensor)]
    if plain:
        original(*([values[i] for i in plain] for values in lists), *rest, **options)
    with observe.because("Adafactor"):
        for i in cut:
            *tensors, step = (values[i] for values in lists)
            _factorize_one(original, tensors, step, rest, options)


@torch.compiler.disable
def _factorize_one(
    original: Callable[..., None],
    tensors: Sequence[Any],
    step: torch.Tensor,
    rest: Sequence[Any],
    options: dict[str, Any],
) -> None:
    home = _home(tensors[0])
    locals_ = [None if t is None else _at_home(t, home) for t in tensors]
    original(*([local] for local in locals_), [step], *rest, **options)
    for place, (tensor, local) in enumerate(zip(tensors, locals_, strict=True)):
        if local is not None and place != 1:  # the gradient is only read
            tensor.copy_(_back(local, tensor, home))


def _home(tensor: HDTensor) -> HDSpec:
    """Return the spec of a tensor that its first rank holds whole."""
    return HDSpec([Subgroup((tensor.spec.ranks[0],))])


def _at_home(tensor: HDTensor, home: HDSpec) -> torch.Tensor:
    """Return the whole tensor on its home.

    All others get an element, or none if there is none, of as many dims: what torch's code refuses there it refuses here.
    """
    moved = tensor.redistribute(home)
    if moved.is_local:
        return moved._local_tensor
    return moved._local_tensor.new_zeros([min(1, size) for size in tensor.shape])


def _back(local: torch.Tensor, like: HDTensor, home: HDSpec) -> HDTensor:
    """Return what home has of a tensor, cut as another of its shape."""
    bound = BoundSpec.bind(home, like.shape, None, local.dtype)
    local = local.contiguous() if bound.index is not None else local.new_empty(0)
    moved = new_wrapper(HDTensor, local, bound, False)
    return moved.redistribute(like.spec, top_sizes=like.top_sizes)


def before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Cut a state of one device that was loaded, and have an LBFGS run over cut parameters.

    Any other step runs as it is. ``load_state_dict`` and pickles give an optimizer another ``state``, which tells when to look.
    """
    if torch.compiler.is_compiling():  # nothing of this is for a graph
        return None
    if isinstance(optimizer, torch.optim.LBFGS):
        return lbfgs.begin_step(optimizer, args, kwargs)
    state = optimizer.state
    if _seen.get(optimizer) is not state:
        for parameter, values in state.items():
            if isinstance(parameter, HDTensor) and isinstance(values, dict):
                _cut_like(parameter, values)
        _seen[optimizer] = state
    return None


#: The ``state`` of each optimizer that was looked at.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()


def _cut_like(parameter: HDTensor, values: dict[str, Any]) -> None:
    """Cut plain tensors of a parameter's shape as it is; factors, with dims of one, are whole where it lies.

    Every rank has them whole. Steps are counted by plain numbers.
    """
    shape = parameter.shape
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, HDTensor) or key == "step":
            continue
        spec, top_sizes = parameter.spec, parameter.top_sizes
        if value.shape != shape:
            if (
                not value.ndim
                or value.ndim != parameter.ndim
                or any(a not in (1, b) for a, b in zip(value.shape, shape, strict=True))
            ):
                continue
            spec, top_sizes = spec.replace(top=Replicate()).map_bottom(lambda _: Replicate()), None
        values[key] = distribute_tensor(
            value.detach(), spec, top_sizes=top_sizes, src_data_rank=None
        )


def after_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Tidy up what an LBFGS keeps."""
    if isinstance(optimizer, torch.optim.LBFGS):
        lbfgs.end_step(optimizer)


extend_optimizers(factorize, orthogonalize)
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
