"""The gradients of a step: terms of all lanes are summed bucket by bucket, while the last backward still runs.

What a rank holds of a parameter has a gradient on its *leaf*, summed over the lane's micro-batches. It goes *home* to the
tensor that the optimizer updates: the parameter, or with ZeRO-1 the master that is cut over all its copies. Parameters
whose ranks are the same share buckets, last ones first. A bucket starts as soon as its leaves have their last gradients
and all buckets before it have started; the order is the same on every rank, whichever is early. All have started when a
rank asks what the losses count; what came is divided by it then.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor._rank import current_rank
from hdtensor._torch_compat import new_wrapper
from hdtensor.api.gradients import gradient_plan
from hdtensor.collectives import observe
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.special.move import gradient_bound
from hdtensor.pipeline.runtime.homes import Home, buckets
from hdtensor.pipeline.runtime.parameters import LaneParameters
from hdtensor.pipeline.runtime.plain_leaf import PlainLeaf
from hdtensor.pipeline.schedule.actions import Action, Kind
from hdtensor.placements import HDSpec
from hdtensor.placements.layout import contiguous_stride
from hdtensor.redistribute.execute import BUCKET_BYTES, execute_many, start_many
from hdtensor.redistribute.program import compile_plan
from hdtensor.redistribute.steps import RedistributePlan
from hdtensor.tensor import HDTensor


#: Actions after which a micro-batch has no more to add to its stage's weights.
_LAST_KINDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


class _Bucket:
    """Gradients that travel together on this rank.

    Attributes:
        homes: Where they go.
        waiting: Ids of leaves whose last gradient has not come.
        finish: Waits for what has started; None before.
    """

    __slots__ = ("finish", "homes", "waiting")

    def __init__(self, found: list[Home], leaves: Iterable[HDTensor]) -> None:
        self.homes = found
        self.waiting = {id(leaf) for leaf in leaves}
        self.finish: Callable[[], list[torch.Tensor]] | None = None


class StepGradients:
    """Watches the leaves of a lane through a step's actions, and sends their gradients home.

    Regions tell it of gradients as they tell ``api.gradients.GradientSync``.

    Attributes:
        ends_graphs: True: no backward of a rank passes what it skips, as graphs end where a stage ends.
        is_plain: Whether plain leaves stand in for the leaves of the lane, for a rank that has its stage alone.
    """

    ends_graphs = True

    def __init__(self, parameters: LaneParameters, stages: Sequence[int]) -> None:
        """Watch the leaves.

        Args:
            parameters: The leaves.
            stages: Numbers of this rank's stages.
        """
        self.is_plain = False
        self._parameters = parameters
        self._leaves = {id(p): leaves for p, leaves in parameters.leaves}
        #: The stages whose backwards reach a leaf; with several stages a first step tells.
        self._uses: defaultdict[int, set[int]] = defaultdict(set)
        self._is_learned = len(stages) == 1
        if self._is_learned:
            self._uses.update((id(leaf), {stages[0]}) for leaf in parameters)
        self._seen: dict[int, tuple[tuple[int, int], ...]] = {}
        self._left: Counter[int] = Counter()
        self._stage: int | None = None
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._num_started = 0
        self._hears = [True]
        #: Homes, which live as long as their model -> the leaf whose gradient is theirs as it is.
        self._only_leaf: dict[int, HDTensor | None] = {}
        self._planned: (
            tuple[Sequence[Home], list[bool], list[tuple[list[Home], list[HDTensor]]]] | None
        ) = None
        self._plain: dict[int, PlainLeaf] = {}
        for leaf in parameters:
            _watch(leaf, self.note)

    def plain_leaf(self, leaf: HDTensor, spec: HDSpec) -> torch.Tensor | None:
        """Return a plain tensor on which regions collect a leaf's gradients, without wrapping each; None if it cannot be.

        Args:
            leaf: The leaf.
            spec: In which its gradients come.
        """
        found = self._plain.get(id(leaf))
        if found is None or not found.stands_for(leaf):
            if found is not None and found.tensor.grad is not None:
                return None
            found = self._plain[id(leaf)] = PlainLeaf(leaf, spec, self.note, self._hears)
        return found.tensor if found.spec is spec else None

    def whole_leaf(self, leaf: HDTensor) -> torch.Tensor | None:
        """Return a plain tensor for a leaf that this rank has alone, in whatever spec its gradients come; None as above."""
        if not leaf.requires_grad:
            return leaf._local_tensor
        found = self._plain.get(id(leaf))
        if found is not None and found.stands_for(leaf):
            return found.tensor
        return self.plain_leaf(leaf, gradient_bound(leaf._spec).spec)

    # -- while actions run --------------------------------------------------------------------------------------

    def begin(self, found: Sequence[Home], row: Sequence[Action]) -> None:
        """Get ready for a step.

        Args:
            found: Homes of all parameters.
            row: This rank's actions.
        """
        self._left = Counter(a.stage for a in row if a.kind in _LAST_KINDS)
        self._stage, self._num_started = None, 0
        self._seen.clear()
        self._buckets, self._bucket_of = [], {}
        for each, leaves in self._filled_buckets(found):
            bucket = _Bucket(each, leaves)
            self._buckets.append(bucket)
            self._bucket_of.update((id(leaf), bucket) for leaf in leaves)

    def _filled_buckets(self, found: Sequence[Home]) -> list[tuple[list[Home], list[HDTensor]]]:
        """Return the homes that share a bucket, with their leaves, for those that this rank holds something of."""
        needs_grad = [home.parameter.requires_grad for home in found]
        if self._planned is None or self._planned[0] is not found or self._planned[1] != needs_grad:
            wanted = [home for home in found if home.parameter.requires_grad]
            filled = [
                (each, [leaf for home in each for leaf in self._local_leaves(home)])
                for each in buckets(wanted, BUCKET_BYTES)
                if each[0].parameter.is_local
            ]
            self._planned = found, needs_grad, filled
        return self._planned[2]

    def before(self, action: Action) -> None:
        """Note that an action begins."""
        self._settle()
        self._stage = action.stage
        if action.kind in _LAST_KINDS:
            self._left[action.stage] -= 1
            self._hears[0] = not self._is_learned or not self._left[action.stage]

    def note(self, leaf: torch.Tensor) -> None:
        """Note that a leaf's gradient grew."""
        if self._stage is None or (self._is_learned and self._left[self._stage]):
            return  # more will come
        self._uses[id(leaf)].add(self._stage)
        bucket = self._bucket_of.get(id(leaf))
        if bucket is None or id(leaf) not in bucket.waiting:
            return
        is_known = self._is_learned and id(leaf) not in self._parameters.shared
        if is_known and self._is_done(id(leaf)):
            bucket.waiting.discard(id(leaf))
            self._start_ready()

    def note_passed(self) -> None:
        """Do nothing: what a stage skips adds nothing."""

    def _settle(self) -> None:
        """Between two actions: leaves whose stages are done have their last gradient."""
        if self._stage is None:
            return
        if not self._is_learned:
            self._learn(self._stage)
        if self._left[self._stage]:
            return
        for bucket in self._buckets[self._num_started :]:
            bucket.waiting = {i for i in bucket.waiting if not self._is_done(i)}
        self._start_ready()

    def _learn(self, stage: int) -> None:
        """Note which gradients an action changed: second parts of backwards accumulate without hooks."""
        for leaf in self._parameters:
            grads = self._gradients(leaf)
            if not grads:  # none came, or they are on their way
                continue
            now = tuple((id(grad), grad._version) for grad in grads)
            if now != self._seen.get(id(leaf)):
                self._seen[id(leaf)] = now
                self._uses[id(leaf)].add(stage)

    def _is_done(self, leaf: int) -> bool:
        return leaf in self._uses and not any(self._left[s] for s in self._uses[leaf])

    def _start_ready(self) -> None:
        while self._num_started < len(self._buckets):
            bucket = self._buckets[self._num_started]
            if bucket.waiting:
                return
            self._num_started += 1
            bucket.finish = self._start(bucket.homes)

    # -- the end of a step --------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Start what has not started; return whether a gradient came after its bucket had gone."""
        self._stage = None
        for bucket in self._buckets:
            bucket.waiting.clear()
        self._start_ready()
        local = [
            leaf for b in self._buckets for home in b.homes for leaf in self._local_leaves(home)
        ]
        return any(self._gradients(leaf) for leaf in local)

    def finish(self, scale: float, *, is_again: bool) -> None:
        """Wait for all sums, and add them times a factor to the targets' gradients.

        Args:
            scale: One over the number of everything that counted.
            is_again: Whether some rank has gradients that came late: they follow now.
        """
        with torch.no_grad():
            for bucket in self._buckets:
                assert bucket.finish is not None, "flush has started all"
                results = bucket.finish()
                if is_again:
                    torch._foreach_add_(results, self._start(bucket.homes)())
                torch._foreach_mul_(results, scale)
                for home, local in zip(bucket.homes, results, strict=True):
                    _add(home.target, local.to(home.target.dtype))
        self._buckets, self._bucket_of = [], {}
        self.drop_gradients()
        self._is_learned = True

    def drop(self) -> None:
        """Wait for what has started, and forget it."""
        for bucket in self._buckets:
            if bucket.finish is not None:
                bucket.finish()
        self._buckets, self._bucket_of = [], {}
        self.drop_gradients()

    def let_go(self) -> None:
        """Drop what is on its way, after an error that ends all."""
        for bucket in self._buckets:
            bucket.finish = None
        self._buckets, self._bucket_of = [], {}
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget what the leaves have collected."""
        self._parameters.drop_gradients()
        for plain in self._plain.values():
            plain.tensor.grad = None

    def _gradients(self, leaf: HDTensor) -> list[torch.Tensor]:
        """Return what came to a leaf: by operators, and in regions."""
        plain = self._plain.get(id(leaf))
        found = (leaf.grad, None if plain is None else plain.tensor.grad)
        return [grad for grad in found if grad is not None]

    def _take(self, leaf: HDTensor) -> Iterator[Any]:
        """Take a leaf's gradients away."""
        grad, plain = leaf.grad, self._plain.get(id(leaf))
        leaf.grad = None
        if grad is not None:
            yield grad
        if plain is not None and plain.tensor.grad is not None:
            yield plain.take()

    def _local_leaves(self, home: Home) -> list[HDTensor]:
        return [leaf for leaf in self._leaves[id(home.parameter)] if leaf.is_local]

    def _start(self, found: Sequence[Home]) -> Callable[[], list[torch.Tensor]]:
        """Take the leaves' gradients away, and start summing them over all copies."""
        alone = self._take_alone(found)
        if alone is not None:
            return lambda: alone
        with torch.no_grad(), observe.because("gradients"), observe.profiled("gradient_sync"):
            terms, plans = [], []
            for home, (plan, term) in zip(found, self._terms(found), strict=True):
                dtype = torch.promote_types(home.target.dtype, term.dtype)
                terms.append(term.to(dtype).contiguous())
                plans.append(plan)
            with observe.ahead():
                return start_many(plans, terms, donate=True)

    def _take_alone(self, found: Sequence[Home]) -> list[torch.Tensor] | None:
        """Return the gradients of homes that this rank alone sends something to, and only to itself; None of others."""
        plains = []
        for home in found:
            if id(home) not in self._only_leaf:
                self._only_leaf[id(home)] = self._find_only_leaf(home)
            leaf = self._only_leaf[id(home)]
            plain = None if leaf is None else self._plain.get(id(leaf))
            if leaf is None or plain is None or plain.tensor.grad is None or leaf.grad is not None:
                return None
            plains.append(plain)
        grads = []
        for home, plain in zip(found, plains, strict=True):
            grad: Any = plain.tensor.grad
            plain.tensor.grad = None
            grads.append(grad.to(torch.promote_types(home.target.dtype, grad.dtype)).contiguous())
        return grads

    def _find_only_leaf(self, home: Home) -> HDTensor | None:
        leaves = self._leaves[id(home.parameter)]
        if home.of_values is None or len(leaves) != 1 or leaves[0].spec.ranks != (current_rank(),):
            return None
        return None if compile_plan(home.of_values, current_rank()).steps else leaves[0]

    def _terms(self, found: Sequence[Home]) -> Iterator[tuple[RedistributePlan, torch.Tensor]]:
        """Yield for each home the plan of its sum and this rank's term."""
        work, where = [], []
        for number, home in enumerate(found):
            for leaf in self._local_leaves(home):
                for grad in self._take(leaf):
                    work.append((leaf, grad, _wanted(grad.spec, leaf.spec, home)))
                    where.append(number)
        moved = execute_many(
            [gradient_plan(g._spec, leaf._spec.with_spec(wanted)) for leaf, g, wanted in work],
            [grad._local_tensor for _, grad, _ in work],
            donate=True,
        )
        by_home: defaultdict[int, list[tuple[HDSpec, torch.Tensor]]] = defaultdict(list)
        for number, (_, _, wanted), local in zip(where, work, moved, strict=True):
            by_home[number].append((wanted, local))
        for number, home in enumerate(found):
            terms = by_home[number]
            has_values = home.of_values is not None and not any(s.has_partial() for s, _ in terms)
            plan = home.of_values if has_values else home.of_terms
            assert plan is not None, "there is a plan of values where there may be any"
            if terms:
                yield plan, sum((local for _, local in terms[1:]), start=terms[0][1])
            else:
                dtype = self._leaves[id(home.parameter)][0].grad_dtype
                yield plan, torch.zeros_like(home.parameter._local_tensor, dtype=dtype)


