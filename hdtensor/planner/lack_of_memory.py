"""``too_large``: why no strategy fits in memory, and what could help."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from hdtensor.planner.space import Floats, Space


#: What does not fit: parameters, gradients and optimizer state in all devices, or in lanes of so many stages; or
#: activations and buffers beside them.
Lack: TypeAlias = Literal["states", "stages", "activations"]


def too_large(space: Space) -> str:
    """Return the message for a model that does not fit, with what binds and what could help.

    Args:
        space: What the search knows.
    """
    prices, least = space.prices, space.options.min_lanes
    most = min(sum(space.devices), space.workload.batch)
    if least > most:
        return (
            f"min_lanes: {sum(space.devices)} devices and {space.workload.batch} samples make at most {most} lanes, got "
            f"{least}. Ask for fewer."
        )
    lack = find_lack(space)
    sharers = least if space.workload.zero else 1
    layer = _least(_sizes(space) * (prices.fixed[1] + prices.shared[1] / sharers))
    ends = _least(_sizes(space) * (prices.fixed[2] + prices.shared[2] / sharers)) + _least(
        _sizes(space) * (prices.fixed[3] + prices.shared[3] / sharers)
    )
    states = least * (layer * space.num_layers + ends)
    room = sum(pool.num_devices * pool.device.memory_bytes for pool in space.pools)
    copies = f"for {least} lanes" if least > 1 else "in all"
    text = (
        f"memory: no strategy fits. Parameters, gradients and optimizer state take {_gigabytes(layer)} a layer at least, "
        f"{_gigabytes(states)} {copies}; all devices have {_gigabytes(room)}."
    )
    match lack:
        case "states":
            ways = _ways_of_states(space)
        case "stages":
            text += f" Lanes of {space.options.max_stages} stages do not have enough of it."
            ways = _ways_of_stages(space)
        case "activations":
            text += f" That would fit, but not the activations and buffers beside it: {_activations(space)}."
            ways = _ways_of_activations(space)
    return f"{text} Take {', '.join(ways[:-1])} or {ways[-1]}."


def find_lack(space: Space) -> Lack:
    """Return what does not fit, where no strategy does.

    Parameters and states are said to fit if they would in devices that hold nothing else, cut as finely as their kinds
    allow; so what is said not to fit never does.

    Args:
        space: What the search knows.
    """
    numbers = _numbers_of_lanes(space)
    fitting = [number for number in numbers if _states_fit(space, number)]
    if not fitting:
        return "states"
    return "activations" if any(_lane_fits(space, number) for number in fitting) else "stages"


def _numbers_of_lanes(space: Space) -> list[int]:
    """Return the numbers of lanes that memory is asked about: the least, and its multiples by powers of two."""
    most = min(sum(space.devices), space.workload.batch)
    if space.options.max_lanes is not None:
        most = min(most, space.options.max_lanes)
    number, numbers = space.options.min_lanes, []
    while number <= most:
        numbers.append(number)
        number *= 2
    return numbers


def _layers_held(space: Space, num_lanes: int) -> tuple[Floats, float]:
    """Return how many layers each kind of stage has room for, and what embedding and head are in layers."""
    prices, sharers = space.prices, num_lanes if space.workload.zero else 1
    each = prices.fixed[1:] + prices.shared[1:] / sharers
    each = np.min(np.where(np.isfinite(each), each, np.inf), axis=2)  # over sizes of micro-batches
    held = prices.room[:, 0] / each[0]
    known = np.isfinite(each[0])
    ends = float(sum(np.min(part[known] / each[0][known]) for part in each[1:]))
    return held, ends


def _states_fit(space: Space, num_lanes: int) -> bool:
    held, ends = _layers_held(space, num_lanes)
    whole, parts = 0.0, 0.0
    for number, pool in enumerate(space.pools):
        mine = [k for k, kind in enumerate(space.kinds) if kind.pool == number]
        sizes = [space.kinds[k].size for k in mine]
        each = [held[k] / size for k, size in zip(mine, sizes, strict=True)]
        floors = [int(held[k]) / size for k, size in zip(mine, sizes, strict=True)]
        parts += pool.num_devices * max(each, default=0.0)
        whole += pool.num_devices * max(floors, default=0.0)
    return parts >= num_lanes * (space.num_layers + ends) and whole >= num_lanes * space.num_layers


def _lane_fits(space: Space, num_lanes: int) -> bool:
    """Return whether the largest stages that there are make one lane that has room for parameters and states."""
    held, ends = _layers_held(space, num_lanes)
    most = space.options.max_stages
    stages = sorted(
        (
            held[k]
            for k, kind in enumerate(space.kinds)
            for _ in range(min(space.pools[kind.pool].room(kind.size), most))
        ),
        reverse=True,
    )[:most]
    is_whole = sum(int(layers) for layers in stages) >= space.num_layers
    return is_whole and sum(stages) >= space.num_layers + ends


def _activations(space: Space) -> str:
    """Return what a micro-batch keeps, and how many of them are held, in words."""
    prices, work = space.prices, space.workload
    m = int(np.argmin(prices.mbs))
    mbs = prices.mbs[m]
    layer = _least(_sizes(space)[:, 0] * prices.held[1, :, m])
    head = _least(_sizes(space)[:, 0] * prices.held[3, :, m])
    each = f"{mbs} sample{'' if mbs == 1 else 's'}"
    if work.schedule == "GPipe":
        total = (layer * space.num_layers + head) * work.batch / mbs
        how = f"GPipe holds them all at once, {_gigabytes(total)} of {work.batch} samples"
    else:
        how = (
            f"{work.schedule} holds as many of them in a lane's first stage as the lane has stages"
        )
    buffers = _least(prices.fixed[0])
    return (
        f"a micro-batch of {each} keeps {_gigabytes(layer)} a layer and {_gigabytes(head)} for the head, {how}; buffers take "
        f"{_gigabytes(buffers)} of each device"
    )


def _ways_of_states(space: Space) -> list[str]:
    """Return what makes parameters and states fit; all lanes together have one copy each, but for ZeRO."""
    work, least = space.workload, space.options.min_lanes
    ways = ["more devices", "devices with more memory"]
    ways += ["fewer lanes (min_lanes)"] if least > 1 else []
    ways += ["zero=1"] if least > 1 and not work.zero else []
    # Masters take what short parameters and gradients leave, unless lanes share them.
    ways += ["precision='bfloat16'"] if least > 1 and work.precision == "float32" else []
    held, _ = _layers_held(space, least)
    return ways + (_larger_tp(space) if held.max() < 1 else [])


def _ways_of_stages(space: Space) -> list[str]:
    ways = ["devices with more memory", f"more than {space.options.max_stages} stages (max_stages)"]
    ways += _larger_tp(space)
    ways += ["zero=1"] if not space.workload.zero and _numbers_of_lanes(space)[-1] > 1 else []
    return ways


def _ways_of_activations(space: Space) -> list[str]:
    work, options = space.workload, space.options
    is_gpipe = work.schedule == "GPipe"
    ways = ["more devices", "a shorter context"]
    ways += ["schedule='1F1B'"] if work.schedule != "1F1B" else []
    ways += ["recompute='full'"] if work.recompute == "none" else []
    ways += ["a smaller batch"] if is_gpipe and work.batch > 1 else []
    ways += ["a smaller mbs"] if min(options.mbs) > 1 and not is_gpipe else []
    ways += ["precision='bfloat16'"] if work.precision == "float32" else []
    ways += ["zero=1"] if not work.zero and _numbers_of_lanes(space)[-1] > 1 else []
    ways += _larger_tp(space)
    if not is_gpipe and sum(space.devices) > options.max_stages:
        ways += [f"more than {options.max_stages} stages (max_stages)"]
    ways += ["fewer lanes (min_lanes)"] if options.min_lanes > 1 else []
    return ways


def _larger_tp(space: Space) -> list[str]:
    """Return the proposal of degrees of TP beyond those allowed, if nodes have devices for them."""
    largest = max(len(ranks) for pool in space.pools for ranks in pool.ranks)
    most = 1 << (largest.bit_length() - 1)
    return [f"TP up to {most} (tp_degrees)"] if most > max(space.options.tp_degrees) else []


def _least(values: Floats) -> float:
    return float(np.min(values[np.isfinite(values)]))


def _sizes(space: Space) -> Floats:
    return np.array([[float(kind.size)] for kind in space.kinds])


def _gigabytes(num_bytes: float) -> str:
    if num_bytes < 1e8:
        return f"{num_bytes / 1e6:.3g} MB"
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.3g} GB"
