"""Which stages use a parameter, and under which rule: by its names, and by where it is registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hdtensor.errors import PlanError
from hdtensor.plan.families import BUILT_IN_PATTERNS
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.patterns import HEAD_ROLES, Pattern, Role, find_pattern
from hdtensor.plan.stages import Pipeline, Stage
from hdtensor.plan.validate import stage_path


#: Number of a stage in each pipeline: who uses a parameter.
Site = tuple[int, ...]


class Use(NamedTuple):
    """A parameter under one of its names.

    Attributes:
        name: The name.
        first_name: The parameter's first name; a tied one has several uses.
        shape: Global shape.
        role: The role that the first matching rule gives; replicate without one.
        is_matched: Whether a rule matches.
        transposed: Whether it is a weight of shape (in, out).
        layer: Index of the layer that the name lies in; None outside layers.
        site: The stage that uses it, in each pipeline.
    """

    name: str
    first_name: str
    shape: tuple[int, ...]
    role: Role
    is_matched: bool
    transposed: bool
    layer: int | None
    site: Site


def find_uses(
    pipelines: Sequence[Pipeline], model: ModelDescription, patterns: Sequence[Pattern]
) -> tuple[Use, ...]:
    """Return every use of every parameter, in registration order.

    ================================  ===========================================
    name                              site
    ================================  ===========================================
    in layer L                        the stage that holds L
    outside, the rule has a place     the first or the last stage
    outside, before the first layer   the first stage
    outside, after it                 the last stage
    embedding without a head, tied    the first stage, and the last as the head
    ================================  ===========================================

    Args:
        pipelines: The pipelines.
        model: The model.
        patterns: The user's rules; the built-in ones follow, where they fit the model.

    Raises:
        PlanError: If the stages do not cover the model's layers.
    """
    find = Rules(model, patterns).find
    check_cover(pipelines, model)
    by_layer = layer_sites(pipelines)
    first = (0,) * len(pipelines)
    last = tuple(len(pipeline.stages) - 1 for pipeline in pipelines)
    uses: list[Use] = []
    seen_layer = False
    places = set()
    for name, shape, same_as, transposed in model.parameters:
        rule = find(name)
        found = model.layer_of(name)
        layer = None if found is None else found[1]
        place = None if rule is None else rule.place
        if layer is not None:
            site = by_layer[layer]
            seen_layer = True
        elif place is None:
            site = last if seen_layer else first
        else:
            site = first if place == "first" else last
            places.add(place)
        role = Role.REPLICATE if rule is None else rule.role
        transposed = transposed or (rule is not None and rule.transposed and len(shape) == 2)
        uses.append(
            Use(name, same_as or name, shape, role, rule is not None, transposed, layer, site)
        )
    if model.tie_word_embeddings and "last" not in places:
        uses += [
            use._replace(site=last)
            for use in uses
            if use.layer is None and getattr(find(use.name), "place", None) == "first"
        ]
    return tuple(uses)


class Rules:
    """The rules for a model's parameters: the user's, then the built-in ones that fit."""

    def __init__(self, model: ModelDescription, patterns: Sequence[Pattern]) -> None:
        self._patterns = patterns
        self._model = model
        self._shapes = {p.name: p.shape for p in model.parameters}
        self._transposed = {p.name for p in model.parameters if p.transposed}

    def find(self, name: str) -> Pattern | None:
        """Return the rule for a parameter, None if there is none."""
        rule = find_pattern(name, self._patterns)
        if rule is not None:
            return rule
        rule = find_pattern(name, BUILT_IN_PATTERNS)
        return rule if rule is not None and self._fits(name, rule.role) else None

    def _fits(self, name: str, role: Role) -> bool:
        """Whether a name means here what it means in the families that the rule was written for.

        The heads must be known, and divide the rows; stacked experts must be (experts, out, in) and have no
        biases, which each rank would add.
        """
        shape = self._shapes[name]
        if role is Role.REPLICATE:
            return True
        if not shape:
            return False
        if role.is_expert:
            return self._are_experts(name.rpartition(".")[0])
        rows = shape[-1] if name in self._transposed else shape[0]
        heads, kv_heads = self._model.num_attention_heads, self._model.num_key_value_heads
        if role in HEAD_ROLES:
            if heads is None or kv_heads is None:
                return False
            if role is Role.QKV:
                return heads == kv_heads and rows % (3 * heads) == 0
            return rows % (heads if role is Role.HEADS else kv_heads) == 0
        return role is not Role.GATE_UP or rows % 2 == 0

    def _are_experts(self, module: str) -> bool:
        first = self._shapes.get(f"{module}.gate_up_proj", ())
        second = self._shapes.get(f"{module}.down_proj", ())
        others = [n for n in self._shapes if n.startswith(f"{module}.") and n.endswith("bias")]
        if len(first) != 3 or len(second) != 3 or others:
            return False
        return first == (second[0], 2 * second[2], second[1])


def layer_sites(pipelines: Sequence[Pipeline]) -> tuple[Site, ...]:
    """Return for each layer the number of the stage that holds it, in each pipeline.

    >>> def pipeline(*layers):
    ...     return Pipeline(stages=tuple(Stage(ranks=(0,), layers=pair) for pair in layers))
    >>> layer_sites([pipeline((0, 1), (2, 2)), pipeline((0, 0), (1, 2))])
    ((0, 0), (0, 1), (1, 1))
    """
    starts: dict[int, list[tuple[int, int]]] = {}
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            starts.setdefault(stage.layers[0], []).append((p, s))
    now = [0] * len(pipelines)
    sites: list[Site] = []
    for layer in range(pipelines[0].stages[-1].layers[1] + 1):
        for p, s in starts.get(layer, ()):
            now[p] = s
        sites.append(tuple(now) if layer in starts else sites[-1])
    return tuple(sites)


def stages_at(pipelines: Sequence[Pipeline], site: Site) -> list[Stage]:
    """Return the stage of each pipeline at a site."""
    return [pipeline.stages[s] for pipeline, s in zip(pipelines, site, strict=True)]


def check_cover(pipelines: Sequence[Pipeline], model: ModelDescription) -> None:
    """Raise unless the stages cover the model's layers.

    Raises:
        PlanError: If the numbers of layers differ, or several stages meet a model without layers
            or with two stacks of layers.
    """
    layer_modules = model.layer_modules
    num_layers = max(layer_modules, default=-1) + 1
    covered = pipelines[0].stages[-1].layers[1] + 1
    if num_layers and covered != num_layers:
        last = stage_path(0, len(pipelines[0].stages) - 1)
        raise PlanError(
            f"{last}.layers: the plan covers {covered} layers, but the model has {num_layers}. "
            f"Give layers 0 to {num_layers - 1}."
        )
    for p, pipeline in enumerate(pipelines):
        if len(pipeline.stages) == 1:
            continue
        if not num_layers:
            raise PlanError(
                f"pipelines[{p}].stages: {len(pipeline.stages)} stages need layers, but no "
                f"parameter's name matches layer_regex {model.layer_regex!r}."
            )
        for modules in layer_modules.values():
            if len(modules) > 1:
                raise PlanError(
                    f"pipelines[{p}].stages: the model has more than one stack of layers "
                    f"({', '.join(modules)}); choose one by "
                    f"ModelDescription.from_module(model, layer_regex=...)."
                )
