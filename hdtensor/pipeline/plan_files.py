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


def _llama(
    num_layers: int, hidden: int, heads: int, width: int, vocab: int, kv_heads: int | None = None
) -> Mapping[str, int]:
    return {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "vocab_size": vocab,
    }


#: Names of models -> their numbers: Llama 2 and 3, and the paper's 32B (Table 6).
MODELS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "llama-7B": _llama(32, 4096, 32, 11008, 32000),
        "llama-13B": _llama(40, 5120, 40, 13824, 32000),
        "llama-32B": _llama(60, 6656, 64, 17920, 50304),
        "llama-70B": _llama(80, 8192, 64, 28672, 32000, 8),
        "llama-3-8B": _llama(32, 4096, 32, 14336, 128256, 8),
        "llama-3-70B": _llama(80, 8192, 64, 28672, 128256, 8),
    }
)

#: What a file is that has such a key, and what to do with it.
_OTHER_FILES: Mapping[str, str] = MappingProxyType(
    {
        "model_type": "the configuration of a model, which goes to --model",
        "architectures": "the configuration of a model, which goes to --model",
        "hidden_size": "the configuration of a model, which goes to --model",
        "units": "a profile, which goes to --profile",
        "nodes": "the description of a cluster, which goes to --cluster",
        "cluster": "the description of a cluster, which goes to --cluster",
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
    if not any(key in value for key in ("plans", "pipelines", "uniform", "tensors", "version")):
        kind = next((words for key, words in _OTHER_FILES.items() if key in value), None)
        what = (
            "it has none of pipelines, uniform, tensors or plans"
            if kind is None
            else f"it is {kind}"
        )
        raise PlanError(
            f"plan: {os.fspath(path)!r} is no plan: {what}. Give a plan as `hdtensor plan -o plan.json` writes it."
        )
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
        fault = "there are several plans"
        if label is not None:
            fault = f"{'more than one plan fits' if fitting else 'no plan fits'} {shown(label)}"
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
            f"model: {shown(name)} is unknown; known are {', '.join(MODELS)}. Give the path of its config.json by --model."
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
