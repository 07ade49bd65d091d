"""ZeRO-1: the tensors that the optimizer updates, each cut over all ranks that hold its parameter (App. C).

A master is a parameter's value in fp32 (fp64 for a parameter of that type), in the spec of ``zero_specs``; so are its
gradient and its optimizer state. After a step of the optimizer the parameters are gathered from them.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hdtensor._torch_compat import new_wrapper
from hdtensor.api.local import prepare_groups
from hdtensor.collectives import groups, observe
from hdtensor.errors import PlanError
from hdtensor.ops.bound import BoundSpec
from hdtensor.pipeline.zero_specs import Parameter, split_copies, zero_specs
from hdtensor.placements import HDSpec
from hdtensor.redistribute.execute import BUCKET_BYTES, execute, start_many
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import RedistributePlan
from hdtensor.tensor import HDTensor


class _Entry(NamedTuple):
    """One parameter and its master.

    Attributes:
        name: The parameter's first name.
        parameter: What the model computes with.
        master: What the optimizer updates.
        cut: The plan from the parameter's copies to the master.
        gather: The plan back.
    """

    name: str
    parameter: HDTensor
    master: HDTensor
    cut: RedistributePlan
    gather: RedistributePlan


class ShardedMasters:
    """The masters of a model's parameters.

    Attributes:
        module: A module whose parameters are the masters, under the parameters' names.
        by_parameter: The masters by the ids of their parameters, in registration order.
    """

    def __init__(self, model: nn.Module, free_bytes: Mapping[int, int] | None = None) -> None:
        """Cut masters from the parameters; every rank of the world calls it.

        Args:
            model: Parallelized.
            free_bytes: As for ``zero_specs``.

        Raises:
            PlanError: As ``zero_specs``.
        """
        named = list(_updated(model).items())
        parameters = [Parameter(name, p.spec, tuple(p.shape)) for name, p in named]
        ways = _ways(parameters, zero_specs(parameters, free_bytes))
        _prepare(ways)
        self._entries = [
            _Entry(name, p, _master(p, cut), cut, gather)
            for (name, p), (cut, gather) in zip(named, ways, strict=True)
        ]
        self.by_parameter = {id(entry.parameter): entry.master for entry in self._entries}
        self._ids = {id(entry.master) for entry in self._entries}
        self._parameter_ids = {id(entry.parameter) for entry in self._entries}
        self.module = _tree({entry.name: entry.master for entry in self._entries})
        self._seen = self._versions()
        _hook(self)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer updates masters."""
        return any(id(p) in self._ids for p in _tensors(optimizer))

    def beyond_parameters(self) -> dict[str, torch.Tensor]:
        """Return the masters, by name, that have more bits than their parameters."""
        return {e.name: e.master for e in self._entries if e.master.dtype != e.parameter.dtype}

    @torch.no_grad()
    def follow_parameters(self, *, but: Container[str] = (), only_written: bool = False) -> None:
        """Take the parameters' values; nothing is communicated.

        Args:
            but: Names of masters that keep their own.
            only_written: Take those only that somebody wrote to since they were gathered.
        """
        for entry, old, new in zip(self._entries, self._seen, self._versions(), strict=True):
            if entry.name not in but and (old != new or not only_written):
                local = execute(entry.cut, entry.parameter._local_tensor)
                entry.master._local_tensor.copy_(local)
                torch.autograd.graph.increment_version(entry.master)
        self._seen = self._versions()

    @torch.no_grad()
    def gather(self, only: Iterable[torch.Tensor] | None = None) -> None:
        """Give the parameters the masters' values; every rank of the world calls it.

        Args:
            only: The masters that changed; default all.
        """
        wanted = self._ids if only is None else {id(master) for master in only}
        entries = [entry for entry in self._entries if id(entry.master) in wanted]
        # While one bucket is written the next is on its way.
        with observe.because("parameters"), observe.profiled("parameter_gather"):
            ahead = _started(_runs(entries))
            for run, finish in ahead:
                for entry, local in zip(run, finish(), strict=True):
                    entry.parameter._local_tensor.copy_(local)
        torch.autograd.graph.increment_version([entry.parameter for entry in entries])
        self._seen = self._versions()

    def named(self) -> dict[str, HDTensor]:
        """Return the masters, each under its parameter's name with a mark that tells the two apart."""
        return {_mark(entry.name): entry.master for entry in self._entries}

    def specs_under(self, tensors: Mapping[str, HDSpec]) -> dict[str, HDSpec]:
        """Return the masters' specs, by the names of ``named``, once parameters have others.

        Args:
            tensors: Name of each parameter -> its spec then.
        """
        specs = zero_specs(self._parameters(tensors))
        return {_mark(name): spec for name, spec in specs.items()}

    def prepare(self, tensors: Mapping[str, HDSpec]) -> None:
        """Create the groups that masters need under other specs of parameters; every rank of the world calls it."""
        parameters = self._parameters(tensors)
        _prepare(_ways(parameters, zero_specs(parameters)))

    def follow_specs(self) -> None:
        """Find the ways between parameters and masters anew, after all have other specs."""
        parameters = [
            Parameter(e.name, e.parameter.spec, tuple(e.master.shape)) for e in self._entries
        ]
        ways = _ways(parameters, {e.name: e.master.spec for e in self._entries})
        self._entries = [
            entry._replace(cut=cut, gather=gather)
            for entry, (cut, gather) in zip(self._entries, ways, strict=True)
        ]
        self._seen = self._versions()

    def fits(self, model: nn.Module) -> bool:
        """Return whether these are the masters of all parameters that the model has now."""
        wanted = {id(p) for p in _updated(model).values()}
        return wanted == self._parameter_ids

    def _parameters(self, tensors: Mapping[str, HDSpec]) -> list[Parameter]:
        return [Parameter(e.name, tensors[e.name], tuple(e.master.shape)) for e in self._entries]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer updates parameters that have masters.

        Raises:
            PlanError: Otherwise its step would be undone, or do nothing.
        """
        if any(id(p) in self._parameter_ids for p in _tensors(optimizer)):
            raise PlanError(
                f"the {type(optimizer).__name__} updates parameters of a model with zero 1, whose gradients and values are "
                f"those of masters. Build it from runner.optimizer_parameters()."
            )

    def _versions(self) -> list[tuple[int, int]]:
        """Return what changes with every write: operators count on the wrapper, what writes inside of it there."""
        parameters = [entry.parameter for entry in self._entries]
        return [(p._version, p._local_tensor._version) for p in parameters]


def _updated(model: nn.Module) -> dict[str, Any]:
    """Return the parameters that have masters, by their first names."""
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and (p.is_floating_point() or p.is_complex())
    }


def _mark(name: str) -> str:
    return f"{name} (master)"


def _ways(
    parameters: Iterable[Parameter], specs: Mapping[str, HDSpec]
) -> list[tuple[RedistributePlan, RedistributePlan]]:
    """Return the plans from each parameter's copies to its master, and back."""
    ways = []
    for name, spec, shape in parameters:
        copies = split_copies(spec)
        ways.append((resolve(copies, specs[name], shape), resolve(specs[name], copies, shape)))
    return ways


