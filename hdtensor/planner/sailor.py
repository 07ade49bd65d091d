"""Sailor's files: profiles, sizes, network fits, clusters and training configurations, as ours.

Sailor (Strati et al., SOSP 2025) publishes profiles of layers on many devices. What its files mean::

    profile      micro-batch -> tp -> layer -> [forward, backward, update] seconds, in float32, with the
                 collectives of tensor parallelism; layer 0 is the embedding, those behind the decoder
                 layers are the head; an update of 0 was not measured
    llm_info     model -> tp -> layer -> bytes and elements of one sample, on each rank
    network      "inter" -> device -> devices of a node that send at once -> [[a, b, c], bytes per second];
                 with x = log2(megabytes) of a message, a x^2 + b x + c is their bandwidth in GB/s
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hdtensor.errors import PlannerError
from hdtensor.plan.fields import check_object, check_sequence, check_text, shown
from hdtensor.planner.cluster import Link, Node
from hdtensor.planner.library import find_device
from hdtensor.planner.model import ModelShape
from hdtensor.planner.models import MODELS
from hdtensor.planner.profiles import Profile, ProfiledUnit, UnitSize, UnitTime
from hdtensor.planner.quantities import planner_errors, read_quantity, whole_number
from hdtensor.planner.regression import fit_line
from hdtensor.planner.workload import Workload


#: Sailor's name of a model -> our preset.
_MODELS = {
    "OPT-350": "opt-350",
    "GPT-Neo-2.7": "gpt-neo-2.7",
    "OPT-30": "opt-30",
    "LLAMA-3-8": "llama-3-8B",
}

#: Tokens of a sample in Sailor's profiles.
CONTEXTS = {"OPT-350": 2048, "GPT-Neo-2.7": 2048, "OPT-30": 2048, "LLAMA-3-8": 8192}

#: Sizes of messages from which a link's two numbers are taken, bytes: the fits are of about these.
_MESSAGES = tuple(float(1 << power) for power in range(20, 29))

_MOST = 1 << 20


def read_model(name: Any) -> ModelShape:
    """Return the sizes of one of Sailor's models.

    Raises:
        PlannerError: If it has none of this name.
    """
    if not isinstance(name, str) or name not in _MODELS:
        raise PlannerError(f"model: must be one of {', '.join(_MODELS)}, got {shown(name)}.")
    return MODELS[_MODELS[name]]


def read_profile(model: str, device: str, times: Any, sizes: Any = None) -> Profile:
    """Return the profile of one device.

    Args:
        model: Sailor's name of the model, such as ``OPT-350``.
        device: Name of the device, such as ``V100-16``.
        times: The JSON of its ``profile.json``.
        sizes: What ``llm_info.json`` has of the model; None for none.

    Raises:
        PlannerError: If a value is missing or none; the message begins with where it is.
    """
    shape = read_model(model)
    context = CONTEXTS[model]
    units: list[UnitTime] = []
    with planner_errors():
        for mbs_text, by_tp in check_object("profile", times).items():
            mbs = _number("profile", mbs_text)
            for tp_text, layers in check_object(f"profile.{mbs_text}", by_tp).items():
                where = f"profile.{mbs_text}.{tp_text}"
                tp = _number(f"profile.{mbs_text}", tp_text)
                for unit, entries in _by_unit(where, layers, shape).items():
                    units.append(_unit_time(unit, (tp, mbs, context), entries))
        found = _sizes(sizes, shape, context) if sizes is not None else ()
    return Profile(
        device=find_device(device).name,
        model=shape,
        precision="float32",
        units=tuple(units),
        sizes=found,
        has_collectives=True,
        machine={"source": "Sailor's profiles, ETH Zurich, MIT licence"},
    )


def _by_unit(
    where: str, layers: Any, shape: ModelShape
) -> dict[ProfiledUnit, list[tuple[float, float, float]]]:
    """Return the seconds of the layers of each unit; the head's layers follow one another."""
    table = check_object(where, layers)
    rows = [
        _seconds(f"{where}.{layer}", table.get(str(layer)))
        for layer in range(max(len(table), shape.num_layers + 2))
    ]
    tail = rows[shape.num_layers + 1 :]
    head = (sum(r[0] for r in tail), sum(r[1] for r in tail), sum(r[2] for r in tail))
    return {"embedding": rows[:1], "layer": rows[1 : shape.num_layers + 1], "head": [head]}


def _seconds(where: str, value: Any) -> tuple[float, float, float]:
    numbers = check_sequence(where, value, "seconds")
    if len(numbers) != 3:
        raise PlannerError(
            f"{where}: must be the seconds of forward, backward and update, got {shown(value)}."
        )
    one, two, three = (read_quantity(where, number, {}, most=1e6) for number in numbers)
    return one, two, three


def _unit_time(
    unit: ProfiledUnit, size: tuple[int, int, int], rows: Sequence[tuple[float, float, float]]
) -> UnitTime:
    forward, backward, update = (fmean(column) for column in zip(*rows, strict=True))
    return UnitTime(unit, *size, forward, backward, update or None)


