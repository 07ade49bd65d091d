"""Which device bytes travel from: the tensors' own, or host memory where ranks are not alike.

NCCL joins CUDA devices only, other vendors' libraries only theirs. Where a group has ranks of several
kinds of device, or no such library was asked for, bytes are copied to the host and go over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hdtensor.collectives.groups import accelerators, backends, device_type
from hdtensor.errors import GroupError


_CPU = torch.device("cpu")
#: Backends that carry bytes of host memory.
_HOST_BACKENDS = ("gloo", "mpi", "ucc", "fake")


def wire_device(device: torch.device, ranks: Sequence[int]) -> torch.device:
    """Return the device from which the tensors of a group of ranks are sent.

    A tensor is taken to lie on each rank's accelerator, or on every rank's CPU.

    Args:
        device: Where this rank's tensor is.
        ranks: Global ranks that take part.

    Raises:
        GroupError: If the bytes must pass host memory and the world has no backend for it.
    """
    names = backends()
    if device.type == "cpu":
        if names.get("cpu") in _HOST_BACKENDS:
            return device
        raise GroupError(_no_host_text(f"a tensor on the CPU cannot be sent over {names}"))
    kinds = accelerators()
    own = names.get(device.type)
    is_native = own is not None and own not in _HOST_BACKENDS
    if is_native and all(kinds[rank] == device.type for rank in ranks):
        return device
    if names.get("cpu") in _HOST_BACKENDS:
        return _CPU
    unlike = ", ".join(f"rank {rank}: {kinds[rank]}" for rank in ranks)
    raise GroupError(_no_host_text(f"the ranks' devices are not alike ({unlike})"))


def is_on_host(device: torch.device) -> bool:
    """Return whether a tensor is where gloo takes it, without asking who takes part."""
    return device.type == "cpu" and backends().get("cpu") in _HOST_BACKENDS


def is_host_only() -> bool:
    """Return whether no rank has an accelerator: the same answer on every rank."""
    return device_type() == "cpu" and all(kind == "cpu" for kind in accelerators())


def _no_host_text(what: str) -> str:
    return (
        f"{what}, and there is no backend for host memory. Start with "
        f"torch.distributed.init_process_group('cpu:gloo,cuda:nccl')."
    )
