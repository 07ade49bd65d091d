"""``profile``: measures units and transfers on the devices at hand, step by step, into a file."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hdtensor.errors import PlannerError
from hdtensor.planner.library import recognize_device
from hdtensor.planner.model import ModelShape
from hdtensor.planner.profile_transfers import (
    TransferPoint,
    link_here,
    measure_in_world,
    measure_transfers,
    points_here,
    transfer_points,
)
from hdtensor.planner.profile_units import (
    UnitPoint,
    measure_unit,
    operations_per_second,
    unit_points,
    work_of,
)
from hdtensor.planner.profile_world import agree
from hdtensor.planner.profiles import Profile
from hdtensor.planner.workload import find_precision


#: Processes that any machine may start for transfers.
_LEAST_RANKS = 8
#: Seconds that transfers get though units took all of the time.
_LEAST_SECONDS = 0.5
#: A measurement takes about as long as so many forwards: its own backward and update, and once more to warm up.
_FORWARDS = 8
#: What would take so many times all of the time is never begun.
_HOPELESS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to measure.

    Attributes:
        tps: Degrees of tensor parallelism; those that do not divide the model are left out.
        batch_sizes: Samples of a micro-batch.
        contexts: Tokens of a sample.
        precision: Element type.
        num_ranks: Numbers of ranks of collectives; empty for no transfers.
        sizes: Bytes of transfers.
        max_seconds: When to stop. What is then missing is measured by the next run with the same file.
        device: What the cluster calls the devices at hand; default the library's name of them.
    """

    tps: tuple[int, ...] = (1, 2, 4, 8)
    batch_sizes: tuple[int, ...] = (1, 2, 4)
    contexts: tuple[int, ...] = (1024, 4096)
    precision: str = "bfloat16"
    num_ranks: tuple[int, ...] = (2,)
    sizes: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
    max_seconds: float = 180.0
    device: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", find_precision(self.precision))
        most = max(os.cpu_count() or 1, _LEAST_RANKS)
        if any(number > most for number in self.num_ranks):
            raise PlannerError(
                f"num_ranks: {max(self.num_ranks)} processes are too many for the {os.cpu_count()} cores of this machine; "
                f"allowed: up to {most}. Or start them by torchrun on all machines."
            )


#: Called with the number of points done, the number of all, and a few words on the next one.
Progress = Callable[[int, int, str], None]


def profile(
    model: ModelShape,
    options: ProfileOptions | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    progress: Progress = lambda done, total, text: None,
) -> Profile:
    """Return measurements of a model's units, and of transfers, on the device at hand.

    After each measurement the file is written anew, so that nothing is lost by an interrupt. If it exists, what
    it has is not measured again. If there is a process group (``launched_world`` makes one of what ``torchrun``
    started), all ranks call this, and transfers go over them; only the first rank reads, measures units and writes.

    Args:
        model: Sizes.
        options: What to measure.
        path: The file; None for none.
        progress: Called before each measurement and at the end.

    Raises:
        PlannerError: If the file is of another model, device or precision, or a measurement fails.
    """
    options = options or ProfileOptions()
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    found = agree(lambda: _begun(model, options, path, device))
    run = _Run(found, options, None if path is None else Path(path), progress)
    return run.all(device)


def missing_points(
    found: Profile, options: ProfileOptions
) -> tuple[list[UnitPoint], list[TransferPoint]]:
    """Return what options ask for and a profile does not have.

    In a process group collectives are over all of its ranks, whatever number the options ask for.
    """
    units = unit_points(
        found.model, tps=options.tps, batch_sizes=options.batch_sizes, contexts=options.contexts
    )
    transfers = points_here(transfer_points(options.num_ranks, options.sizes))
    have_units = {time[:4] for time in found.units}
    have_transfers = {time[:3] for time in found.transfers if time.link == link_here()}
    return (
        [point for point in units if point not in have_units],
        [point for point in transfers if point not in have_transfers],
    )


