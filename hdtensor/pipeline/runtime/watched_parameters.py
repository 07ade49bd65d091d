"""Parameters that a runner has leaves for, and what a user may do to them that it could not follow."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hdtensor.errors import PlanError


class WatchedParameters:
    """Looks before each step whether a model's parameters are those that the runner was made with."""

    def __init__(self, model: nn.Module) -> None:
        """Note a model's parameters, and how many hooks are on each: those of ours.

        Args:
            model: Parallelized.
        """
        self._model = model
        self._places = [
            (f"{name}.{key}" if name else key, module._parameters, key, parameter, parameter.dtype)
            for name, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._tables = [module._parameters for module in model.modules()]
        self._num_parameters = sum(map(len, self._tables))
        self._num_hooks = [_num_hooks(parameter) for *_, parameter, _ in self._places]
        self._hook_number = RemovableHandle.next_id

    def check_new(self) -> None:
        """Raise if there are parameters that the runner does not know.

        Raises:
            PlanError: If so.
        """
        known = {id(parameter) for _, _, _, parameter, _ in self._places}
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in known:
                raise PlanError(
                    f"the parameter {name} came to the model after the Runner was made, which would not train it. Add "
                    f"adapters and the like before the model is parallelized."
                )

    def check(self) -> None:
        """Raise if a parameter was replaced, has another dtype, or has got a hook; alike on every rank.

        Raises:
            PlanError: If so.
        """
        if self._num_parameters != sum(map(len, self._tables)):
            self.check_new()
        for name, table, key, parameter, dtype in self._places:
            now = table.get(key)
            if now is not parameter:
                raise PlanError(
                    f"the parameter {name} was replaced after the Runner was made, as load_state_dict(assign=True) does. "
                    f"Write into it (parameter.copy_, parameter.data = ..., load_state_dict), or parallelize a model that "
                    f"has the new one."
                )
            if parameter.dtype is not dtype:
                raise PlanError(
                    f"the parameter {name} is {parameter.dtype} now, and was {dtype} when the Runner was made. Make a "
                    f"new Runner(model, plan, ...) after the model is converted."
                )
        if RemovableHandle.next_id == self._hook_number:
            return  # torch numbers all hooks in one sequence
        self._hook_number = RemovableHandle.next_id
        for (name, _, _, parameter, _), num in zip(self._places, self._num_hooks, strict=True):
            if _num_hooks(parameter) > num:
                raise PlanError(
                    f"there is a hook on the parameter {name}. In a Runner gradients add up in the stages, where no hook "
                    f"of a parameter sees them. Change parameter.grad after step, or put a hook on the module."
                )


def _num_hooks(parameter: torch.Tensor) -> int:
    after = parameter._post_accumulate_grad_hooks
    return len(parameter._backward_hooks or ()) + len(after or ())
