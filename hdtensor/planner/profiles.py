"""``Profile``: measured seconds of a model's units and of transfers, as a JSON file. Pure; ``profile`` measures."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from hdtensor.errors import PlannerError
from hdtensor.plan.fields import check_object, check_sequence, check_text, shown
from hdtensor.plan.reader import format_json, parse_json, read_file
from hdtensor.planner.model import ModelShape
from hdtensor.planner.quantities import planner_errors, read_quantity, whole_number


#: The version of the JSON that this package writes, and the only one that it reads.
VERSION = 1

#: What a measurement is of. A ``layer`` is attention and MLP together, with its norms and residuals.
ProfiledUnit: TypeAlias = Literal["attention", "mlp", "layer", "embedding", "head"]
#: How ranks talk to one another.
TransferKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]

_MAX_ENTRIES = 1 << 20
_MOST = 1 << 40


class UnitTime(NamedTuple):
    """What one rank takes for its part of a unit; communication is left out, but where the profile says so.

    Attributes:
        unit: Which unit.
        tp: Degree of tensor parallelism: the rank has the ``tp``-th part of heads, MLP and vocabulary.
        mbs: Samples of the micro-batch.
        context: Tokens of a sample.
        forward: Seconds.
        backward: Seconds.
        update: Seconds of the optimizer for the unit's parameters on the rank; None if not measured.
    """

    unit: ProfiledUnit
    tp: int
    mbs: int
    context: int
    forward: float
    backward: float
    update: float | None = None


class TransferTime(NamedTuple):
    """What a collective, or a message, takes.

    Attributes:
        kind: Which one.
        num_ranks: Ranks that take part; 2 for a message.
        num_bytes: Bytes of the whole tensor: of a gather what each rank ends with, of a scatter what it begins with.
        seconds: Until all ranks have done.
        link: ``inside`` of a node, or ``between`` nodes.
    """

    kind: TransferKind
    num_ranks: int
    num_bytes: int
    seconds: float
    link: str = "inside"


class UnitSize(NamedTuple):
    """What one rank's part of a unit needs.

    Attributes:
        unit: Which unit.
        tp: Degree of tensor parallelism.
        context: Tokens of a sample.
        parameter_bytes: Of the rank's part.
        activation_bytes: What one sample keeps for backward.
        output_bytes: Of one sample's output, whole.
    """

    unit: ProfiledUnit
    tp: int
    context: int
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements of one model on one kind of device.

    Attributes:
        device: The kind.
        model: Sizes of the model.
        precision: Element type, such as ``bfloat16``.
        units: Seconds of units.
        transfers: Seconds of transfers.
        machine: What ran and on what: names and versions.
        sizes: Bytes of units.
        has_collectives: Whether the units' seconds contain the collectives of tensor parallelism.
    """

    device: str
    model: ModelShape
    precision: str
    units: tuple[UnitTime, ...] = ()
    transfers: tuple[TransferTime, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[UnitSize, ...] = ()
    has_collectives: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        model = {
            each.name: getattr(self.model, each.name)
            for each in dataclasses.fields(self.model)
            if getattr(self.model, each.name) != each.default
        }
        return {
            "version": VERSION,
            "device": self.device,
            "precision": self.precision,
            "model": model,
            "machine": dict(self.machine),
            "units": [_without_none(time._asdict()) for time in self.units],
            "transfers": [time._asdict() for time in self.transfers],
            **({"sizes": [size._asdict() for size in self.sizes]} if self.sizes else {}),
            **({"has_collectives": True} if self.has_collectives else {}),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as a JSON file, whole or not at all.

        Raises:
            OSError: If the file cannot be written.
        """
        target = Path(path)
        beside = target.with_name(f".{target.name}.part")
        beside.write_text(format_json(self.to_dict()) + "\n", encoding="utf-8")
        beside.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file.

        Raises:
            PlannerError: If there is none, or it is no profile.
        """
        with planner_errors("profile"):
            value = parse_json(read_file(path, "the profile"), "the profile")
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls, value: Any) -> Profile:
        """Build a profile from JSON values, ``to_dict``'s inverse.

        Raises:
            PlannerError: If it is none; the message begins with the field.
        """
        with planner_errors():
            value = check_object("profile", value)
            names = ("version", "device", "precision", "model", "machine", "units", "transfers")
            optional = {"sizes": (), "has_collectives": False}
            _check_fields("profile", {**optional, **value}, (*names, *optional))
            whole_number("version", value["version"], VERSION, VERSION)
            machine = {
                check_text("machine", key): check_text(f"machine.{key}", item)
                for key, item in check_object("machine", value["machine"]).items()
            }
            return cls(
                device=check_text("device", value["device"]),
                model=_model(value["model"]),
                precision=check_text("precision", value["precision"]),
                units=_entries("units", value["units"], _unit_time),
                transfers=_entries("transfers", value["transfers"], _transfer_time),
                machine=machine,
                sizes=_entries("sizes", value.get("sizes", ()), _unit_size),
                has_collectives=_word(
                    "has_collectives", value.get("has_collectives", False), (False, True)
                ),
            )


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _check_fields(path: str, value: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    if set(value) != set(allowed):
        fault = sorted(map(str, set(value) ^ set(allowed)))[0][:60]
        raise PlannerError(
            f"{path}: the key {fault!r} is {'unknown' if fault in value else 'missing'}; there must be "
            f"{', '.join(allowed)}."
        )


def _model(value: Any) -> ModelShape:
    try:
        return ModelShape(**check_object("model", value))
    except TypeError as error:
        raise PlannerError(f"model: {error}; it must have the fields of a ModelShape.") from None


def _entries(
    path: str, value: Any, read: Callable[[str, Mapping[str, Any]], Any]
) -> tuple[Any, ...]:
    items = check_sequence(path, value, "measurements")
    if len(items) > _MAX_ENTRIES:
        raise PlannerError(
            f"{path}: must be at most {_MAX_ENTRIES} measurements, got {len(items)}."
        )
    return tuple(
        read(f"{path}[{i}]", check_object(f"{path}[{i}]", item)) for i, item in enumerate(items)
    )


def _unit_time(path: str, value: Mapping[str, Any]) -> UnitTime:
    _check_fields(path, {"update": None, **value}, UnitTime._fields)
    return UnitTime(
        unit=_word(f"{path}.unit", value["unit"], get_args(ProfiledUnit)),
        tp=whole_number(f"{path}.tp", value["tp"], 1, _MOST),
        mbs=whole_number(f"{path}.mbs", value["mbs"], 1, _MOST),
        context=whole_number(f"{path}.context", value["context"], 1, _MOST),
        forward=_seconds(f"{path}.forward", value["forward"]),
        backward=_seconds(f"{path}.backward", value["backward"]),
        update=_seconds(f"{path}.update", value["update"])
        if value.get("update") is not None
        else None,
    )


def _unit_size(path: str, value: Mapping[str, Any]) -> UnitSize:
    _check_fields(path, value, UnitSize._fields)
    numbers = {
        name: whole_number(f"{path}.{name}", value[name], name in ("tp", "context"), _MOST)
        for name in UnitSize._fields[1:]
    }
    return UnitSize(_word(f"{path}.unit", value["unit"], get_args(ProfiledUnit)), **numbers)


def _transfer_time(path: str, value: Mapping[str, Any]) -> TransferTime:
    _check_fields(path, {"link": "inside", **value}, TransferTime._fields)
    return TransferTime(
        kind=_word(f"{path}.kind", value["kind"], get_args(TransferKind)),
        num_ranks=whole_number(f"{path}.num_ranks", value["num_ranks"], 2, _MOST),
        num_bytes=whole_number(f"{path}.num_bytes", value["num_bytes"], 1, _MOST),
        seconds=_seconds(f"{path}.seconds", value["seconds"]),
        link=_word(f"{path}.link", value.get("link", "inside"), ("inside", "between")),
    )


def _seconds(path: str, value: Any) -> float:
    return read_quantity(path, value, {}, most=1e6)


def _word(path: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if not isinstance(value, type(allowed[0])) or value not in allowed:
        names = ", ".join(map(str, allowed))
        raise PlannerError(f"{path}: must be one of {names}, got {shown(value)}.")
    return value
