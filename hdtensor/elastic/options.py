"""``SwitchOptions``: how a switch is carried out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from hdtensor.elastic.plan_switch import Rules, check_ranks, check_rules, whole_number
from hdtensor.errors import PlanError
from hdtensor.plan.fields import shown
from hdtensor.redistribute.topology import UNIFORM, Topology


#: Default memory for messages.
BUDGET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchOptions:
    """How a switch is carried out; the same on every rank.

    Attributes:
        atomic: Whether a failure leaves everything as it was.
        budget_bytes: Memory for messages; without ``atomic`` for new shards too.
        stage_on_host: With ``atomic``: keep new shards in host memory until the end.
        timeout: How long to wait for a message; None for the process group's timeout.
        topology: Links between the ranks, for the choice of senders.
        exclude_ranks: Dead ranks: what they hold is taken from others.
        rules: How senders are chosen; "relay" lets idle neighbours forward.

    Raises:
        PlanError: If a value is none of these.
    """

    atomic: bool = True
    budget_bytes: int = BUDGET_BYTES
    stage_on_host: bool = False
    timeout: timedelta | None = None
    topology: Topology = UNIFORM
    exclude_ranks: Collection[int] = ()
    rules: Rules = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "budget_bytes", whole_number("budget_bytes", self.budget_bytes, 1))
        set_(self, "exclude_ranks", check_ranks(self.exclude_ranks))
        check_rules(self.rules)
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise PlanError(f"timeout: must be a datetime.timedelta, got {shown(self.timeout)}.")
        if not isinstance(self.topology, Topology):
            raise PlanError(f"topology: must be a Topology, got {shown(self.topology)}.")
