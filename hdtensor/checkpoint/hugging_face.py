"""``save_hf``, ``load_hf``: a parallelized model to and from Hugging Face's folders.

Nobody holds more than its shards and one tensor: files are written tensor by tensor, each file by another rank, and every
rank reads only the boxes that it holds.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hdtensor._rank import current_rank
from hdtensor.api.agreement import attempt, communicates
from hdtensor.api.forward import without_compiler
from hdtensor.checkpoint.agreement import agree
from hdtensor.checkpoint.checks import folder_of, listed
from hdtensor.checkpoint.gather import gathered
from hdtensor.checkpoint.names import FilePart, file_parts
from hdtensor.checkpoint.tensor_file import TensorFile, TensorWriter, is_storable, shard_files
from hdtensor.errors import CheckpointError
from hdtensor.placements.box import Box
from hdtensor.placements.layout import OwnedBox, owned_boxes
from hdtensor.tensor import HDTensor


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors(\.part)?")


class Incompatible(NamedTuple):
    """What a folder and a model did not have in common.

    Attributes:
        missing_keys: Names that the folder lacks; the model's values stayed.
        unexpected_keys: Names that the model has no place for.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Tensor(NamedTuple):
    """One tensor of a model.

    Attributes:
        key: Its first name in the state dict.
        aliases: All its names; several where weights are tied.
        value: A parameter or buffer.
        parts: What the files hold of it.
    """

    key: str
    aliases: list[str]
    value: torch.Tensor
    parts: list[FilePart]