def _wanted(grad: HDSpec, leaf: HDSpec, home: Home) -> HDSpec:
    """Return the spec that a leaf's gradient gets inside of its stage: every rank has a term of it, or its value.

    Where the axes that replicate the parameter have the gradient itself, the first rank's counts, unless this is known of
    all copies.
    """
    has_terms = any(
        isinstance(g, Partial) and isinstance(p, Replicate)
        for a, b in zip(grad.subgroups, leaf.subgroups, strict=True)
        for g, p in zip(a.placements, b.placements, strict=True)
    )
    if home.of_values is not None and not has_terms:
        return leaf
    return leaf.map_bottom(lambda p: Partial() if isinstance(p, Replicate) else p)


def _watch(leaf: HDTensor, note: Callable[[torch.Tensor], None]) -> None:
    needs_grad = leaf.requires_grad
    leaf.requires_grad_()
    leaf.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    leaf.requires_grad_(needs_grad)


def _add(target: HDTensor, local: torch.Tensor) -> None:
    new = new_wrapper(HDTensor, local, _contiguous(target._spec, local.dtype), False)
    old = target.grad
    target.grad = new if old is None else old + new


@functools.lru_cache(maxsize=16384)
def _contiguous(bound: BoundSpec, dtype: torch.dtype) -> BoundSpec:
    stride = contiguous_stride(bound.shape)
    return BoundSpec.of(bound.spec, bound.shape, stride, dtype, bound.top_sizes)
