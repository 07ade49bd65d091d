"""``SwitchReport``: what a switch did."""

from __future__ import annotations

from dataclasses import dataclass

from hdtensor.elastic.plan_switch import SwitchPlan


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SwitchReport:
    """What a switch did.

    Attributes:
        plan: Who sent what to whom.
        moved: Names of the tensors whose shards changed on some rank.
        num_rounds: Number of rounds.
        seconds: Time on this rank.
    """

    plan: SwitchPlan
    moved: tuple[str, ...]
    num_rounds: int
    seconds: float

    def __repr__(self) -> str:
        return f"SwitchReport({self})"

    def __str__(self) -> str:
        num_bytes = self.plan.num_bytes
        size = f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes:,} bytes"
        return (
            f"{len(self.moved)} tensors, {size} in {self.num_rounds} "
            f"round{'' if self.num_rounds == 1 else 's'}, {self.seconds:.3f} s"
        )