def save_hf(
    model: nn.Module, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write a model as ``save_pretrained`` does: safetensors, index, config; every rank of the world calls it.

    ``from_pretrained`` reads what was written. Tied weights are written once. Each file is written by another rank, which
    holds one whole tensor at a time.

    Args:
        model: A parallelized transformers model, or any module; one without ``config`` gets no ``config.json``.
        folder: Where to; all ranks must see the same file system. A model that was there is replaced at the end.
        max_shard_bytes: Size of a file beyond which another one is begun.

    Raises:
        CheckpointError: Alike on every rank, if one cannot write, or a tensor's dtype or form has no place in the files.
    """
    path, model = Path(folder), without_compiler(model)
    tensors, problem = attempt(lambda: _to_write(model, path))
    agree("save_hf", problem)
    assert tensors is not None, "without a problem there are tensors"
    num_bytes = [t.value.numel() * t.value.dtype.itemsize for t in tensors]
    files = shard_files(num_bytes, max_shard_bytes) if tensors else []
    problem = None
    size = dist.get_world_size() if communicates() else 1
    for number, members in enumerate(files):
        target = path / f"{_file_name(number, len(files))}.part"
        problem = _write_file(target, [tensors[i] for i in members], number % size) or problem
    try:
        agree("save_hf", problem)
    except CheckpointError:
        for number in range(current_rank(), len(files), size):
            (path / f"{_file_name(number, len(files))}.part").unlink(missing_ok=True)
        raise
    _, problem = attempt(lambda: _remove_old(path, len(files)) if current_rank() == 0 else None)
    agree("save_hf", problem)
    _, problem = attempt(lambda: _finish(model, path, tensors, files, size))
    agree("save_hf", problem)


def load_hf(
    model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True
) -> Incompatible:
    """Read a model's weights in place from a Hugging Face folder; every rank of the world calls it.

    Each rank reads the boxes that it holds. The model may be parallelized by any plan, also from the meta device.
    Floating point values are converted to the parameter's dtype, as ``from_pretrained`` does.

    Args:
        model: A transformers model, or any module with the files' names; HDTensors and plain tensors.
        folder: Holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names.
        strict: Raise where the folder lacks a tensor, or has others.

    Returns:
        The names that were missing and unexpected, with ``strict=False``.

    Raises:
        CheckpointError: Alike on every rank: a file is missing, cut off or damaged, or names, shapes or dtypes differ; all
            are listed. Nothing was changed then.
    """
    model = without_compiler(model)
    found, problem = attempt(lambda: _to_read(model, Path(folder), strict))
    agree("load_hf", problem)
    assert found is not None, "without a problem there are tensors"
    tensors, files, incompatible = found
    _, problem = attempt(lambda: _read(tensors, files))
    agree("load_hf", problem)
    return incompatible


# -- the model's side ------------------------------------------------------------------------------------------------


def _tensors_of(model: nn.Module) -> list[_Tensor]:
    """Return parameters and persistent buffers, tied ones once, with their names in the files."""
    names: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and name not in ignored:
            names.setdefault(id(value), []).append(name)
            values[id(value)] = value
    tied = getattr(model, "_tied_weights_keys", None) or {}
    tensors = []
    for number, aliases in names.items():
        value = values[number]
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{aliases[0]} is a DTensor; make it an HDTensor with hdtensor.from_dtensor, or call parallelize."
            )
        # The main name of tied weights is the one that is not tied to another.
        aliases = sorted(aliases, key=lambda name: any(re.search(p, name) for p in tied))
        tensors.append(_Tensor(aliases[0], aliases, value, []))
    by_key = {tensor.key: tensor for tensor in tensors}
    for part in file_parts(model, {key: tensor.value for key, tensor in by_key.items()}):
        by_key[part.key].parts.append(part)
    return tensors


def _owned(value: torch.Tensor) -> tuple[torch.Tensor, Sequence[OwnedBox]]:
    """Return a rank's memory of a tensor, and what it holds of it."""
    if isinstance(value, HDTensor):
        bound = value._spec
        owned = owned_boxes(bound.spec, tuple(bound.shape), bound.top_sizes, bound.rank)
        return value._local_tensor.detach(), owned
    return value.detach(), [OwnedBox(Box.whole(value.shape), (0,) * value.ndim)]


# -- writing -----------------------------------------------------------------------------------------------------------


def _to_write(model: nn.Module, path: Path) -> list[_Tensor]:
    folder_of(path).mkdir(parents=True, exist_ok=True)
    tensors = _tensors_of(model)
    strange = [f"{t.key} ({t.value.dtype})" for t in tensors if not is_storable(t.value.dtype)]
    if strange:
        raise CheckpointError(f"safetensors files have no such dtype: {listed(strange)}.")
    return tensors


def _write_file(target: Path, tensors: list[_Tensor], writer: int) -> Exception | None:
    """Write one file on one rank; a rank that fails still takes part in what is gathered."""
    file, problem = None, None
    if writer == current_rank():
        contents = {
            part.name: (t.value.dtype, part.shape) for t in tensors for part in t.parts
        }  # fmt: skip
        file, problem = attempt(lambda: TensorWriter(target, contents))
    for tensor in tensors:
        value = tensor.value
        whole = gathered(value, writer) if isinstance(value, HDTensor) else value.detach()
        if file is not None and problem is None:
            assert whole is not None, f"{tensor.key} was gathered here"
            _, problem = attempt(functools.partial(_write_parts, file, tensor, whole))
        del whole
    if file is not None:
        _, closing = attempt(file.close)
        problem = problem or closing
    return problem


def _write_parts(file: TensorWriter, tensor: _Tensor, whole: torch.Tensor) -> None:
    for part in tensor.parts:
        file.write(part.name, part.as_in_files(whole))


def _remove_old(path: Path, num_files: int) -> None:
    """Remove the model that was in the folder, but not what was just written."""
    names = {f"{_file_name(number, num_files)}.part" for number in range(num_files)}
    for found in path.iterdir():
        old = found.name in (WEIGHTS, INDEX) or _SHARD.fullmatch(found.name)
        if old and found.name not in names:
            found.unlink()


def _finish(
    model: nn.Module, path: Path, tensors: list[_Tensor], files: list[list[int]], size: int
) -> None:
    for number in range(len(files)):
        if number % size == current_rank():
            name = _file_name(number, len(files))
            (path / f"{name}.part").rename(path / name)
    if current_rank() == 0:
        if len(files) > 1:
            (path / INDEX).write_text(_index(tensors, files), encoding="utf-8")
        _write_config(model, path)


def _file_name(number: int, num_files: int) -> str:
    return WEIGHTS if num_files == 1 else f"model-{number + 1:05}-of-{num_files:05}.safetensors"


def _index(tensors: list[_Tensor], files: list[list[int]]) -> str:
    weight_map = {
        part.name: _file_name(number, len(files))
        for number, members in enumerate(files)
        for i in members
        for part in tensors[i].parts
    }
    metadata = {
        "total_parameters": sum(t.value.numel() for t in tensors),
        "total_size": sum(t.value.numel() * t.value.dtype.itemsize for t in tensors),
    }
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"  # fmt: skip


def _write_config(model: nn.Module, path: Path) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if dtypes:
        config.dtype = str(dtypes[0]).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(path)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained") and getattr(model, "can_generate", bool)():
        generation.save_pretrained(path)


# -- reading -----------------------------------------------------------------------------------------------------------


def _to_read(
    model: nn.Module, path: Path, strict: bool
) -> tuple[list[_Tensor], dict[str, TensorFile], Incompatible]:
    files = _files(path)
    tensors = [_as_stored(tensor, files) for tensor in _tensors_of(model)]
    asked = {part.name for tensor in tensors for part in tensor.parts}
    asked |= {alias for tensor in tensors for alias in tensor.aliases}
    missing = [part.name for t in tensors for part in t.parts if part.name not in files]
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    beyond = [n for n in files if n not in asked and not any(re.search(p, n) for p in patterns)]
    unlike = [
        text
        for tensor in tensors
        for part in tensor.parts
        if part.name in files and (text := _difference(tensor, part, files[part.name]))
    ]
    problems = []
    if missing and strict:
        problems.append(f"{path} lacks {listed(missing)}")
    if beyond and strict:
        problems.append(f"it has names that the model has no place for: {listed(beyond)}")
    if unlike:
        problems.append(f"what it has is not what is asked for: {listed(unlike)}")
    if problems:
        raise CheckpointError("; ".join(problems))
    return tensors, files, Incompatible(missing, beyond)


def _as_stored(tensor: _Tensor, files: dict[str, TensorFile]) -> _Tensor:
    """Take tied weights under whichever of their names the files have."""
    if len(tensor.aliases) > 1 and len(tensor.parts) == 1 and tensor.parts[0].name not in files:
        for alias in tensor.aliases:
            if alias in files:
                return tensor._replace(parts=[tensor.parts[0]._replace(name=alias)])
    return tensor


def _difference(tensor: _Tensor, part: FilePart, file: TensorFile) -> str | None:
    entry, dtype = file.entries[part.name], tensor.value.dtype
    if entry.shape != part.shape:
        return f"{part.name} (shape {entry.shape}, {part.shape})"
    if entry.dtype != dtype and not (entry.dtype.is_floating_point and dtype.is_floating_point):
        return f"{part.name} ({entry.dtype}, {dtype})"
    if tensor.value.is_meta:
        return f"{part.name} (values, a tensor on the meta device: call parallelize first)"
    return None


def _files(path: Path) -> dict[str, TensorFile]:
    """Return which file holds which name."""
    if (path / WEIGHTS).is_file():
        file = TensorFile(path / WEIGHTS)
        return dict.fromkeys(file.entries, file)
    if not (path / INDEX).is_file():
        raise CheckpointError(_no_weights(path))
    try:
        weight_map = dict(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"])
        named = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX} is damaged ({type(error).__name__}: {error}).") from error  # fmt: skip
    strange = [name for name in sorted(set(named.values())) if Path(name).name != name]
    if strange:
        raise CheckpointError(f"{path / INDEX}: {listed(strange)} is no name of a file in it. Write the folder again.")  # fmt: skip
    files = {name: TensorFile(path / name) for name in sorted(set(named.values()))}
    lacking = [f"{name} ({file})" for name, file in named.items() if name not in files[file].entries]  # fmt: skip
    if lacking:
        raise CheckpointError(f"{path / INDEX} says where tensors are, and they are not there: {listed(lacking)}.")  # fmt: skip
    return {name: files[file] for name, file in named.items()}


def _no_weights(path: Path) -> str:
    """Return what there is instead of a folder with safetensors."""
    if not path.is_dir():
        return (
            f"{path} is no folder; load_hf takes one with {WEIGHTS}, or {INDEX} and what it names."
        )
    others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))  # fmt: skip
    instead = f", but {listed(others)}" if others else ""
    return (
        f"{path} holds neither {WEIGHTS} nor {INDEX}{instead}. Other formats are read by transformers' from_pretrained; "
        f"save the model with save_pretrained."
    )


def _read(tensors: list[_Tensor], files: dict[str, TensorFile]) -> None:
    for tensor in tensors:
        local, owned = _owned(tensor.value)
        for part in tensor.parts:
            if part.name in files:
                _read_part(part, files[part.name].tensor(part.name), local, owned)


def _read_part(
    part: FilePart, stored: torch.Tensor, local: torch.Tensor, owned: Sequence[OwnedBox]
) -> None:
    for piece in owned:
        common = piece.box.intersect(part.box)
        if common is not None:
            origin = tuple(a - o for a, o in zip(piece.box.start, piece.offset, strict=True))
            local[common.slices_from(origin)].copy_(part.as_in_module(stored, common))
