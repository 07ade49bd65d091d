"""Models by name, and by a Hugging Face ``config.json``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

from hdtensor.errors import PlannerError
from hdtensor.pipeline.plan_files import MODELS as LLAMAS
from hdtensor.plan.fields import check_bool, check_object, shown
from hdtensor.plan.reader import parse_json, read_file
from hdtensor.planner.model import ModelShape
from hdtensor.planner.quantities import planner_errors, whole_number


def _llama(
    name: str, num_layers: int, hidden: int, num_heads: int, ffn: int, **more: Any
) -> ModelShape:
    sizes: dict[str, Any] = {"vocab": 32000, "num_kv_heads": num_heads, **more}
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        head_dim=hidden // num_heads,
        ffn=ffn,
        **sizes,
    )


_PRESETS = (
    # Mixtral of Experts (arXiv:2401.04088), table 1.
    _llama("mixtral-8x7B", 32, 4096, 32, 14336, num_kv_heads=8, num_experts=8, experts_per_token=2),
    # DeepSeekMoE (arXiv:2401.06066), DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437).
    _llama(
        "deepseek-moe-16B",
        28,
        2048,
        16,
        1408,
        vocab=102400,
        num_experts=64,
        experts_per_token=6,
        num_shared_experts=2,
        num_dense_layers=1,
        dense_ffn=10944,
    ),
    ModelShape(
        name="deepseek-v2-lite",
        num_layers=27,
        hidden=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=192,
        ffn=1408,
        vocab=102400,
        num_experts=64,
        experts_per_token=6,
        num_shared_experts=2,
        num_dense_layers=1,
        dense_ffn=10944,
        kv_rank=512,
        rope_dim=64,
        value_dim=128,
    ),
    ModelShape(
        name="deepseek-v3",
        num_layers=61,
        hidden=7168,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        ffn=2048,
        vocab=129280,
        num_experts=256,
        experts_per_token=8,
        num_shared_experts=1,
        num_dense_layers=3,
        dense_ffn=18432,
        q_rank=1536,
        kv_rank=512,
        rope_dim=64,
        value_dim=128,
    ),
    # As the Sailor paper's artifact (MIT licence) trains them; its OPT-350 has an embedding as wide as the
    # layers, and its GPT-Neo 32 heads and a vocabulary of 128,256.
    _llama("opt-350", 24, 1024, 16, 4096, vocab=50272, num_matrices=2, num_positions=2050),
    _llama("gpt-neo-2.7", 32, 2560, 32, 10240, vocab=128256, num_matrices=2, num_positions=2048),
    _llama("opt-30", 48, 7168, 56, 28672, vocab=50272, num_matrices=2, num_positions=2050),
)

#: Name -> sizes. Llamas are those of ``pipeline.plan_files``, Llama 2 (arXiv:2307.09288) and 3, and the HSPMD
#: paper's 32B (table 6).
MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        name: _llama(
            name,
            sizes["num_hidden_layers"],
            sizes["hidden_size"],
            sizes["num_attention_heads"],
            sizes["intermediate_size"],
            num_kv_heads=sizes["num_key_value_heads"],
            vocab=sizes["vocab_size"],
        )
        for name, sizes in LLAMAS.items()
    }
    | {shape.name: shape for shape in _PRESETS}
)

#: Other names.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "mixtral": "mixtral-8x7B",
        "deepseek": "deepseek-v3",
        "OPT-350": "opt-350",
        "LLAMA-3-8": "llama-3-8B",
    }
)

#: Families of Hugging Face models -> (matrices of an MLP, whether the head is the embedding by default).
_FAMILIES: Mapping[str, tuple[int, bool]] = MappingProxyType(
    {
        "bloom": (2, True),
        "deepseek": (3, False),
        "deepseek_v2": (3, False),
        "deepseek_v3": (3, False),
        "falcon": (2, True),
        "gemma": (3, True),
        "gemma2": (3, True),
        "gemma3_text": (3, True),
        "gpt2": (2, True),
        "gpt_neo": (2, True),
        "gpt_neox": (2, False),
        "gptj": (2, False),
        "granite": (3, False),
        "llama": (3, False),
        "mistral": (3, False),
        "mixtral": (3, False),
        "olmo": (3, False),
        "olmo2": (3, False),
        "opt": (2, True),
        "phi": (2, False),
        "phi3": (3, False),
        "qwen2": (3, False),
        "qwen2_moe": (3, False),
        "qwen3": (3, False),
        "qwen3_moe": (3, False),
        "stablelm": (3, False),
        "starcoder2": (2, True),
    }
)

#: Size -> the keys that families have for it, in the order in which they are looked up.
_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
        "hidden": ("hidden_size", "n_embd"),
        "num_heads": ("num_attention_heads", "n_head", "num_heads"),
        "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
        "head_dim": ("head_dim",),
        "ffn": ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner"),
        "dense_ffn": ("intermediate_size",),
        "vocab": ("vocab_size",),
        "num_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
        "experts_per_token": ("num_experts_per_tok",),
        "num_shared_experts": ("n_shared_experts",),
        "num_dense_layers": ("first_k_dense_replace",),
        "q_rank": ("q_lora_rank",),
        "kv_rank": ("kv_lora_rank",),
        "rope_dim": ("qk_rope_head_dim",),
        "value_dim": ("v_head_dim",),
    }
)
_POSITIONS = ("gpt2", "gpt_neo", "opt")
_MOST = 1 << 30
_REQUIRED: Any = object()


def find_model(name: str | os.PathLike[str]) -> ModelShape:
    """Return a model by its name, in any case, or by the path of its ``config.json``.

    >>> find_model("llama-32b").num_layers
    60

    Args:
        name: One of ``MODELS``, a file that ends in .json, or a folder that has a ``config.json``.

    Raises:
        PlannerError: If there is no such model, or the file is none.
    """
    text = os.fspath(name)
    for key, shape in MODELS.items():
        if key.lower() == text.lower():
            return shape
    for alias, key in ALIASES.items():
        if alias.lower() == text.lower():
            return MODELS[key]
    if os.path.isdir(text):
        text = os.path.join(text, "config.json")
    if text.endswith(".json"):
        with planner_errors("model"):
            config = parse_json(read_file(text, "the model's configuration"), "the configuration")
        return shape_of_config(
            config, name=os.path.basename(os.path.dirname(os.path.abspath(text)))
        )
    near = difflib.get_close_matches(text[:60].lower(), [key.lower() for key in MODELS], n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise PlannerError(
        f"model: {shown(text)} is unknown; known are {', '.join(MODELS)}. {hint}Or give the path of its "
        f"config.json."
    )


def shape_of_config(config: Any, *, name: str = "") -> ModelShape:
    """Return the sizes that a Hugging Face configuration states.

    >>> shape_of_config({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 9}).ffn
    32

    Args:
        config: Its JSON value. A model of several modalities is read by its ``text_config``. Key
            ``num_matrices`` (2 or 3) describes the MLP of a family that is unknown here.
        name: For reports; default what the configuration says.

    Raises:
        PlannerError: If a size is missing or wrong; the message begins with its key.
    """
    with planner_errors():
        config = check_object("config", config)
        if isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]
        reader = _ConfigReader(config)
        return reader.shape(name)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST


class _ConfigReader:
    """Reads sizes under whatever key a family has for them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def shape(self, name: str) -> ModelShape:
        """Return all sizes."""
        family, num_matrices, is_tied = self._family()
        hidden = self._number("hidden")
        num_heads = self._number("num_heads")
        kv_rank = self._number("kv_rank", 0, least=0)
        if kv_rank:
            head_dim = self._latent_head_dim()
        else:
            head_dim = self._number("head_dim", self._divided(hidden, num_heads))
        num_experts = self._number("num_experts", 0, least=0)
        tied = self._config.get("tie_word_embeddings")
        more = {"experts_per_token": 0, "num_shared_experts": 0, "num_dense_layers": 0}
        if num_experts:
            more = {
                "experts_per_token": self._number("experts_per_token"),
                "num_shared_experts": self._number("num_shared_experts", 0, least=0),
                "num_dense_layers": self._number("num_dense_layers", 0, least=0),
            }
            more["dense_ffn"] = self._number("dense_ffn") if more["num_dense_layers"] else 0
        if kv_rank:
            more |= {
                key: self._number(key, 0, least=0) for key in ("q_rank", "rope_dim", "value_dim")
            }
        return ModelShape(
            name=name or self._text("_name_or_path") or family,
            num_layers=self._number("num_layers"),
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=self._kv_heads(num_heads),
            head_dim=head_dim,
            ffn=self._number("ffn", 4 * hidden, keys=self._ffn_keys(num_experts)),
            vocab=self._number("vocab"),
            num_matrices=num_matrices,
            is_tied=is_tied if tied is None else check_bool("tie_word_embeddings", tied),
            num_experts=num_experts,
            kv_rank=kv_rank,
            num_positions=self._positions(family),
            max_context=self._max_context(),
            **more,
        )

    def _family(self) -> tuple[str, int, bool]:
        family = self._text("model_type")
        said = self._config.get("num_matrices")
        if family in _FAMILIES:
            num_matrices, is_tied = _FAMILIES[family]
        elif said is None:
            raise PlannerError(
                f"model_type: {shown(family or None)} is unknown; known are {', '.join(_FAMILIES)}. For "
                f"another one add num_matrices: 3 if its MLP is gated, else 2."
            )
        else:
            num_matrices, is_tied = 3, False
        if said is not None:
            num_matrices = whole_number("num_matrices", said, 2, 3)
        return family or "model", num_matrices, is_tied

    def _latent_head_dim(self) -> int:
        parts = [
            whole_number(key, self._config.get(key), 1, 1 << 20)
            for key in ("qk_nope_head_dim", "qk_rope_head_dim")
        ]
        return sum(parts)

    def _kv_heads(self, num_heads: int) -> int:
        if self._config.get("multi_query") is True and "num_kv_heads" not in self._config:
            return 1
        return self._number("num_kv_heads", num_heads)

    def _ffn_keys(self, num_experts: int) -> tuple[str, ...]:
        return _KEYS["ffn"] if num_experts else _KEYS["ffn"][1:]

    def _positions(self, family: str) -> int:
        if family not in _POSITIONS:
            return 0
        for key in ("n_positions", "max_position_embeddings"):
            if self._config.get(key) is not None:
                # OPT keeps two more rows, for padding.
                return whole_number(key, self._config[key], 1, _MOST - 2) + 2 * (family == "opt")
        return 0

    def _max_context(self) -> int:
        """Return the tokens of a sample that positions are made for, scaled ones too; 0 if that is not said.

        Some families give the scaled number, others the one before scaling: the larger one is taken.
        """
        said = self._config.get("max_position_embeddings") or self._config.get("n_positions")
        most = said if _is_count(said) else 0
        scaling = self._config.get("rope_scaling") or self._config.get("rope_parameters")
        if not most or not isinstance(scaling, Mapping):
            return most
        factor = scaling.get("factor")
        before = scaling.get("original_max_position_embeddings", most)
        if not _is_count(before) or not isinstance(factor, int | float) or not 1 <= factor <= _MOST:
            return most
        return min(max(most, int(before * factor)), _MOST)

    def _divided(self, hidden: int, num_heads: int) -> int:
        if "head_dim" not in self._config and hidden % num_heads:
            raise PlannerError(
                f"{self._key('num_heads')}: {num_heads} heads must divide the hidden size {hidden}, or the "
                f"configuration must have head_dim."
            )
        return max(hidden // num_heads, 1)

    def _key(self, size: str) -> str:
        return next((key for key in _KEYS[size] if key in self._config), _KEYS[size][0])

    def _number(
        self,
        size: str,
        default: Any = _REQUIRED,
        *,
        least: int = 1,
        keys: tuple[str, ...] | None = None,
    ) -> int:
        """Return a size; null counts as absent, as Hugging Face writes it."""
        keys = keys or _KEYS[size]
        for key in keys:
            if self._config.get(key) is not None:
                return whole_number(key, self._config[key], least, _MOST)
        if default is _REQUIRED:
            raise PlannerError(
                f"{keys[0]}: missing; the configuration must have one of {', '.join(keys)}, an integer."
            )
        number: int = default
        return number

    def _text(self, key: str) -> str:
        value = self._config.get(key)
        return value[:100] if isinstance(value, str) and value.isprintable() else ""
