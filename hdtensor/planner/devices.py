"""``Device``: what one kind of accelerator can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hdtensor.errors import PlannerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of accelerator, by its datasheet.

    Attributes:
        name: Such as "H800".
        memory_bytes: Of one device.
        flops: Name of an element type (as ``bfloat16``) -> dense operations per second.
        memory_bandwidth: Bytes per second that it reads or writes.
        link_bandwidth: Bytes per second, one direction, to devices of its node.
        source: Where the numbers come from.
        network_bandwidth: Bytes per second, one direction, that it usually has to other nodes, where nobody says it.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    source: str
    network_bandwidth: float = 1.25e9

    def __hash__(self) -> int:
        return hash(self.name)  # ``flops`` is a mapping, which has no hash

    def flops_of(self, dtype: str) -> float:
        """Return dense operations per second with an element type.

        Raises:
            PlannerError: If the device does not know it.
        """
        if dtype not in self.flops:
            raise PlannerError(
                f"precision: {self.name} has no rate for {dtype}; it has {', '.join(self.flops)}."
            )
        return self.flops[dtype]
