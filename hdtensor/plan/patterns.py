"""Which part a parameter plays in tensor parallelism, by its name."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hdtensor.errors import PlanError
from hdtensor.plan.fields import check_bool, is_sequence, shown


class Role(enum.StrEnum):
    """How the ranks of one stage cut a parameter (Megatron's terms).

    ===============  =================  ==========================================================
    role             bottom placement   used for
    ===============  =================  ==========================================================
    column           S0                 output features of a linear, and its bias
    heads            S0                 q projection, or q, k, v fused head by head: as column, and
                                        tp must divide the query heads
    kv_heads         S0                 k, v projection; R where tp does not divide the KV heads
    qkv              S0x3               q, k, v fused one behind the other: each third is cut
    gate_up          S0x2               gate and up projection fused likewise: each half is cut
    row              S1                 input features of a linear; its bias is R
    vocab            S0                 rows of an embedding
    expert_column    S1                 experts' weights stacked, (experts, out, in)
    expert_gate_up   S1x2               the same, gate and up fused
    expert_row       S2                 experts' second weights stacked, (experts, out, in)
    replicate        R                  norms, routers, and whatever is small
    ===============  =================  ==========================================================

    A transposed weight, (in, out), is cut on the other of its two dims.
    """

    COLUMN = "column"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    QKV = "qkv"
    GATE_UP = "gate_up"
    ROW = "row"
    VOCAB = "vocab"
    EXPERT_COLUMN = "expert_column"
    EXPERT_GATE_UP = "expert_gate_up"
    EXPERT_ROW = "expert_row"
    REPLICATE = "replicate"

    @property
    def cuts_input(self) -> bool:
        """Whether the module's input features are cut, so that its output is ``Partial``."""
        return self in (Role.ROW, Role.VOCAB, Role.EXPERT_ROW)

    @property
    def is_expert(self) -> bool:
        """Whether it is for the stacked weights of experts."""
        return self.value.startswith("expert_")


#: Roles under which the dim that is cut consists of whole heads.
HEAD_ROLES = (Role.HEADS, Role.KV_HEADS, Role.QKV)


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
        transposed: Whether the weight is (in, out). ``transformers``' ``Conv1D`` is known without.
    """

    glob: str
    role: Role
    place: Literal["first", "last"] | None = None
    transposed: bool = False

    def __init__(
        self,
        glob: str,
        role: Role | str,
        place: Literal["first", "last"] | None = None,
        transposed: bool = False,
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
        object.__setattr__(self, "transposed", check_bool("transposed", transposed))

    def matches(self, name: str) -> bool:
        """Return whether the rule is for this parameter."""
        return fnmatch.fnmatchcase(name, self.glob) or fnmatch.fnmatchcase(name, f"*.{self.glob}")


def as_patterns(rules: Sequence[Pattern | tuple[str, str]]) -> tuple[Pattern, ...]:
    """Return rules as ``Pattern`` values.

    >>> as_patterns([("w1", "column")])
    (Pattern(glob='w1', role=<Role.COLUMN: 'column'>, place=None, transposed=False),)

    Raises:
        PlanError: If one is neither a ``Pattern`` nor a ``(glob, role)``.
    """
    if not is_sequence(rules):
        raise PlanError(f"patterns must be a list of (glob, role), got {shown(rules)}.")
    out = []
    for index, rule in enumerate(rules):
        if isinstance(rule, Pattern):
            out.append(rule)
        elif isinstance(rule, tuple | list) and len(rule) in (2, 3, 4):
            out.append(Pattern(*rule))
        else:
            raise PlanError(
                f"patterns[{index}] must be a Pattern or (glob, role), got {shown(rule)}."
            )
    return tuple(out)


def find_pattern(name: str, patterns: Sequence[Pattern]) -> Pattern | None:
    """Return the first rule that matches, or None."""
    return next((pattern for pattern in patterns if pattern.matches(name)), None)
