"""What the tensors of a module are called in Hugging Face's files, and which part of a tensor each name is.

transformers may hold a tensor in another form than its files: Mixtral's experts are one tensor in the module and many in
the files. Its own conversions say how; they are run once on tensors without elements, whose storage and strides then
tell where each file tensor lies in the module's::

    module   mlp.experts.gate_up_proj (E, 2 I, H)
    files    block_sparse_moe.experts.1.w3.weight (I, H)  = start (1, I, 0), dims (1, 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hdtensor._torch_compat import ViewsOnly, storage_of
from hdtensor.checkpoint.checks import listed
from hdtensor.errors import CheckpointError
from hdtensor.placements.box import Box
from hdtensor.placements.layout import contiguous_stride


class FilePart(NamedTuple):
    """One tensor of the files, as a part of a tensor of the module.

    Attributes:
        name: In the files.
        shape: In the files.
        key: Of the module's tensor, in its state dict.
        start: Of the part, in the module's tensor.
        dims: For each dim of the file's tensor, the dim of the module's that it runs along; None for one of extent 1.
    """

    name: str
    shape: tuple[int, ...]
    key: str
    start: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def box(self) -> Box:
        """The part in the module's tensor."""
        stop = [first + 1 for first in self.start]
        for size, dim in zip(self.shape, self.dims, strict=True):
            if dim is not None:
                stop[dim] = self.start[dim] + size
        return Box(self.start, tuple(stop))

    def as_in_files(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of the module's whole tensor as the files have it: a view."""
        kept = whole[self.box.slices_from((0,) * whole.ndim)]
        order = [dim for dim in self.dims if dim is not None]
        for dim in reversed(range(kept.ndim)):
            if dim not in order:
                kept = kept.squeeze(dim)
        kept = kept.permute([sorted(order).index(dim) for dim in order])
        return kept.reshape(self.shape)

    def as_in_module(self, stored: torch.Tensor, box: Box) -> torch.Tensor:
        """Return what the file's tensor holds of a box of the module's: a view, with the box's shape.

        Args:
            stored: The file's tensor.
            box: Within ``self.box``.
        """
        index: list[Any] = [
            0 if dim is None else slice(box.start[dim] - self.start[dim], box.stop[dim] - self.start[dim])
            for dim in self.dims
        ]  # fmt: skip
        kept = stored[tuple(index)]
        order = [dim for dim in self.dims if dim is not None]
        kept = kept.permute([order.index(dim) for dim in sorted(order)])
        for dim in range(len(self.start)):
            if dim not in order:
                kept = kept.unsqueeze(dim)
        return kept


def file_parts(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[FilePart]:
    """Return what of a module's tensors the files hold under which names; together all of it.

    Args:
        model: A transformers model, or any other, whose files have its own names.
        tensors: Its state dict, each tensor once.

    Raises:
        CheckpointError: Listing names whose tensors transformers computes from several of the module's.
    """
    metas = {
        key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for key, tensor in tensors.items()
    }
    stored = _converted(model, metas)
    keys = {storage_of(meta): key for key, meta in metas.items()}
    parts, strange = [], []
    for name, found in stored.items():
        key = keys.get(storage_of(found))
        part = None if key is None else _part(name, found, key, metas[key])
        if part is None:
            strange.append(name)
        else:
            parts.append(part)
    held: dict[str, int] = dict.fromkeys(metas, 0)
    for part in parts:
        held[part.key] += part.box.numel if metas[part.key].numel() else 0
    strange += [key for key, meta in metas.items() if held[key] != meta.numel()]
    if strange:
        raise CheckpointError(
            f"the files of a {type(model).__name__} hold {listed(strange)} in another form than the model does, which is "
            f"no cut, renaming or transposition of one of its tensors. Use save_pretrained(folder, "
            f"state_dict=hdtensor.full_state_dict(...)), or load_state_dict under implicit_replication()."
        )
    return parts


def _converted(model: nn.Module, metas: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not hasattr(model, "config"):
        return metas
    # transformers is optional; a model of it has imported it.
    from transformers import PreTrainedModel  # noqa: PLC0415
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    if not isinstance(model, PreTrainedModel):
        return metas
    with ViewsOnly():
        try:
            return revert_weight_conversion(model, dict(metas))
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot say what the files of a {type(model).__name__} hold "
                f"({type(error).__name__}: {error})."
            ) from error


def _part(name: str, found: torch.Tensor, key: str, meta: torch.Tensor) -> FilePart | None:
    """Read a part off a view's offset and strides; None if it is no box of the tensor's."""
    strides = contiguous_stride(meta.shape)
    shape = tuple(found.shape)
    if not meta.numel():
        return FilePart(name, shape, key, (0,) * meta.ndim, (None,) * len(shape))
    dims = _dims(shape, found.stride(), meta.shape, strides)
    if dims is None:
        return None
    start, rest = [], found.storage_offset()
    for stride in strides:
        start.append(rest // stride)
        rest %= stride
    part = FilePart(name, shape, key, tuple(start), dims)
    return part if Box.whole(meta.shape).contains(part.box) else None


def _dims(
    shape: Sequence[int], steps: Sequence[int], whole: Sequence[int], strides: Sequence[int]
) -> tuple[int | None, ...] | None:
    dims: list[int | None] = []
    for size, step in zip(shape, steps, strict=True):
        along = [d for d, s in enumerate(strides) if s == step and whole[d] > 1]
        if size > 1 and (len(along) != 1 or along[0] in dims):
            return None
        dims.append(along[0] if size > 1 else None)
    return tuple(dims)
