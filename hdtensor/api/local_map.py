"""``local_map``: run a function on local tensors, with its results' layouts declared for both tiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hdtensor.api.agreement import attempt, communicates, exchange
from hdtensor.api.local_flow import Flow, gradient_spec, is_differentiable, writes_seen
from hdtensor.api.shards import LocalShard, Whole, agreed_layout, memory_order
from hdtensor.errors import SpecError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import events, moves
from hdtensor.placements import checks
from hdtensor.placements.normal_form import normalized
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.text import as_spec
from hdtensor.tensor import HDTensor


#: How one result is cut: a spec or its text, "as positional argument i", or None for what is no ``HDTensor``.
OutSpec = HDSpec | str | int | None

Shape = Sequence[int]


def local_map(
    function: Callable[..., Any],
    out_specs: OutSpec | Sequence[OutSpec],
    in_specs: Sequence[HDSpec | str | None] | None = None,
    in_grad_specs: Sequence[HDSpec | str | None] | None = None,
    *,
    out_shapes: Callable[..., Any] | Sequence[Any] | None = None,
    out_dtypes: torch.dtype | Sequence[torch.dtype | None] | None = None,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return ``function`` as a function of ``HDTensor``s: it runs on their local tensors; differentiable.

    A rank outside the arguments' subgroups does not run it and gets empty results of the same global shapes and dtypes.
    This is the place for operators whose result's shape depends on data (``nonzero``, routing), for kernels, and for
    collectives of one's own. Called without any ``HDTensor`` it is ``function`` itself.

    Args:
        function: Takes plain tensors where ``HDTensor``s are passed as positional arguments; everything else is passed
            on. Tensors that need gradients must be arguments.
        out_specs: For its result, or for each of a tuple of them: a spec on the arguments' subgroups; ``i`` for the
            layout, shape and dtype of positional argument i; None for what is handed back as it is (None on a rank
            outside). A spec may leave reductions pending: results are then terms.
        in_specs: For each positional argument the spec it must have, None for any. Default: any.
        in_grad_specs: For each positional argument how its local gradients make the whole one, None for what follows
            from the layouts: an argument that a tier replicates while it cuts the results (or leaves them pending) has
            one term of its gradient on each part; a cut one its part; else every holder has the whole gradient.
        out_shapes: Global shape of each result that needs one, None for others; or what computes them from the same
            arguments. A result with a spec and no shape costs one small collective of all ranks of the world, in which
            the local results tell; also the top extents.
        out_dtypes: Dtype of each result with a shape; default: that of the argument it is like, else of the first
            ``HDTensor``.
        redistribute_inputs: Bring arguments to ``in_specs`` instead of refusing others.

    Raises:
        SpecError: If a spec does not fit. The function returned raises it for arguments in other specs or on unlike
            subgroups, for a gradient that the layouts do not tell, and for a local result of another shape or dtype
            than declared.
    """
    is_single = out_specs is None or isinstance(out_specs, HDSpec | str | int)
    if not is_single and not isinstance(out_specs, list | tuple):
        raise SpecError(
            f"out_specs is for one result a spec, the number of a positional argument or None, for several a tuple of "
            f"these; got {out_specs!r}."
        )
    outs = [out_specs] if is_single else list(out_specs)  # type: ignore[arg-type]
    return _LocalMap(
        function,
        [o if o is None or isinstance(o, int) else as_spec(o) for o in outs],  # type: ignore[arg-type]
        _as_specs(in_specs),
        _as_specs(in_grad_specs),
        _Declared(is_single, out_shapes, out_dtypes),
        redistribute_inputs,
    )


def _as_specs(specs: Sequence[HDSpec | str | None] | None) -> list[HDSpec | None] | None:
    if specs is None:
        return None
    if not isinstance(specs, list | tuple):
        raise SpecError(f"give one spec for each positional argument, in a list, got {specs!r}.")
    return [None if spec is None else as_spec(spec) for spec in specs]


@dataclasses.dataclass(frozen=True, slots=True)
class _Declared:
    """What is declared of the results beside their specs.

    Attributes:
        is_single: Whether the function returns one result and no tuple.
        shapes: As ``out_shapes``.
        dtypes: As ``out_dtypes``.
    """

    is_single: bool
    shapes: Any
    dtypes: Any

    def of(self, args: tuple[Any, ...], num: int) -> list[tuple[Shape | None, torch.dtype | None]]:
        """Return shape and dtype of each result, None where nothing is declared."""
        shapes = self.shapes(*args) if callable(self.shapes) else self.shapes
        shapes = self._each("out_shapes", shapes, num)
        dtypes = self._each("out_dtypes", self.dtypes, num)
        if not all(d is None or isinstance(d, torch.dtype) for d in dtypes):
            raise SpecError(
                f"out_dtypes must hold a torch.dtype or None for each result, got {dtypes}."
            )
        return list(zip(shapes, dtypes, strict=True))

    def _each(self, name: str, values: Any, num: int) -> list[Any]:
        if values is None:
            return [None] * num
        values = [values] if self.is_single else list(values)
        if len(values) != num:
            raise SpecError(f"{name} has {len(values)} entries for {num} results: {values}.")
        return values