def _sizes(value: Any, shape: ModelShape, context: int) -> tuple[UnitSize, ...]:
    found = []
    for tp_text, layers in check_object("llm_info", value).items():
        tp = _number("llm_info", tp_text)
        table = check_object(f"llm_info.{tp_text}", layers)
        tail = range(shape.num_layers + 1, max(len(table), shape.num_layers + 2))
        parts: dict[ProfiledUnit, Sequence[int]] = {"embedding": [0], "layer": [1], "head": tail}
        for unit, numbers in parts.items():
            bytes_ = [
                [
                    _bytes(f"llm_info.{tp_text}.{i}", table.get(str(i)), key)
                    for key in ("params_bytes", "act_mem_bytes", "act_output_bytes")
                ]
                for i in numbers
            ]
            parameters, activation, output = (sum(column) for column in zip(*bytes_, strict=True))
            found.append(UnitSize(unit, tp, context, parameters, activation, output))
    return tuple(found)


def _bytes(where: str, value: Any, key: str) -> int:
    entry = check_object(where, value)
    return whole_number(f"{where}.{key}", entry.get(key), 0, 1 << 50)


def _number(where: str, text: Any) -> int:
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 7:
        raise PlannerError(f"{where}: the key {shown(text)} must be a whole number.")
    return whole_number(where, int(text), 1, _MOST)


def read_fit(where: str, value: Any) -> Link:
    """Return the link that one of Sailor's fits of bandwidth comes nearest to.

    Its seconds, over sizes from 1 MB to 256 MB, are taken as latency and bytes over bandwidth.

    >>> link = read_fit("network", [[0.0, 0.0, 2.0], 2e9])
    >>> link.bandwidth, link.latency
    (2000000000.0, 0.0)

    Args:
        where: What an error begins with.
        value: ``[[a, b, c], bytes per second]``.

    Raises:
        PlannerError: If it is none, or a bandwidth of it is not positive.
    """
    with planner_errors():
        parts = check_sequence(where, value, "a fit and a bandwidth")
        factors = check_sequence(where, parts[0] if parts else None, "three factors")
        if len(factors) != 3 or not all(
            isinstance(each, int | float) and abs(each) < 1e6 for each in factors
        ):
            raise PlannerError(f"{where}: a fit has three factors, got {shown(factors)}.")
        a, b, c = factors
        seconds = []
        for num_bytes in _MESSAGES:
            x = math.log2(num_bytes / 1e6)
            rate = (a * x + b) * x + c
            if not 1e-3 <= rate <= 1e5:
                raise PlannerError(
                    f"{where}: the fit gives {rate:.3g} GB/s for {num_bytes:.0f} bytes; it must be from 0.001 "
                    f"to 100000."
                )
            seconds.append(num_bytes / (rate * 1e9))
    line = fit_line(_MESSAGES, seconds)
    latency = line.fixed if line.fixed > 1e-9 else 0.0
    return Link(round(1 / line.per_work, 3), latency)


def read_node(device: str, num_devices: int, network: Any, *, zone: str = "") -> tuple[Node, Link]:
    """Return a node of one of Sailor's devices, and the link of one of its devices to other nodes.

    The node has an uplink, which is what all of its devices reach together.

    Args:
        device: Name of the device, such as ``RTX-3090``.
        num_devices: Of the node.
        network: The JSON of ``network_coeffs_all_homo.json``.
        zone: Its zone.

    Raises:
        PlannerError: If the device is unknown, or a fit is missing or none.
    """
    with planner_errors():
        check_object("network", network)
        inter = _fits(network, "inter", device)
        intra = _fits(network, "intra", device)
    alone = inter[min(inter)]
    together = inter[max(n for n in inter if n <= max(num_devices, min(inter)))]
    inside = intra[max([n for n in intra if n <= num_devices] or [min(intra)])]
    node = Node(
        device=find_device(device),
        num_devices=whole_number("num_devices", num_devices, 1, _MOST),
        inside=inside,
        zone=zone,
        uplink=max(together.bandwidth, alone.bandwidth),
    )
    return node, alone


def _fits(network: Mapping[str, Any], kind: str, device: str) -> dict[int, Link]:
    where = f"network.{kind}.{device}"
    table = check_object(where, check_object(f"network.{kind}", network.get(kind)).get(device))
    if not table:
        raise PlannerError(f"{where}: must have a fit for one number of devices or more.")
    return {_number(where, n): read_fit(f"{where}.{n}", fit) for n, fit in table.items()}


def read_training(config: Any) -> tuple[ModelShape, Workload]:
    """Return the model and the workload of one of Sailor's training configurations.

    Raises:
        PlannerError: If a field is missing or none.
    """
    with planner_errors():
        fields = check_object("training", config)
        model = read_model(fields.get("model"))
        optimizer = check_text("training.optimizer", fields.get("optimizer")).lower()
        return model, Workload(
            batch=whole_number(
                "training.global_batch_size", fields.get("global_batch_size"), 1, _MOST
            ),
            context=whole_number(
                "training.sequence_length", fields.get("sequence_length"), 1, _MOST
            ),
            precision="float32",
            optimizer=optimizer,
            zero=0,
        )
