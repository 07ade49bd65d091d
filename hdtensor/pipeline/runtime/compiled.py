"""Compiled modules of a model that a runner calls."""

from __future__ import annotations

import warnings

from torch import nn

from hdtensor.api import regions
from hdtensor.api.region_modules import modules_of
from hdtensor.errors import PlanError
from hdtensor.plan import ModelDescription


class CompiledModules:
    """Hands what ``module.compile()`` made to the regions that run the modules on plain tensors.

    Attributes:
        regions: Of this rank's lane.
    """

    def __init__(self, model: nn.Module, description: ModelDescription, use_regions: bool) -> None:
        """Find the modules that may be compiled.

        Args:
            model: The model.
            description: Tells which modules are layers.
            use_regions: Whether there are regions.
        """
        self.regions: list[regions.Region] = []
        self._model = model
        found = modules_of(model, description) if use_regions else []
        self._allowed = {id(module) for module, _ in found}
        self._modules: list[tuple[str, nn.Module, tuple[nn.Module | None, ...]]] = []

    def look(self) -> bool:
        """Hand over what was compiled since the last step; return whether modules came or went since.

        Raises:
            PlanError: On every rank, if it cannot run in a pipeline.
        """
        compiled = False
        is_current = self._is_current()
        if not is_current:
            self._modules = [
                (name, module, tuple(module._modules.values()))
                for name, module in self._model.named_modules()
            ]
        for name, module, _ in self._modules:
            if "_orig_mod" in module._modules:
                raise PlanError(
                    f"{name} is the result of torch.compile(module), which would trace the stages' messages. Compile in "
                    f"place, with module.compile(), after the Runner is made."
                )
            if module.__dict__.get("_compiled_call_impl") is None:
                continue
            compiled = True
            if id(module) not in self._allowed:
                raise PlanError(
                    f"{name or 'the model'} was compiled, but would trace the stages' messages, or is inside of what "
                    f"runs as a whole. Compile layers, their children, or modules outside of layers, with use_regions."
                )
        if compiled:
            self._hand_over()
        return not is_current

    def _is_current(self) -> bool:
        """Return whether no module of the model has other children than at the last step."""
        return bool(self._modules) and all(
            tuple(module._modules.values()) == children for _, module, children in self._modules
        )

    def _hand_over(self) -> None:
        for region in self.regions:
            region.plain_forward.adopt()
        if any(region.only_skips for region in self.regions):
            warnings.warn(
                "the backward of a compiled module cannot be split: on ranks that run one, the part of a backward that is "
                "for inputs is all of it, and fewer bubbles are filled. A rank with several stages, of layers that no other "
                "rank shares, runs them as they are.",
                stacklevel=4,
            )