class _LocalMap:
    """What ``local_map`` returns."""

    def __init__(
        self,
        function: Callable[..., Any],
        out_specs: list[HDSpec | int | None],
        in_specs: list[HDSpec | None] | None,
        in_grad_specs: list[HDSpec | None] | None,
        declared: _Declared,
        redistribute_inputs: bool,
    ) -> None:
        self.function = function
        self.out_specs = out_specs
        self.in_specs = in_specs
        self.in_grad_specs = in_grad_specs
        self.declared = declared
        self.redistribute_inputs = redistribute_inputs
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        beside = [a for a in args if not isinstance(a, HDTensor)]
        if any(map(_holds_hdtensor, [*beside, *kwargs.values()])):
            raise SpecError(
                "local_map takes HDTensors as positional arguments only, not by name, nor in lists, tuples or dicts. Pass "
                "each as an argument of its own: local_map(lambda x, *rest: function(x, list(rest)), ...)(x, *rest)."
            )
        if not any(isinstance(a, HDTensor) for a in args):
            return self.function(*args, **kwargs)
        for i, value in enumerate(args):
            if not isinstance(value, HDTensor) and _needs_gradient(value):
                raise SpecError(
                    f"argument {i} of local_map is a plain tensor of shape {tuple(value.shape)} that needs a gradient, of "
                    f"which each rank would have its part only. Pass distribute_tensor(t, spec) or t.detach()."
                )
        events[0] += 1  # plain tensors would not tell a region what happens in here
        args = self._placed(args)
        tensors = [a for a in args if isinstance(a, HDTensor)]
        _check_subgroups(tensors, [o for o in self.out_specs if isinstance(o, HDSpec)])
        bounds = self._declared_bounds(args)
        flow = Flow([t for t in tensors if torch.is_grad_enabled() and t.requires_grad])
        results = self._run(flow, args, kwargs, bounds)
        flow.gradients = self._gradient_bounds(args, flow, [b for b in bounds if b is not None])
        outs = flow.leave(bounds, results)
        return outs[0] if self.declared.is_single else tuple(outs)

    def _placed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments in ``in_specs``."""
        if self.in_specs is None:
            return args
        _check_count("in_specs", self.in_specs, args)
        return tuple(map(self._place, range(len(args)), args, self.in_specs))

    def _place(self, i: int, value: Any, spec: HDSpec | None) -> Any:
        if spec is None or not isinstance(value, HDTensor):
            return value
        wanted = normalized(spec, value.ndim)
        if wanted is value.spec:
            return value
        if self.redistribute_inputs:
            return value.redistribute(wanted)
        raise SpecError(
            f"argument {i} of local_map is {value!r}, in_specs wants {str(wanted)!r}. Redistribute it before, or pass "
            f"redistribute_inputs=True."
        )

    def _declared_bounds(self, args: tuple[Any, ...]) -> list[BoundSpec | None]:
        """Return the results' layouts as far as they are known without asking; None for the others."""
        bounds: list[BoundSpec | None] = []
        first = next(a for a in args if isinstance(a, HDTensor))
        said = self.declared.of(args, len(self.out_specs))
        for spec, (shape, dtype) in zip(self.out_specs, said, strict=True):
            like = first
            if isinstance(spec, int):
                like = _argument(args, spec)
                shape = like.shape if shape is None else shape
                spec = like.spec
            if spec is None or shape is None:
                bounds.append(None)
                continue
            shape = checks.check_shape(shape)
            sizes = _extents(normalized(spec, len(shape)), shape, [like, *args])
            bounds.append(BoundSpec.bind(spec, shape, None, dtype or like.dtype, sizes))
        return bounds

    def _run(
        self, flow: Flow, args: tuple[Any, ...], kwargs: Any, bounds: list[BoundSpec | None]
    ) -> list[Any]:
        """Run the function where this rank takes part, and fill in the layouts that results tell."""
        first = next(a for a in args if isinstance(a, HDTensor))
        local_args = flow.enter(args)
        asked = [
            k
            for k, (spec, bound) in enumerate(zip(self.out_specs, bounds, strict=True))
            if spec is not None and bound is None
        ]
        results: list[Any] | None = None
        problem = None
        if first.is_local:
            seen = writes_seen(args, lambda: self._results(local_args, kwargs, bounds))
            results, problem = attempt(seen)
        if asked and communicates():
            self._ask(asked, bounds, results, problem)
        elif problem is not None:
            raise problem
        elif asked:
            raise SpecError(
                f"result {asked[0]} of local_map has no declared shape, and there is no other rank to ask (as_rank, or "
                f"no process group). Pass out_shapes."
            )
        if results is None:
            results = [
                None if b is None else first._local_tensor.new_empty(0, dtype=b.dtype)
                for b in bounds
            ]
        return results

    def _results(
        self, args: tuple[Any, ...], kwargs: Any, bounds: list[BoundSpec | None]
    ) -> list[Any]:
        """Run the function and compare its results with what is declared."""
        returned = self.function(*args, **kwargs)
        if not self.declared.is_single and not isinstance(returned, list | tuple):
            raise SpecError(
                f"local_map's function returned {type(returned).__name__}, out_specs declares a tuple of {len(bounds)} "
                f"results. Return a tuple, or declare one spec instead of a tuple."
            )
        results = [returned] if self.declared.is_single else list(returned)
        if len(results) != len(bounds):
            raise SpecError(
                f"local_map's function returned {len(results)} results, out_specs declares {len(bounds)}."
            )
        for k, (spec, bound, result) in enumerate(
            zip(self.out_specs, bounds, results, strict=True)
        ):
            if spec is None:
                continue
            if not isinstance(result, torch.Tensor) or isinstance(result, HDTensor):
                raise SpecError(
                    f"result {k} of local_map's function must be a plain tensor, got {type(result).__name__}; declare "
                    f"None for what is none."
                )
            if bound is None:
                continue
            if (tuple(result.shape), result.dtype) != (bound.local_shape(), bound.dtype):
                raise SpecError(
                    f"result {k} of local_map's function is {tuple(result.shape)} {result.dtype} on rank {bound.rank}, "
                    f"declared is {bound}, of which this rank holds {bound.local_shape()}. Give out_shapes (global) and "
                    f"out_dtypes, or a spec without a shape to let the results tell."
                )
        return results

    def _ask(
        self,
        asked: list[int],
        bounds: list[BoundSpec | None],
        results: list[Any] | None,
        problem: Exception | None,
    ) -> None:
        moves[0] += 1  # no rank may skip a module in which it is asked
        mine = []
        for k in asked:
            held = torch.empty(0) if results is None else results[k]
            spec: Any = self.out_specs[k]
            whole = Whole(spec, None, None, None)
            mine.append(LocalShard(tuple(held.shape), memory_order(held), held.dtype, False, whole))
        said = exchange("local_map", mine, problem)
        for place, k in enumerate(asked):
            bounds[k] = agreed_layout([shards[place] for shards in said], "local_map")

    def _gradient_bounds(
        self, args: tuple[Any, ...], flow: Flow, outs: list[BoundSpec]
    ) -> list[BoundSpec]:
        """Return the layout of the gradient of each argument that needs one."""
        outs = [b for b in outs if is_differentiable(b.dtype)]
        given: list[HDSpec | None] = [None] * len(args)
        if self.in_grad_specs is not None:
            _check_count("in_grad_specs", self.in_grad_specs, args)
            given = self.in_grad_specs
        bounds = []
        waiting = {id(t) for t in flow.tensors}
        for i, (value, spec) in enumerate(zip(args, given, strict=True)):
            if id(value) not in waiting:
                continue
            waiting.remove(id(value))
            bound = value._spec
            if spec is None:
                spec = gradient_spec(i, bound, [b.spec for b in outs])
            spec = normalized(spec, len(bound.shape))
            _check_subgroups([value], [spec])
            sizes = bound.top_sizes if spec.top == bound.spec.top else None
            bounds.append(BoundSpec.bind(spec, bound.shape, None, bound.dtype, sizes))
        return bounds


