"""What a compiler asks of an ``HDTensor``: the layouts of gradients to come, and what tells its programs apart on disk.

A compiler traces the backward before any gradient is there, so it guesses their layouts from the outputs, and has what
comes at run time changed to what it guessed.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

from hdtensor._torch_compilers import extend_tangents
from hdtensor.errors import DeductionError
from hdtensor.ops.bound import BoundSpec, Layout, kept_sizes, rebound
from hdtensor.ops.inner import extents_of, flattened, keep_extents, with_inner
from hdtensor.ops.registry import tensor_type, wrap
from hdtensor.ops.shard import shard_of
from hdtensor.ops.special.move import gradient_bound, move


def as_tangent(output: Any) -> Any:
    """Return a tangent of an output as it is guessed: a pending sum's gradient is whole.

    The values do not matter, so nothing is communicated: ranks may trace at different moments.
    """
    extend_tangents(tensor_type(), _from_plain)
    bound = gradient_bound(output._spec)
    if bound.spec is output._spec.spec:
        return output
    tangent = wrap(output._local_tensor, bound)
    if len(flattened(output)[0]) > 1:
        keep_extents(tangent, extents_of(output))
    return tangent


def _from_plain(grad: torch.Tensor, known: BoundSpec | Layout) -> Any:
    """Return a whole plain gradient, alike on every rank, in the layout that was guessed."""
    if isinstance(known, BoundSpec):
        bound = known
    elif known.has_own_cut:
        bound = rebound(known, grad.shape, grad.stride(), None)
    else:
        raise DeductionError(
            f"no gradient came to an output of the compiled function that is cut by extents of its own ({known.spec}), so "
            f"that its shards' sizes are not known here. Use it in the loss, or return it detached."
        )
    return wrap(shard_of(grad, bound), bound)


def like_tangent(grad: Any, known: BoundSpec | Layout) -> Any:
    """Return a gradient in the layout that was guessed; every rank of both calls it."""
    bound = grad._spec
    sizes = known.top_sizes if isinstance(known, BoundSpec) else kept_sizes(bound, known.spec, None)
    if bound.spec is not known.spec or (sizes is not None and sizes != bound.top_sizes):
        grad = move(grad, known.spec, None if sizes is None else tuple(sizes), reverse=True)
    is_one = isinstance(known, BoundSpec) or known.has_own_cut
    return with_inner(grad, has_extents=not is_one)


def stable_hash(tensor: Any) -> str:
    """Return what tells a tensor's programs apart, alike in every process: also the rank, as each has its own program.

    A program that is kept on disk holds what this package made of its operators, so its sources are part of it.
    """
    bound, local = tensor._spec, tensor._local_tensor
    parts = (
        sources_hash(Path(__file__).parents[1]),
        flattened(tensor)[0],
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


@functools.cache
def sources_hash(package: Path) -> str:
    """Return what tells the sources of a Python package apart, some 10 ms for this one."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
