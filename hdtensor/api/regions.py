"""Modules that run as a whole: skipped where this rank holds no part, on plain tensors where it does.

Dispatching op by op costs microseconds an operator. Two cases need not:

* On a rank outside the module's subgroups the whole module is **one** autograd node, whatever its size.
* Where a recorded pass showed that nothing but local work happens inside (no conversion, no operator with a special rule),
  the module runs on the rank's **plain local tensors** with autograd inside, and its result is wrapped again. The
  redistribute points of the plan keep their place inside (``points``).

For each layout of its inputs a module goes through states:

==========  ==========================================================================  =======================
state       what a call does                                                            next
==========  ==========================================================================  =======================
new         op by op; forward and backward are watched                                  recorded, pruned, failed
recorded    op by op, and beside it on plain tensors, without autograd and without      running, failed
            communication: the outputs must be equal
running     on plain tensors                                                            failed
pruned      one autograd node                                                           failed
failed      op by op; the module's children are tried instead
==========  ==========================================================================  =======================
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hdtensor._torch_compat import saved_tensor_hooks
from hdtensor.api import points, region_watch
from hdtensor.api.gradients import GradientSync
from hdtensor.api.module_state import KeptState, Switches, check_draws, draws_itself
from hdtensor.api.points import Points
from hdtensor.api.region_compile import CompiledForward
from hdtensor.api.region_hooks import compiles, has_hooks
from hdtensor.api.region_leaf import Places, local_of
from hdtensor.api.region_nodes import (
    Enter,
    Layout,
    enter_parameters,
    flatten_result,
    key_of,
    leave,
    replace_tensors,
)
from hdtensor.api.region_skip import Skipped, give_gradient, stand_ins
from hdtensor.api.region_watch import (
    Deferral,
    PutOff,
    Watcher,
    has_plain,
    is_close,
    op_by_op,
    suspended,
)
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import events, moves
from hdtensor.ops.skips import count_skips, stop_counting
from hdtensor.ops.special.random import num_draws
from hdtensor.tensor import HDTensor


_log = logging.getLogger(__name__)

#: Layouts a region remembers; past it the table starts anew.
MAX_LAYOUTS = 256

#: How often a pass whose backward left a gradient out is recorded again before the module counts as failed.
_MAX_TRIES = 3


class Region:
    """One module, its parameters, and what is known of it by layout.

    It stands in for the module's ``forward``, so that hooks on the module itself run around it.
    """

    def __init__(
        self,
        module: nn.Module,
        sync: GradientSync,
        *,
        is_stack: bool = False,
        only_skips: bool = False,
    ) -> None:
        self.module = module
        self.only_skips = only_skips
        self.is_stack = is_stack
        self.forward = module.forward
        self.plain_forward = CompiledForward(module, module.forward)
        self.sync = sync
        self.layouts: dict[Any, Layout] = {}
        self.places = Places(module, is_stack=is_stack)
        self._skips: list[int] | None = None
        self._hook_number = -1
        self._has_hooks = False
        #: Found when first needed: a module may be made before its parameters are.
        self._is_held: bool | None = None
        self._switches = Switches(module)
        module.forward = self.__call__  # a method: what is compiled for one layer serves the next

    def remove(self) -> None:
        """Give the module its own forward back; its parameters forget that they were skipped."""
        held: Any = self.module.parameters()
        for parameter in held:
            if isinstance(parameter, HDTensor):
                stop_counting(parameter)
        self.module.forward = self.forward

    def put_back(self) -> None:
        """Stand in for the module's ``forward`` again; nothing is known of its parameters, which may be others."""
        self.layouts.clear()
        self.places = Places(self.module, is_stack=self.is_stack)
        self._is_held, self._hook_number = None, -1
        self.module.forward = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module in the best way known for these inputs."""
        if torch.compiler.is_compiling() and not self.sync.is_plain:
            return self.forward(*args, **kwargs)
        # On a plain stage nobody's hooks are there, nor a region around this one.
        if self.sync.is_plain and self._holds_part():
            run = self.plain_forward.run if self.plain_forward.is_compiled else self.forward
            return run(*args, **kwargs)
        if self.plain_forward.takes_hdtensors and self._holds_part():
            return self.plain_forward.run(*args, **kwargs)
        if saved_tensor_hooks() is not None if self.sync.is_plain else self._must_stay_out():
            return self.plain_forward(*args, **kwargs)
        return self._call(args, kwargs)

    def _holds_part(self) -> bool:
        if self._is_held is None:
            self._is_held = any(p.is_local for p in self.places.parameters)
        return self._is_held

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs: list[HDTensor] = []
        key = (
            self._switches.present(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            key_of(args, inputs),
            key_of(kwargs, inputs) if kwargs else None,
        )
        # Models look into masks before their layers: what they do with another one, no pass has shown.
        if not inputs or (self.is_stack and has_plain((*args, *kwargs.values()))):
            return self.forward(*args, **kwargs)
        if self.only_skips and any(x.is_local for x in inputs):
            return self.forward(*args, **kwargs)
        # What traces is to see every operator.
        if type(inputs[0]._local_tensor) is not torch.Tensor:
            return self.forward(*args, **kwargs)
        try:
            layout = self.layouts.get(key)
        except TypeError:  # an argument that is no tensor and no constant, such as a cache
            return self.forward(*args, **kwargs)
        if layout is None:
            layout = self._new_layout(key)
        if layout.state == "running" and self._is_refrozen(layout):
            layout = self._new_layout(key)
        if layout.state == "running" or layout.state == "pruned":
            outs = layout.derive(inputs)
            if outs is not None:
                if layout.state == "pruned":
                    return self._skip(layout, args, kwargs, inputs, outs)
                return self._run(layout, args, kwargs, outs)
        return self._learn(layout, args, kwargs, inputs)

    def _must_stay_out(self) -> bool:
        """Whether the module runs op by op whatever is known of it; on plain tensors, if one around it does.

        A checkpoint repeats a forward later and must save the same tensors, whatever was learnt in between.
        """
        return bool(
            (points.running and region_watch.goes_on())
            or suspended[0]
            or saved_tensor_hooks() is not None
            or self._is_hooked()
            or not self.places.is_current()
        )

    def _is_hooked(self) -> bool:
        """Whether somebody's hooks inside want to see what the module would hide.

        torch numbers all hooks in one sequence, and both counts only grow: without a new sum nothing has changed.
        """
        seen = RemovableHandle.next_id + compiles[0]
        if seen != self._hook_number:
            self._hook_number = seen
            self._has_hooks = has_hooks(self.module)
        return self._has_hooks

    def _is_refrozen(self, layout: Layout) -> bool:
        """Whether a parameter was frozen or thawed since its gradient's layout was recorded."""
        return layout.needs_grad != [p.requires_grad for p in self.places.parameters]

    def _skip(
        self,
        layout: Layout,
        args: Any,
        kwargs: Any,
        inputs: list[HDTensor],
        outs: tuple[BoundSpec | None, ...],
    ) -> Any:
        """Return what stands in for the results of a module of which this rank has no part."""
        if self.sync.ends_graphs:
            return layout.rebuild(stand_ins(layout, inputs, self.places, outs))
        note = functools.partial(self._note_skipped, layout)
        return Skipped(layout, self.forward, args, kwargs, inputs, self.places, note).run(outs)

    def _note_skipped(self, layout: Layout) -> None:
        """Say that all parameters have a gradient, or make those of some where others are not used."""
        unused = layout.unused()
        if unused:
            for i, parameter in enumerate(self.places.parameters):
                if i not in unused:
                    give_gradient(parameter)
            return
        if self._skips is None:
            self._skips = [0]
        for parameter in self.places.parameters:
            count_skips(parameter, self._skips, trains=parameter.requires_grad)
        self._skips[0] += 1
        self.sync.note_passed()

    # -- the slow states --------------------------------------------------------------------------------------

    def _new_layout(self, key: Any) -> Layout:
        if len(self.layouts) >= MAX_LAYOUTS:
            self.layouts.clear()
        layout = self.layouts[key] = Layout()
        return layout

    def _learn(self, layout: Layout, args: Any, kwargs: Any, inputs: list[HDTensor]) -> Any:
        """Take a call that cannot run as a whole yet, op by op."""
        if layout.state == "new" and layout.tries and self._is_recorded(layout):
            layout.state = "recorded"
        match layout.state:
            case "new":
                return self._record(layout, args, kwargs, inputs)
            case "recorded":
                return self._check(layout, args, kwargs, inputs)
            case "running" | "pruned":  # sizes whose outcome cannot be derived yet
                with op_by_op():
                    result = self.forward(*args, **kwargs)
                layout.observe(inputs, result)
                return result
        return self.forward(*args, **kwargs)

    def _record(self, layout: Layout, args: Any, kwargs: Any, inputs: list[HDTensor]) -> Any:
        layout.tries += 1
        layout.points, layout.watched, layout.asked = Points(), {}, set()
        before = (events[0], moves[0], num_draws[0], torch.get_rng_state())
        watch = Watcher(layout)
        watched_args = replace_tensors(args, watch.input)
        watched_kwargs = replace_tensors(kwargs, watch.input)
        watched = [watch.parameter(i, p) for i, p in enumerate(self.places.parameters)]
        deferral, kept = Deferral(), KeptState(self.module)
        points.recording.append(layout.points)
        try:
            with op_by_op(), self.places.filled(watched), deferral:
                result = self.forward(*watched_args, **watched_kwargs)
        finally:
            points.recording.pop()
        layout.draws = num_draws[0] - before[2]
        outs, layout.rebuild = flatten_result(result)
        is_stateful = kept.has_changed() or draws_itself(before[3], before[2])
        is_tensor = all(o is None or isinstance(o, HDTensor) for o in outs)
        if is_stateful and not layout.has_kept:
            # A cache that fills once: look at the next call.
            layout.has_kept, layout.tries = True, 0
        elif deferral.is_seen or is_stateful or not is_tensor:
            layout.state = "failed"
        elif not inputs[0].is_local and not any(p.is_local for p in self.places.parameters):
            layout.state = "pruned" if moves[0] == before[1] else "failed"
        elif (
            events[0] - before[0] != layout.points.num_redistributes
            or layout.draws
            or not layout.points.can_be_plain
        ):
            layout.state = "failed"
        layout.observe(inputs, result)
        outs = tuple(
            watch.output(k, o) if isinstance(o, HDTensor) else o for k, o in enumerate(outs)
        )
        return layout.rebuild(outs)

    def _is_recorded(self, layout: Layout) -> bool:
        """Whether the recorded pass's backward told every gradient's layout; decide on what it showed."""
        is_known = layout.num_watched == 0 or layout.points.knows_gradients()
        if layout.num_watched > len(layout.watched) or not is_known:
            if layout.tries >= _MAX_TRIES:
                layout.state = "failed"
            return False
        if layout.num_watched and layout.backward_events != layout.points.num_redistributes:
            layout.state = "failed"
            return False
        return True

    def _check(self, layout: Layout, args: Any, kwargs: Any, inputs: list[HDTensor]) -> Any:
        recorded, seen = layout.points, Points()
        points.recording.append(seen)
        try:
            with op_by_op():
                result = self.forward(*args, **kwargs)
        finally:
            points.recording.pop()
        layout.observe(inputs, result)
        recorded.results = seen.results
        layout.state = "running" if self._is_same(layout, args, kwargs, result) else "failed"
        recorded.results = []
        if layout.state == "failed":
            _log.debug("%s stays op by op", type(self.module).__name__)
        return result

    def _is_same(self, layout: Layout, args: Any, kwargs: Any, result: Any) -> bool:
        """Run on plain tensors without autograd; compare the local results."""
        parameters = self.places.parameters
        layout.needs_grad = [p.requires_grad for p in parameters]
        if torch.is_grad_enabled() and any(
            needs_grad and ("p", i) not in layout.watched
            for i, needs_grad in enumerate(layout.needs_grad)
        ):
            return False
        layout.points.is_checking, layout.points.position = True, 0
        points.running.append(layout.points)
        try:
            with torch.no_grad(), self.places.filled(list(map(local_of, parameters))):
                plain = self.forward(
                    *replace_tensors(args, local_of), **replace_tensors(kwargs, local_of)
                )
        except Exception as error:  # any failure on plain tensors only means: not as a whole
            _log.debug("%s cannot run on plain tensors: %s", type(self.module).__name__, error)
            return False
        finally:
            points.running.pop()
            layout.points.is_checking = False
        mine, theirs = flatten_result(plain)[0], flatten_result(result)[0]
        return len(mine) == len(theirs) and all(map(is_close, mine, theirs))

    # -- the running state ----------------------------------------------------------------------------------------

    def _run(
        self, layout: Layout, args: Any, kwargs: Any, outs: tuple[BoundSpec | None, ...]
    ) -> Any:
        """Run on plain local tensors and wrap the results."""
        enter = Enter(layout) if torch.is_grad_enabled() else local_of
        plain_args = replace_tensors(args, enter)
        plain_kwargs = replace_tensors(kwargs, enter) if kwargs else kwargs
        plain_leaf = getattr(self.sync, "plain_leaf", None)
        plain_parameters = enter_parameters(layout, self.places, plain_leaf)
        layout.points.position, before = 0, torch.get_rng_state()
        points.running.append(layout.points)
        region_watch.begun.append(region_watch.manner())
        try:
            with self.places.filled(plain_parameters):
                forward = self.plain_forward if self.plain_forward.is_compiled else self.forward
                plain = forward(*plain_args, **plain_kwargs)
        except PutOff:
            plain = None
        finally:
            points.running.pop()
            region_watch.begun.pop()
        check_draws(before, self.module)
        results, rebuild = flatten_result(plain)
        wrapped = [(v, o) for v, o in zip(results, outs, strict=False) if o is not None]
        if plain is None or any(v.shape != o.local_shape() for v, o in wrapped):
            # The sizes were derived, and this module makes something else of them; or it puts computing off by now.
            layout.state = "failed"
            return self.forward(*args, **kwargs)
        return rebuild(
            tuple(
                [
                    None if o is None else leave(o, outs[k], layout.watched.get(("o", k)))
                    for k, o in enumerate(results)
                ]
            )
        )
