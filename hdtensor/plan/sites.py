"""Which stages use a parameter, and under which rule: by its names, and by where it is registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hdtensor.errors import PlanError
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.patterns import Pattern, Role, find_pattern
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
        layer: Index of the layer that the name lies in; None outside layers.
        site: The stage that uses it, in each pipeline.
    """

    name: str
    first_name: str
    shape: tuple[int, ...]
    role: Role
    is_matched: bool
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

    Raises:
        PlanError: If the stages do not cover the model's layers.
    """
    check_cover(pipelines, model)
    by_layer = layer_sites(pipelines)
    first = (0,) * len(pipelines)
    last = tuple(len(pipeline.stages) - 1 for pipeline in pipelines)
    uses: list[Use] = []
    seen_layer = False
    places = set()
    for name, shape, same_as in model.parameters:
        rule = find_pattern(name, patterns)
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
        uses.append(Use(name, same_as or name, shape, role, rule is not None, layer, site))
    if model.tie_word_embeddings and "last" not in places:
        uses += [
            use._replace(site=last)
            for use in uses
            if use.layer is None
            and getattr(find_pattern(use.name, patterns), "place", None) == "first"
        ]
    return tuple(uses)


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
