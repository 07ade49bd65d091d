"""Reading torch's distributed checkpoints with all problems found before a tensor is touched, and listed at once."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hdtensor.errors import CheckpointError


#: Names that one message lists.
MAX_LISTED = 20


class CheckedReader(FileSystemReader):
    """A reader whose errors name the file and the tensor; it unpickles nothing that torch's does not."""

    def metadata_or_error(self) -> Metadata:
        """Return the checkpoint's table of contents.

        Raises:
            CheckpointError: If there is none, or it cannot be read.
        """
        path = Path(self.path) / ".metadata"
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: the folder is no checkpoint, or its writing did not come to an end. torch writes "
                f"this file last. Choose another checkpoint."
            )
        try:
            return self.read_metadata()
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}). Choose another checkpoint."
            ) from error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Look whether the files that this rank reads are there, and long enough.

        Raises:
            CheckpointError: Naming the file, and a tensor that it should hold.
        """
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            path = Path(self.path) / info.relative_path
            size = path.stat().st_size if path.is_file() else None
            if size is None or size < info.offset + info.length:
                what = "is missing" if size is None else f"is cut off after {size} bytes"
                raise CheckpointError(
                    f"{path} {what}; {item.dest_index.fqn} is at bytes {info.offset} to {info.offset + info.length} of it. "
                    f"Copy the file again, or choose another checkpoint."
                )
        return super().prepare_local_plan(plan)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read as torch does.

        Raises:
            CheckpointError: Naming the file and the tensor that cannot be read.
        """
        try:
            return super().read_data(plan, planner)
        except Exception as error:
            raise self._named(plan.items, planner, error) from error

    def _named(
        self, items: Iterable[ReadItem], planner: LoadPlanner, error: Exception
    ) -> CheckpointError:
        """Find the item that cannot be read: torch reads a file's items in a row."""
        for item in items:
            try:
                super().read_data(LoadPlan([item]), planner)
            except Exception as found:
                path = Path(self.path) / self.storage_data[item.storage_index].relative_path
                return CheckpointError(
                    f"{path} is damaged where {item.dest_index.fqn} is ({type(found).__name__}: {found}). Tensors that "
                    f"were read before it are in place; load another checkpoint."
                )
        return CheckpointError(f"{self.path} could not be read ({type(error).__name__}: {error}).")


class CheckedPlanner(DefaultLoadPlanner):
    """A planner that lists everything that does not fit, before anything is read.

    Args:
        strict: Whether names that the checkpoint lacks, or has beyond those asked for, are errors.
        prefixes: Beginnings of names, of which all that the checkpoint has must be asked for.
    """

    def __init__(self, strict: bool, prefixes: tuple[str, ...]) -> None:
        super().__init__(allow_partial_load=not strict)
        self.strict = strict
        self.prefixes = prefixes

    def create_local_plan(self) -> LoadPlan:
        """Plan as torch does.

        Raises:
            CheckpointError: Listing missing and unexpected names, and tensors of another shape or dtype.
        """
        assert self.metadata is not None, "torch sets the planner up before it plans"
        problems = mismatches(self.state_dict, self.metadata, self.strict, self.prefixes)
        if problems:
            raise CheckpointError("; ".join(problems))
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a plain value; what is no plain value is refused before torch unpickles it."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def mismatches(
    wanted: dict[str, Any], metadata: Metadata, strict: bool, prefixes: tuple[str, ...]
) -> list[str]:
    """Return what keeps a checkpoint from being read into a flat state dict, one text for each kind."""
    saved = metadata.state_dict_metadata
    missing = [name for name in wanted if name not in saved]
    beyond = [name for name in saved if name.startswith(prefixes) and name not in wanted]
    unlike = [
        text
        for name, value in wanted.items()
        if name in saved and (text := _difference(name, value, saved[name]))
    ]
    problems = []
    if missing and strict:
        problems.append(f"the checkpoint lacks {listed(missing)}")
    if beyond and strict:
        problems.append(f"it has names that nobody asks for: {listed(beyond)}")
    if unlike:
        problems.append(f"what it has is not what is asked for: {listed(unlike)}")
    return problems


def _difference(name: str, value: Any, saved: Any) -> str | None:
    if not isinstance(saved, TensorStorageMetadata):
        return f"{name} (a plain value, a tensor)" if isinstance(value, torch.Tensor) else None
    if not isinstance(value, torch.Tensor):
        return f"{name} (a tensor, a {type(value).__name__})"
    if tuple(saved.size) != tuple(value.shape):
        return f"{name} (shape {tuple(saved.size)}, {tuple(value.shape)})"
    if saved.properties.dtype != value.dtype:
        return f"{name} ({saved.properties.dtype}, {value.dtype})"
    held = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
    if held < value.numel():
        return f"{name} ({held} of {value.numel()} elements, since not all ranks saved)"
    return None


def listed(names: list[str]) -> str:
    """Return names as one text, not too long."""
    rest = len(names) - MAX_LISTED
    text = ", ".join(sorted(names)[:MAX_LISTED])
    return f"{text} and {rest} more" if rest > 0 else text


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Return a folder's path, checked for what no file system takes.

    Raises:
        CheckpointError: If the path is a file.
    """
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder.")
    return folder
