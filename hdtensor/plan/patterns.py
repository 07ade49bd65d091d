"""Which part a parameter plays in tensor parallelism, by its name."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hdtensor.errors import PlanError
from hdtensor.plan.fields import is_sequence, shown


class Role(enum.StrEnum):
    """How the ranks of one stage cut a parameter (Megatron's terms).

    =========  =================  ===============================================================
    role       bottom placement   used for
    =========  =================  ===============================================================
    column     Shard(0)           output features of a linear, and its bias
    heads      Shard(0)           q projection: as column, and tp must divide the query heads
    kv_heads   Shard(0)           k, v projection; Replicate where tp does not divide the KV heads
    row        Shard(1)           input features of a linear; its bias is Replicate
    vocab      Shard(0)           rows of an embedding
    replicate  Replicate          norms, and whatever is small
    =========  =================  ===============================================================
    """

    COLUMN = "column"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    ROW = "row"
    VOCAB = "vocab"
    REPLICATE = "replicate"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A rule for parameters by name.

    >>> Pattern("q_proj.weight", "heads").matches("model.layers.0.self_attn.q_proj.weight")
    True

    Attributes:
        glob: Matches a whole name, or the end of one that begins after a dot. ``*`` matches dots too.
        role: A ``Role``, or its text.
        place: Where a parameter outside the layers is used: in the "first" or the "last" stage of
            each pipeline. None: first if it is registered before the layers, else last.
    """

    glob: str
    role: Role
    place: Literal["first", "last"] | None = None

    def __init__(
        self, glob: str, role: Role | str, place: Literal["first", "last"] | None = None
    ) -> None:
        """Check and freeze.

        Raises:
            PlanError: On an unknown role or place, or a glob that is no text.
        """
        if not isinstance(glob, str) or not glob:
            raise PlanError(f"a pattern's glob must be a text, got {shown(glob)}.")
        if role not in [known.value for known in Role]:
            raise PlanError(
                f"the pattern {glob!r} has the role {shown(role)}; allowed: {', '.join(Role)}."
            )
        if place not in (None, "first", "last"):
            raise PlanError(
                f"the pattern {glob!r} has the place {shown(place)}; allowed: 'first', 'last', None."
            )
        object.__setattr__(self, "glob", glob)
        object.__setattr__(self, "role", Role(role))
        object.__setattr__(self, "place", place)

    def matches(self, name: str) -> bool:
        """Return whether the rule is for this parameter."""
        return fnmatch.fnmatchcase(name, self.glob) or fnmatch.fnmatchcase(name, f"*.{self.glob}")


#: Rules for Llama, Qwen3 and models that name their parameters alike.
LLAMA_PATTERNS: tuple[Pattern, ...] = (
    Pattern("q_proj.weight", Role.HEADS),
    Pattern("q_proj.bias", Role.HEADS),
    Pattern("k_proj.weight", Role.KV_HEADS),
    Pattern("k_proj.bias", Role.KV_HEADS),
    Pattern("v_proj.weight", Role.KV_HEADS),
    Pattern("v_proj.bias", Role.KV_HEADS),
    Pattern("o_proj.weight", Role.ROW),
    Pattern("o_proj.bias", Role.ROW),
    Pattern("gate_proj.weight", Role.COLUMN),
    Pattern("gate_proj.bias", Role.COLUMN),
    Pattern("up_proj.weight", Role.COLUMN),
    Pattern("up_proj.bias", Role.COLUMN),
    Pattern("down_proj.weight", Role.ROW),
    Pattern("down_proj.bias", Role.ROW),
    Pattern("embed_tokens.weight", Role.REPLICATE, "first"),
    Pattern("lm_head.weight", Role.REPLICATE, "last"),
    Pattern("lm_head.bias", Role.REPLICATE, "last"),
    Pattern("*norm.weight", Role.REPLICATE),
    Pattern("*norm.bias", Role.REPLICATE),
)

#: Put before the built-in rules, these cut the vocabulary of the embedding and of the logits.
VOCAB_PARALLEL: tuple[Pattern, ...] = (
    Pattern("embed_tokens.weight", Role.VOCAB, "first"),
    Pattern("lm_head.weight", Role.COLUMN, "last"),
    Pattern("lm_head.bias", Role.COLUMN, "last"),
)


def as_patterns(rules: Sequence[Pattern | tuple[str, str]]) -> tuple[Pattern, ...]:
    """Return rules as ``Pattern`` values.

    >>> as_patterns([("w1", "column")])
    (Pattern(glob='w1', role=<Role.COLUMN: 'column'>, place=None),)

    Raises:
        PlanError: If one is neither a ``Pattern`` nor a ``(glob, role)``.
    """
    if not is_sequence(rules):
        raise PlanError(f"patterns must be a list of (glob, role), got {shown(rules)}.")
    out = []
    for index, rule in enumerate(rules):
        if isinstance(rule, Pattern):
            out.append(rule)
        elif isinstance(rule, tuple | list) and len(rule) in (2, 3):
            out.append(Pattern(*rule))
        else:
            raise PlanError(
                f"patterns[{index}] must be a Pattern or (glob, role), got {shown(rule)}."
            )
    return tuple(out)


def find_pattern(name: str, patterns: Sequence[Pattern]) -> Pattern | None:
    """Return the first rule that matches, or None."""
    return next((pattern for pattern in patterns if pattern.matches(name)), None)
