"""Plans and models for the command line: one plan of a file of several, and models by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hdtensor.errors import PlanError
from hdtensor.plan import AnnotationPlan, ModelDescription, StrategyPlan
from hdtensor.plan.fields import check_int, check_object, check_sequence, shown
from hdtensor.plan.reader import parse_json, read_file


#: Names of models -> their numbers: the paper's 32B (Table 6), and Llama 2 70B, of which it states the layers.
MODELS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "llama-32B": {
            "num_hidden_layers": 60,
            "hidden_size": 6656,
            "intermediate_size": 17920,
            "num_attention_heads": 64,
            "vocab_size": 50304,
        },
        "llama-70B": {
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        },
    }
)

_MOST = 1 << 30


def read_plan(path: str | os.PathLike[str], *, label: str | None = None) -> AnnotationPlan:
    """Read a plan, or one of the plans of a file such as ``{"plans": [...]}``.

    Args:
        path: The file.
        label: What the label of one plan of several begins with.

    Raises:
        PlanError: If there is no such plan.
    """
    value = check_object("plan", parse_json(read_file(path)))
    if "plans" not in value:
        if label is not None:
            raise PlanError(f"label: {os.fspath(path)!r} is one plan; leave the label out.")
        return AnnotationPlan.from_dict(value)
    plans = [
        check_object(f"plans[{index}]", item)
        for index, item in enumerate(check_sequence("plans", value["plans"], "plans"))
    ]
    labels = [str(plan.get("label")) for plan in plans]
    fitting = [i for i, name in enumerate(labels) if label is not None and name.startswith(label)]
    if len(fitting) != 1:
        fault = "there are several plans" if not fitting else "more than one plan fits"
        raise PlanError(
            f"label: {fault} in {os.fspath(path)!r}; give the beginning of one label of "
            f"{'; '.join(shown(name) for name in labels)}."
        )
    return AnnotationPlan.from_dict(plans[fitting[0]])


def read_model(plan: AnnotationPlan, name: str | None = None) -> ModelDescription:
    """Return the description of a Llama by name, or by its configuration.

    Args:
        plan: Its ``model`` is the name if none is given.
        name: One of ``MODELS``, or the path of a Hugging Face ``config.json``.

    Raises:
        PlanError: If nothing says the model, or its numbers are none of a Llama.
    """
    if name is None and isinstance(plan, StrategyPlan):
        name = plan.about.model
    if name is None:
        raise PlanError(
            f"model: the plan does not say its model; give one of {', '.join(MODELS)}, or a config.json."
        )
    config: Mapping[str, Any]
    if name in MODELS:
        config = MODELS[name]
    elif name.endswith(".json"):
        config = check_object("config", parse_json(read_file(name)))
    else:
        raise PlanError(
            f"model: {shown(name)} is unknown; known are {', '.join(MODELS)}. Give the path of its config.json."
        )

    def number(key: str, default: Any = None) -> int:
        value = config.get(key)
        return check_int(key, default if value is None else value, 1, _MOST)

    heads = number("num_attention_heads")
    return ModelDescription.llama(
        num_layers=number("num_hidden_layers"),
        hidden_size=number("hidden_size"),
        intermediate_size=number("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=number("num_key_value_heads", heads),
        vocab_size=number("vocab_size"),
        tie_word_embeddings=config.get("tie_word_embeddings") is True,
    )
