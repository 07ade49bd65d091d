"""Lending a program to another rank: its tensors take that rank's shape, without values, and are given back at the end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hdtensor._torch_compat import FakeTensorMode, new_wrapper, pytree, without_modes
from hdtensor.ops.bound import BoundSpec
from hdtensor.tensor import HDTensor, accumulated_grad


@dataclass(slots=True)
class _Lent:
    """What a tensor was before."""

    tensor: Tensor
    local: Tensor | None
    bound: BoundSpec | None
    grad: Tensor | None


class Loan:
    """The tensors that one rank's run uses, each with that rank's local shape.

    Tensors stay the same objects, so that hooks, optimizers and closures that know them are met as they are.

    Attributes:
        names: Name of each tensor from outside by the id of its local tensor.
        inputs: These local tensors, and plain tensors.
        leaves: Tensors that backward gives gradients, by name.
        tensors: All tensors from outside, ``HDTensor``s as such.
        modules: The modules that were found, the outermost first.
    """

    def __init__(self, rank: int, mode: FakeTensorMode) -> None:
        """Begin with nothing lent; ``rank`` must be played already, and ``mode`` be entered."""
        self.rank = rank
        self.names: dict[int, str] = {}
        self.inputs: list[Tensor] = []
        self.leaves: dict[str, Tensor] = {}
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self._mode = mode
        self._lent: dict[int, _Lent] = {}
        self._optimizers: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []
        self._seen: dict[int, Any] = {}

    def lend(self, value: Any, name: str) -> Any:
        """Return an argument for the run.

        Args:
            value: Tensors in nested containers, modules, optimizers, functions that know some.
            name: What to call it.
        """
        paths, tree = pytree.tree_flatten_with_path(value)
        lent = [self._argument(leaf, name + pytree.keystr(path)) for path, leaf in paths]
        return pytree.tree_unflatten(lent, tree)

    def meet(self, tensor: HDTensor) -> None:
        """Lend a tensor that the run has found by itself."""
        if tensor._spec.rank != self.rank or not self._is_fake(tensor._local_tensor):
            self._lend_tensor(tensor, f"tensor_{len(self.inputs)}")

    @property
    def is_meta(self) -> bool:
        """Whether a tensor is on the meta device, where the operators of no device are known."""
        return any(tensor.is_meta for tensor in self.tensors)

    def give_back(self) -> None:
        """Have everything be as it was."""
        for lent in self._lent.values():
            if lent.bound is not None:
                tensor: Any = lent.tensor
                tensor._local_tensor, tensor._spec = lent.local, lent.bound
            lent.tensor.grad = lent.grad
        for optimizer, state in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update({p: dict(values) for p, values in state.items()})

    def _argument(self, value: Any, name: str) -> Any:
        if isinstance(value, HDTensor) and not value.is_leaf:
            # Its history is the caller's: backward must not run into that.
            bound = _as_seen(value._spec)
            local = self._fake_local(value, bound)
            value = new_wrapper(HDTensor, local, bound, value.requires_grad)
            self._note(value, value._local_tensor, name)
            return value
        if isinstance(value, Tensor) and not isinstance(value, HDTensor | nn.Parameter):
            return self._plain(value, name)
        self._visit(value, name)
        return value

    def _plain(self, tensor: Tensor, name: str) -> Tensor:
        known = self._seen.get(id(tensor))
        if known is None:
            known = self._mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
            self._seen[id(tensor)] = known
            self._seen[id(known)] = tensor  # keeps it, and so its id
            self._note(known, known, name)
        return known

    def _visit(self, value: Any, name: str) -> None:
        """Lend what an object holds."""
        if isinstance(value, HDTensor):
            self._lend_tensor(value, name)
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            if isinstance(value, nn.Module):
                self._lend_module(value, name)
            elif isinstance(value, torch.optim.Optimizer):
                self._lend_optimizer(value, name)
            else:
                for inner, part in _parts_of(value, name):
                    self._visit(part, inner)

    def _lend_module(self, module: nn.Module, name: str) -> None:
        prefix = f"{name}." if name else ""
        self.modules.append(module)
        for path, parameter in (*module.named_parameters(), *module.named_buffers()):
            self._lend_tensor(parameter, prefix + path)
        for inner in module.modules():  # what it was compiled to, or hooks, are not looked into
            self._seen.setdefault(id(inner), inner)

    def _lend_optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        state = {p: dict(values) for p, values in optimizer.state.items()}
        self._optimizers.append((optimizer, state))
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                own = f"{name}.param_groups[{i}][{j}]"
                self._lend_tensor(parameter, own)
                own = self.names.get(id(local_of(parameter)), own)
                for key, value in state.get(parameter, {}).items():
                    if isinstance(value, HDTensor):
                        self._lend_tensor(value, f"{own}.{key}")
                    elif isinstance(value, Tensor):
                        optimizer.state[parameter][key] = self._plain(value, f"{own}.{key}")

    def _lend_tensor(self, tensor: Tensor, name: str) -> None:
        if id(tensor) in self._lent:
            return
        if not isinstance(tensor, HDTensor):
            self._lent[id(tensor)] = _Lent(tensor, None, None, tensor.grad)
            tensor.grad = None
            self._note(tensor, tensor, name)
            return
        grad = accumulated_grad(tensor) if tensor.is_leaf else None
        self._lent[id(tensor)] = _Lent(tensor, tensor._local_tensor, tensor._spec, grad)
        if tensor.is_leaf:
            tensor.grad = None
        bound = _as_seen(tensor._spec)
        tensor._local_tensor, tensor._spec = self._fake_local(tensor, bound), bound
        self._note(tensor, tensor._local_tensor, name)

    def like(self, local: Tensor, name: str) -> Tensor:
        """Return a tensor from outside that is like another."""
        with without_modes(), self._mode:
            made = torch.empty_like(local.detach())
        self._name(made, name)
        return made

    def _name(self, local: Tensor, name: str) -> None:
        self.names[id(local)] = name
        self.inputs.append(local)

    def _note(self, tensor: Tensor, local: Tensor, name: str) -> None:
        self._name(local, name)
        self.tensors.append(tensor)
        if tensor.requires_grad and tensor.is_leaf:
            self.leaves[name] = tensor

    def _fake_local(self, tensor: HDTensor, bound: BoundSpec) -> Tensor:
        local = tensor._local_tensor
        with without_modes(), self._mode:
            if bound is tensor._spec:  # its own rank: also its strides
                return torch.empty_strided(
                    local.shape, local.stride(), dtype=local.dtype, device=local.device
                )
            return torch.empty(bound.local_shape(), dtype=local.dtype, device=local.device)

    def _is_fake(self, local: Tensor) -> bool:
        return getattr(local, "fake_mode", None) is self._mode


def _as_seen(bound: BoundSpec) -> BoundSpec:
    """Return a tensor's layout as the rank that is played now sees it."""
    parts = (bound.spec, bound.shape, bound.stride, bound.dtype, bound.top_sizes, bound.is_copy)
    return BoundSpec.of(*parts)


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: a plain one itself."""
    return tensor._local_tensor if isinstance(tensor, HDTensor) else tensor


def _parts_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function or a container holds, with names."""
    if isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"{name}.{i}", part) for i, part in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, MethodType | FunctionType):
        yield from _known_to(value)
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())


def _known_to(value: MethodType | FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function knows beside its arguments, with its name."""
    if isinstance(value, MethodType):
        yield "", value.__self__
        value = value.__func__  # type: ignore[assignment]
    function: Callable[..., Any] = inspect.unwrap(value)
    if not isinstance(function, FunctionType):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        known = _content(cell)
        if known is not None:
            yield name, known
    for name in code.co_names:
        known = function.__globals__.get(name)
        if isinstance(known, Tensor | nn.Module | torch.optim.Optimizer) or _is_own(known):
            yield name, known
    for known in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "default", known


def _is_own(known: Any) -> bool:
    """Return whether this is a function of the program, not of a library that knows no tensors of it."""
    if not isinstance(known, FunctionType):
        return False
    return (known.__module__ or "").partition(".")[0] not in ("torch", "hdtensor")


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
