"""``ModelDescription``: what a plan needs to know of a model, without the model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hdtensor.errors import PlanError
from hdtensor.plan.fields import MAX_LAYERS, check_optional_int, shown


if TYPE_CHECKING:
    from torch import nn


#: Finds the module of a layer and its index in a parameter's name.
LAYER_REGEX = r"(?:^|\.)(?:layers|layer|blocks|block|h)\.(\d+)(?=\.)"
_MAX_DIGITS = 9

#: Classes of linear modules whose weight is (in, out).
_TRANSPOSED = ("Conv1D",)


class ParameterDescription(NamedTuple):
    """One name of a parameter.

    Attributes:
        name: Its name in the module.
        shape: Global shape.
        same_as: The first name of the same parameter, for the other names of a tied one.
        transposed: Whether it is a weight of shape (in, out), as ``transformers``' ``Conv1D`` has.
    """

    name: str
    shape: tuple[int, ...]
    same_as: str | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Names and shapes of a model's parameters, and the numbers of its configuration.

    Attributes:
        parameters: In registration order, tied ones under each of their names.
        num_attention_heads: Number of query heads, if the model says it.
        num_key_value_heads: Number of key and value heads, if the model says it.
        hidden_size: Width of the residual stream, if the model says it.
        intermediate_size: Width inside the MLP, if the model says it.
        tie_word_embeddings: Whether the configuration says that the embedding is the output
            projection too.
        layer_regex: Its match ends behind a layer's module name; group 1 is the layer's index.
    """

    parameters: tuple[ParameterDescription, ...]
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    tie_word_embeddings: bool = False
    layer_regex: str = LAYER_REGEX

    def __post_init__(self) -> None:
        if not self.parameters:
            raise PlanError("the model has no parameters, so there is nothing to spread.")
        seen: set[str] = set()
        for name, _, same_as, _ in self.parameters:
            if name in seen:
                raise PlanError(f"the parameter {shown(name)} is described twice.")
            if same_as is not None and same_as not in seen:
                raise PlanError(
                    f"{shown(name)} is tied to {shown(same_as)}, which is not before it."
                )
            seen.add(name)
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "hidden_size",
            "intermediate_size",
        ):
            check_optional_int(name, getattr(self, name), 1, 1 << 30)
        if re.compile(self.layer_regex).groups != 1:
            raise PlanError(f"layer_regex must have one group, the index: {self.layer_regex!r}.")

    @classmethod
    def from_module(cls, module: nn.Module, *, layer_regex: str = LAYER_REGEX) -> Self:
        """Describe a torch module; the meta device is enough.

        Args:
            module: Its ``config``, if there is one, is read for the numbers above.
            layer_regex: Where a layer's index is in a parameter's name.

        Raises:
            PlanError: If it is no module or has no parameters.
        """
        if not hasattr(module, "named_parameters"):
            raise PlanError(f"expected a torch module or a ModelDescription, got {shown(module)}.")
        first_names: dict[int, str] = {}
        parameters = []
        transposed = {
            f"{name}.weight"
            for name, inner in module.named_modules()
            if type(inner).__name__ in _TRANSPOSED
        }
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = first_names.setdefault(id(parameter), name)
            same_as = None if first == name else first
            shape = tuple(parameter.shape)
            parameters.append(ParameterDescription(name, shape, same_as, name in transposed))
        config = getattr(module, "config", None)
        heads = _number(config, "num_attention_heads")
        return cls(
            parameters=tuple(parameters),
            num_attention_heads=heads,
            num_key_value_heads=_number(config, "num_key_value_heads") or heads,
            hidden_size=_number(config, "hidden_size"),
            intermediate_size=_number(config, "intermediate_size"),
            # A classifier's configuration says so too, though there is no head that an embedding could be.
            tie_word_embeddings=(
                _read(config, "tie_word_embeddings") is True
                and any(p.same_as is not None for p in parameters)
            ),
            layer_regex=layer_regex,
        )

    @classmethod
    def llama(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        intermediate_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        vocab_size: int,
        tie_word_embeddings: bool = False,
    ) -> Self:
        """Describe a Llama from its numbers, with the names that Hugging Face gives.

        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_attention_heads=4, vocab_size=32)
        >>> model = ModelDescription.llama(num_layers=2, num_key_value_heads=2, **sizes)
        >>> model.parameters[2]
        ParameterDescription(name='model.layers.0.self_attn.k_proj.weight', shape=(4, 8), same_as=None, transposed=False)
        """
        hidden, width = hidden_size, intermediate_size
        kv_width = hidden // num_attention_heads * num_key_value_heads
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_width, hidden),
            "self_attn.v_proj": (kv_width, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        embedding = "model.embed_tokens.weight"
        parameters = [ParameterDescription(embedding, (vocab_size, hidden))]
        for i in range(num_layers):
            parameters += [
                ParameterDescription(f"model.layers.{i}.{name}.weight", shape)
                for name, shape in layer.items()
            ]
        same_as = embedding if tie_word_embeddings else None
        parameters.append(ParameterDescription("model.norm.weight", (hidden,)))
        parameters.append(ParameterDescription("lm_head.weight", (vocab_size, hidden), same_as))
        return cls(
            parameters=tuple(parameters),
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            tie_word_embeddings=tie_word_embeddings,
        )

    def replace(self, **changes: Any) -> ModelDescription:
        """Return a description with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """First name of each parameter -> its shape, in registration order."""
        return {p.name: p.shape for p in self.parameters if p.same_as is None}

    def layer_of(self, name: str) -> tuple[str, int] | None:
        """Return the name of the layer's module and the layer's index, or None outside layers.

        >>> model = ModelDescription(parameters=(ParameterDescription("w", (1,)),))
        >>> model.layer_of("model.layers.3.mlp.up_proj.weight")
        ('model.layers.3', 3)

        Raises:
            PlanError: If the index is absurdly large.
        """
        match = re.search(self.layer_regex, name)
        if match is None:
            return None
        if len(match[1]) > _MAX_DIGITS or not match[1].isdecimal() or int(match[1]) >= MAX_LAYERS:
            raise PlanError(f"the parameter {shown(name)} has no layer index below {MAX_LAYERS}.")
        return name[: match.end()], int(match[1])

    @property
    def layer_modules(self) -> Mapping[int, tuple[str, ...]]:
        """Layer index -> names of the modules that have it, in registration order."""
        found: dict[int, dict[str, None]] = {}
        for parameter in self.parameters:
            layer = self.layer_of(parameter.name)
            if layer is not None:
                found.setdefault(layer[1], {})[layer[0]] = None
        return {index: tuple(found[index]) for index in sorted(found)}

    @property
    def num_layers(self) -> int:
        """Number of layers that the parameters' names show; 0 for a model without layers."""
        return max(self.layer_modules, default=-1) + 1


def _read(config: object, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _number(config: object, key: str) -> int | None:
    """Return a whole number of the configuration; lists (one entry per layer) are not read."""
    value = _read(config, key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