def _prepare(ways: Sequence[tuple[RedistributePlan, RedistributePlan]]) -> None:
    """Create the groups of masters; every rank of the world calls it."""
    prepare_groups(*dict.fromkeys(cut.dst for cut, _ in ways))
    groups.ensure_groups(sorted({ranks for _, gather in ways for ranks in gather.rank_sets()}))


def _master(parameter: HDTensor, cut: RedistributePlan) -> HDTensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    local = execute(cut, parameter._local_tensor.detach()).to(dtype, copy=True)
    bound = BoundSpec.bind(cut.dst, parameter.shape, None, dtype)
    return nn.Parameter(new_wrapper(HDTensor, local, bound, False))  # type: ignore[return-value]


def _runs(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Yield entries in their order, some 25 MiB of the largest share at a time; alike on every rank."""
    run: list[_Entry] = []
    size = 0
    for entry in entries:
        run.append(entry)
        size += entry.parameter.numel() * entry.parameter.dtype.itemsize
        if size >= BUCKET_BYTES:
            yield run
            run, size = [], 0
    if run:
        yield run


def _started(
    runs: Iterable[list[_Entry]],
) -> Iterator[tuple[list[_Entry], Callable[[], list[torch.Tensor]]]]:
    """Start each run's gather, and yield it once the next has started."""
    before: tuple[list[_Entry], Callable[[], list[torch.Tensor]]] | None = None
    for run in runs:
        locals_ = [entry.master._local_tensor.to(entry.parameter.dtype) for entry in run]
        with observe.ahead():
            now = run, start_many([entry.gather for entry in run], locals_)
        if before is not None:
            yield before
        before = now
    if before is not None:
        yield before


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _hook(masters: ShardedMasters) -> None:
    """Have every optimizer's step looked at, as long as the masters live."""
    reference = weakref.ref(masters)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = reference()
        if found is not None:
            found.check(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = reference()
        if found is not None and found.holds(optimizer):
            found.gather(_tensors(optimizer))

    for handle in (
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ):
        weakref.finalize(masters, handle.remove)


def _tree(named: Mapping[str, HDTensor]) -> nn.Module:
    """Return a module that has tensors under names with dots."""
    root = nn.Module()
    for name, tensor in named.items():
        *path, last = name.split(".")
        functools.reduce(_child, path, root).register_parameter(last, tensor)  # type: ignore[arg-type]
    return root


def _child(module: nn.Module, name: str) -> nn.Module:
    if name not in module._modules:
        module.add_module(name, nn.Module())
    return module.get_submodule(name)