class _Run:
    """One run of ``profile``: measures what is missing, within its time."""

    def __init__(
        self, found: Profile, options: ProfileOptions, path: Path | None, progress: Progress
    ) -> None:
        self._found = found
        self._options = options
        self._path = path
        self._progress = progress
        self._end = time.monotonic() + options.max_seconds
        self._done = 0
        self._total = 0
        # Unit and degree -> operations and seconds of the last measurement, to foresee the next one.
        self._last: dict[tuple[str, int], tuple[float, float]] = {}
        self._measured: set[UnitPoint] = set()
        self._rate: float | None = None

    def all(self, device: torch.device) -> Profile:
        """Measure what is missing and return everything."""
        units, transfers = missing_points(self._found, self._options)
        in_world = dist.is_initialized()
        self._total = len(units) + len(transfers)
        if in_world:  # all ranks are here, so transfers come first, but get half of the time
            for measured in measure_in_world(transfers, device, self._half()):
                more = (*self._found.transfers, measured)
                self._add(dataclasses.replace(self._found, transfers=more))
        else:  # processes take seconds to start: units come first, and take what transfers leave too
            end = time.monotonic() + (self._half() if transfers else math.inf)
            self._units(units, device, end)
            units = [point for point in units if point not in self._measured]
            self._transfers(transfers, device.type == "cuda")
        if not in_world or dist.get_rank() == 0:
            self._units(units, device, self._end)
        self._progress(self._done, self._total, "done")
        return self._found

    def _units(self, points: Sequence[UnitPoint], device: torch.device, end: float) -> None:
        dtype = getattr(torch, self._options.precision)
        model = self._found.model
        for point in points:
            if self._is_too_long(point, min(end, self._end) - time.monotonic(), device):
                continue
            self._progress(self._done, self._total, _words(point))
            self._measured.add(point)
            start = time.monotonic()
            measured = measure_unit(model, point, device=device, dtype=dtype)
            spent = time.monotonic() - start
            self._last[point.unit, point.tp] = (work_of(model, point), spent)
            self._add(dataclasses.replace(self._found, units=(*self._found.units, measured)))

    def _transfers(self, points: Sequence[TransferPoint], is_cuda: bool) -> None:
        numbers = list(dict.fromkeys(point.num_ranks for point in points))
        for num in numbers:
            is_late = num != numbers[0] and time.monotonic() > self._end
            if is_late or (is_cuda and num > torch.cuda.device_count()):
                continue
            some = [point for point in points if point.num_ranks == num]
            self._progress(self._done, self._total, f"transfers between {num} ranks")
            left = len(numbers) - numbers.index(num)
            seconds = max(self._end - time.monotonic(), _LEAST_SECONDS) / left
            times = measure_transfers(some, is_cuda=is_cuda, max_seconds=seconds)
            transfers = (*self._found.transfers, *times)
            self._add(dataclasses.replace(self._found, transfers=transfers), len(times))

    def _half(self) -> float:
        return max(self._end - time.monotonic(), 0.0) / 2

    def _is_too_long(self, point: UnitPoint, left: float, device: torch.device) -> bool:
        """Return whether a measurement would take longer than there is time, by the last one of its kind, or by the device's rate.

        The first one is measured even so, unless it is hopeless.
        """
        wanted = work_of(self._found.model, point)
        if (point.unit, point.tp) in self._last:
            work, seconds = self._last[point.unit, point.tp]
            return left <= 0 or seconds * max(wanted / work, 1.0) > left
        if self._rate is None:
            self._rate = operations_per_second(device, getattr(torch, self._options.precision))
        seconds = _FORWARDS * wanted / self._rate
        if not self._found.units and not self._measured:
            return seconds > _HOPELESS * self._options.max_seconds
        return left <= 0 or seconds > left

    def _add(self, found: Profile, num: int = 1) -> None:
        self._found = found
        self._done += num
        if self._path is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            found.save(self._path)


def _begun(
    model: ModelShape,
    options: ProfileOptions,
    path: str | os.PathLike[str] | None,
    device: torch.device,
) -> Profile:
    """Return what the file has so far, or a profile without measurements."""
    name = options.device or "CPU"
    if options.device is None and device.type == "cuda":
        name = recognize_device(torch.cuda.get_device_name(device)).name
    fresh = Profile(
        device=name, model=model, precision=options.precision, machine=dict(_machine(device))
    )
    if path is None or not Path(path).exists():
        return fresh
    found = Profile.load(path)
    for field in ("device", "precision", "model"):
        if getattr(found, field) != getattr(fresh, field):
            said, wanted = (
                value.name if isinstance(value, ModelShape) else value
                for value in (getattr(found, field), getattr(fresh, field))
            )
            raise PlannerError(
                f"{field}: the profile {os.fspath(path)!r} is of {said}, not of {wanted}; give another file."
            )
    return dataclasses.replace(found, machine=fresh.machine)


def _machine(device: torch.device) -> Iterator[tuple[str, str]]:
    yield "host", platform.node()[:100]
    yield "system", platform.platform()[:200]
    yield "processor", (platform.processor() or platform.machine())[:100]
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "threads", str(torch.get_num_threads())
    if device.type == "cuda":
        yield "device", torch.cuda.get_device_name(device)
        yield "cuda", str(torch.version.cuda)


def _words(point: UnitPoint) -> str:
    return f"{point.unit}, tp {point.tp}, {point.mbs} x {point.context} tokens"
