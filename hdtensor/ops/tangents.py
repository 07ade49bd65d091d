"""What a compiler asks of an ``HDTensor``: the layouts of gradients to come, and what tells its programs apart on disk.

A compiler traces the backward before any gradient is there, so it guesses their layouts from the outputs, and has what
comes at run time changed to what it guessed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from hdtensor._torch_compat import extend_tangents
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import tensor_type, wrap
from hdtensor.ops.shard import shard_of
from hdtensor.ops.special.move import gradient_bound, move


def as_tangent(output: Any) -> Any:
    """Return a tangent of an output as it is guessed: a pending sum's gradient is whole.

    The values do not matter, so nothing is communicated: ranks may trace at different moments.
    """
    extend_tangents(tensor_type(), _from_plain)
    bound = gradient_bound(output._spec)
    return output if bound is output._spec else wrap(output._local_tensor, bound)


def _from_plain(grad: torch.Tensor, bound: BoundSpec) -> Any:
    """Return a whole plain gradient, alike on every rank, in the layout that was guessed."""
    return wrap(shard_of(grad, bound), bound)


def like_tangent(grad: Any, bound: BoundSpec) -> Any:
    """Return a gradient in the layout that was guessed; every rank of both calls it."""
    return move(grad, bound.spec, bound.top_sizes, reverse=True)


def stable_hash(tensor: Any) -> str:
    """Return what tells a tensor's programs apart, alike in every process: also the rank, as each has its own program."""
    bound, local = tensor._spec, tensor._local_tensor
    parts = (
        repr(bound),
        bound.stride,
        bound.rank,
        bound.is_copy,
        tuple(local.shape),
        local.stride(),
        str(local.device),
        tensor.requires_grad,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
