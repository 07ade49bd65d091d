"""``executable_graph``: the graph of any rank, from one process and without process groups."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdtensor._rank import as_rank
from hdtensor._torch_compat import (
    DataDependentOutputException,
    new_wrapper,
    pytree,
    traced_composites,
)
from hdtensor.debug.graph import ExecutableGraph
from hdtensor.debug.graph_builder import Builder
from hdtensor.debug.modules import ModuleTracker
from hdtensor.debug.played import Loan, local_of
from hdtensor.debug.recording import Recorder, fake_mode
from hdtensor.errors import DeductionError, SpecError
from hdtensor.ops.special.move import gradient_bound
from hdtensor.tensor import HDTensor


def executable_graph(
    fn: Callable[..., Any], /, *args: Any, rank: int, **kwargs: Any
) -> ExecutableGraph:
    """Return what one rank would run of ``fn(*args, **kwargs)``: its own operators and communication, nothing else.

    ``fn`` runs once on tensors that have shapes and no values; nothing is computed, sent, or changed. It may be called in
    one process without process groups, or on any rank for any other. Where ``fn`` runs no backward itself and its results
    require grad, their backward follows. ``fn`` may be a whole training step: the optimizer's operators are then part of
    ``post``. What was compiled runs as it was before. Paper: section 6, appendix A.2.

    Args:
        fn: A function or a module. Modules, optimizers and tensors that it refers to are found as the arguments are.
        args: Its arguments: ``HDTensor``s as any rank holds them, plain tensors, anything else.
        rank: Whose graph; any rank of the specs, or one outside of all.
        kwargs: Its keyword arguments.

    Raises:
        SpecError: If there is no such rank.
        DeductionError: If ``fn`` reads a value. What else it raises is passed on, with a note of the rank.
    """
    _check_rank(rank)
    title = _title(fn)
    mode = fake_mode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_rank(rank))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        loan = Loan(rank, mode)
        stack.callback(loan.give_back)
        function = loan.lend(fn, "" if isinstance(fn, nn.Module) else title)
        names = _argument_names(fn, len(args))
        args = tuple(loan.lend(a, name) for a, name in zip(args, names, strict=True))
        kwargs = {key: loan.lend(value, key) for key, value in kwargs.items()}
        where = _tracker(stack, loan.modules)
        recorder = Recorder(loan.meet, where)
        try:
            # On the meta device it would have operators run as kernels that autograd does not know.
            with contextlib.nullcontext() if loan.is_meta else traced_composites(), mode, recorder:
                results = function(*args, **kwargs)
                outputs = _outputs(results)
                if not recorder.recording.has_backward:
                    _run_backward(outputs, loan)
        except DataDependentOutputException as error:
            raise DeductionError(
                f"{title} reads a value ({error}), and an executable graph is made without values. Call "
                f"executable_graph with a function that leaves item(), bool(t) and loops over values out."
            ) from error
        except Exception as error:
            error.add_note(f"while the executable graph of rank {rank} was made of {title}")
            raise
        return Builder(recorder.recording, loan, outputs).build(rank, title)


def _check_rank(rank: Any) -> None:
    if type(rank) is not int or rank < 0:
        raise SpecError(f"rank is the number of a rank, an int from 0 on, got {rank!r}.")
    if dist.is_initialized() and rank >= dist.get_world_size():
        raise SpecError(
            f"there is no rank {rank}: the world has ranks 0 to {dist.get_world_size() - 1}."
        )


def _title(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _argument_names(fn: Any, count: int) -> list[str]:
    """Return the names of the first positional arguments of a function."""
    function = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*names[:count], *(f"arg_{i}" for i in range(len(names), count))]


def _tracker(stack: contextlib.ExitStack, modules: Sequence[nn.Module]) -> Callable[[], str]:
    """Return what tells the running module, of the first one that the program knows."""
    if not modules:
        return lambda: ""
    tracker = ModuleTracker(modules[0])
    stack.enter_context(tracker)
    return tracker.current


def _outputs(results: Any) -> list[tuple[str, Tensor]]:
    paths, _ = pytree.tree_flatten_with_path(results)
    return [
        (f"result{pytree.keystr(path)}", leaf) for path, leaf in paths if isinstance(leaf, Tensor)
    ]


def _run_backward(outputs: Sequence[tuple[str, Tensor]], loan: Loan) -> None:
    """Run the backward of the results, from gradients in the layouts that a compiler takes them to have."""
    roots = [x for _, x in outputs if x.requires_grad]
    if not roots or not loan.leaves:
        return
    tangents = []
    for i, root in enumerate(roots):
        local = tangent = loan.like(local_of(root), f"tangent_{i}" if len(roots) > 1 else "tangent")
        if isinstance(root, HDTensor):
            tangent = new_wrapper(HDTensor, local, gradient_bound(root._spec), False)
        tangents.append(tangent)
    torch.autograd.backward(roots, tangents, inputs=list(loan.leaves.values()))
