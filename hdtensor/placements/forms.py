"""The forms in which a user may say a spec: itself, its text, a mesh with placements, pairs of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import current_mesh
from hdtensor.errors import SpecError
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.text import as_spec


#: What ``spec_from`` takes; see its table.
SpecLike: TypeAlias = HDSpec | str | DeviceMesh | Sequence[Any]

F = TypeVar("F", bound=Callable[..., Any])


def also_named(**own: str) -> Callable[[F], F]:
    """Have a function take DTensor's names of arguments beside its own.

    Args:
        own: The function's own name of an argument, by DTensor's.

    >>> @also_named(device_mesh="spec")
    ... def show(spec):
    ...     return spec
    >>> show(device_mesh="a mesh")
    'a mesh'
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in own.keys() & kwargs.keys():
                if own[name] in kwargs:
                    raise TypeError(
                        f"{function.__name__}() got both {name} and {own[name]}; they are one argument."
                    )
                kwargs[own[name]] = kwargs.pop(name)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def spec_from(
    spec: SpecLike | None,
    placements: Sequence[Placement] | None = None,
    hdim: int = -1,
    top_ratio: Sequence[int] | None = None,
) -> HDSpec:
    """Return a spec in whatever form it is said.

    =========================  ==============================  ===================================
    spec                       goes with                       meaning
    =========================  ==============================  ===================================
    ``HDSpec``, or its text                                    itself
    ``DeviceMesh``             placements (default: replicate)  one subgroup, as a ``DTensor``'s
    ``[(mesh, placements)]``   hdim, top_ratio                 the paper's DG and DS unions
    None                       placements                      the mesh of the ``with`` block around it
    =========================  ==============================  ===================================

    >>> spec_from([((0, 1), [Replicate()]), ((2,), [Replicate()])], hdim=0)
    HDSpec('S0 / 0,1:R 2:R')

    Raises:
        SpecError: If the arguments do not go together, or say no spec.
    """
    if spec is None:
        spec = current_mesh()
    if isinstance(spec, DeviceMesh):
        if placements is None:
            placements = [Replicate()] * spec.ndim
        return HDSpec.from_meshes([(spec, placements)])
    if placements is not None:
        raise SpecError(
            "placements go with a DeviceMesh; an HDSpec or a list of pairs has its own."
        )
    if isinstance(spec, list | tuple):
        if any(isinstance(pair, Placement) for pair in spec):
            raise SpecError(
                f"a list of placements, {spec!r}, does not say where: pass a mesh with placements=, an HDSpec, or its "
                f"short text, such as 'S0 / 0,1:R 2:R'."
            )
        return HDSpec.from_meshes(spec, hdim, top_ratio=top_ratio)
    if spec is None:
        raise SpecError(
            "no spec: pass an HDSpec or its short text, a DeviceMesh with placements, or call it inside `with mesh:`."
        )
    if hdim != -1 or top_ratio is not None:
        raise SpecError(
            "hdim and top_ratio go with a list of (mesh, placements); an HDSpec has its own."
        )
    return as_spec(spec)  # type: ignore[arg-type]  # which says what it takes


def meshes_of(spec: Any) -> list[DeviceMesh]:
    """Return the meshes that a spec's form names."""
    spec = current_mesh() if spec is None else spec
    pairs = spec if isinstance(spec, list | tuple) else [(spec,)]
    heads = [pair[0] for pair in pairs if isinstance(pair, list | tuple) and pair]
    return [mesh for mesh in heads if isinstance(mesh, DeviceMesh)]