def _needs_gradient(value: Any) -> bool:
    return torch.is_grad_enabled() and isinstance(value, torch.Tensor) and value.requires_grad


def _holds_hdtensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_holds_hdtensor, value))
    return isinstance(value, HDTensor)


def _check_count(name: str, specs: list[HDSpec | None], args: tuple[Any, ...]) -> None:
    if len(specs) != len(args):
        raise SpecError(f"{name} has {len(specs)} entries for {len(args)} positional arguments.")


def _check_subgroups(tensors: list[HDTensor], specs: list[HDSpec]) -> None:
    """Raise unless all live on the first tensor's subgroups: a function has one local view of each.

    Raises:
        SpecError: Otherwise.
    """
    first = tensors[0].spec
    wanted = [(g.ranks, g.mesh_shape) for g in first.subgroups]
    for spec in [*(t.spec for t in tensors), *specs]:
        if [(g.ranks, g.mesh_shape) for g in spec.subgroups] != wanted:
            raise SpecError(
                f"local_map: {str(spec)!r} does not lie on the subgroups of the first argument, {str(first)!r}. "
                f"Redistribute before, or behind it."
            )


def _argument(args: tuple[Any, ...], i: int) -> HDTensor:
    if not 0 <= i < len(args) or not isinstance(args[i], HDTensor):
        raise SpecError(
            f"out_specs names positional argument {i} of {len(args)}, which is no HDTensor here."
        )
    return args[i]


def _extents(spec: HDSpec, shape: tuple[int, ...], candidates: list[Any]) -> tuple[int, ...] | None:
    """Return a result's top extents: those of the first argument that the top tier cuts, scaled to its length."""
    dim = checks.shard_dim(spec.top)
    if dim is None or dim >= len(shape):
        return None
    for value in candidates:
        sizes = value.top_sizes if isinstance(value, HDTensor) else None
        if sizes is None or not sum(sizes):
            continue
        if all(size * shape[dim] % sum(sizes) == 0 for size in sizes):
            return tuple(size * shape[dim] // sum(sizes) for size in sizes)
    return None
