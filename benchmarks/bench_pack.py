"""What packing costs beside one plain copy of as many bytes.

    python benchmarks/bench_pack.py                  # on a GPU if there is one, else on CPU
    python benchmarks/bench_pack.py --device cpu
    python benchmarks/bench_pack.py --quick          # does it work?

Needs torch >= 2.11, on a GPU triton >= 3.6 too, and a checkout of this repository; nothing has to be
installed from it. The pieces are those of a switch of plans of a Llama 32B between TP 4 and TP 2
(hidden 6656, feed-forward 17920, bfloat16): the rows of q, k, v, gate and up, and the columns of the
output and down projections. A whole run is also written into docs/benchmarks/pack.md.
"""

from __future__ import annotations

import os


# Before torch is imported: OpenMP reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import dataclasses
import functools
import importlib
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from report import machine, write_page
from torch import Tensor


ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "pack.md"
# The kernels of this checkout, without the package that they are installed with.
sys.path.insert(0, str(ROOT))
pack_boxes = importlib.import_module("triton_kernels.pack_boxes")
reference = importlib.import_module("triton_kernels.pack_boxes.reference")

HIDDEN, FEED_FORWARD = 6656, 17920
GOAL_ON_GPU = 0.9
COLUMNS = ("what", "pieces", "MB", "GB/s", "of a copy", "torch.cat", "foreach", "goal", "")

Candidate = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Bytes read and written per second by packing, and by what stands beside it.

    Attributes:
        name: What was measured.
        num_pieces: Number of boxes.
        num_bytes: Bytes of the message.
        bandwidth: Bytes read and written per second by this package.
        ratios: "ours", and where measured "cat" and "foreach": bandwidth over that of one plain copy
            of as many bytes.
        goal: Least good ratio of ours; None where the row only informs.
    """

    name: str
    num_pieces: int
    num_bytes: int
    bandwidth: float
    ratios: Mapping[str, float]
    goal: float | None = None

    @property
    def is_missed(self) -> bool:
        """Whether the row has a goal that its ratio is below."""
        return self.goal is not None and self.ratios["ours"] < self.goal

    def cells(self) -> tuple[str, ...]:
        """Return the row's texts, column by column."""
        ratios = [
            f"{self.ratios[name]:.2f}" if name in self.ratios else ""
            for name in ("ours", "cat", "foreach")
        ]
        goal = "" if self.goal is None else f">= {self.goal:g}"
        result = "" if self.goal is None else "miss" if self.is_missed else "PASS"
        counts = (str(self.num_pieces), f"{self.num_bytes / 1e6:,.1f}")
        return (self.name, *counts, f"{self.bandwidth / 1e9:,.1f}", *ratios, goal, result)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """Seconds of a call, on the device's own clock where it has one.

    Attributes:
        device: Where the candidates run.
        repeats: Blocks of each candidate; the figure is their median.
        number: Calls in a block: on a GPU the host prepares a call while the one before it runs.
    """

    device: torch.device
    repeats: int
    number: int

    def medians(self, candidates: Mapping[str, Candidate]) -> dict[str, float]:
        """Return each candidate's seconds a call; their blocks take turns.

        Each repeat has another order: what ran before has left the caches unlike.
        """
        for run in candidates.values():
            run()
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        order = random.Random(0)
        for _ in range(self.repeats):
            for name in order.sample(list(candidates), len(candidates)):
                seconds[name].append(self._block(candidates[name]) / self.number)
        return {name: statistics.median(each) for name, each in seconds.items()}

    def _block(self, run: Candidate) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(self.number):
                run()
            return time.perf_counter() - start
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        run()  # keeps the device busy until the host has come to the block's second call
        events[0].record()
        for _ in range(self.number):
            run()
        events[1].record()
        torch.cuda.synchronize(self.device)
        return events[0].elapsed_time(events[1]) / 1e3


def shards(num_layers: int, degree: int, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return a rank's shards of the layers, those cut by rows and those cut by columns."""
    h, f = HIDDEN // degree, FEED_FORWARD // degree
    make = functools.partial(torch.empty, dtype=torch.bfloat16, device=device)
    rows = [make(size, HIDDEN).normal_() for _ in range(num_layers) for size in (h, h, h, f, f)]
    columns = [make(HIDDEN, size).normal_() for _ in range(num_layers) for size in (h, f)]
    return rows, columns


def second_halves(rows: Sequence[Tensor], columns: Sequence[Tensor]) -> list[Tensor]:
    """Return of each TP 2 shard the half that is the shard of a rank in TP 4."""
    return [x.chunk(2, 0)[1] for x in rows] + [x.chunk(2, 1)[1] for x in columns]


def views(flat: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return each piece's part of the message, with its dtype and shape."""
    sizes = [piece.nbytes for piece in pieces]
    return [
        part.view(piece.dtype).view(piece.shape)
        for part, piece in zip(flat.split_with_sizes(sizes), pieces, strict=True)
    ]


def measure(num_layers: int, timer: Timer) -> list[Row]:
    """Return the rows of the shards and of the many small tensors beside them."""
    rows, columns = shards(num_layers, 2, timer.device)
    halves = second_halves(rows, columns)
    is_gpu = timer.device.type == "cuda"
    goal = GOAL_ON_GPU if is_gpu else None
    found = [
        _pack_row("pack whole shards of TP 4", [x.contiguous() for x in halves], goal, timer),
        _pack_row("pack halves of TP 2 shards", halves, goal, timer),
        _pack_row("of these the rows", halves[: len(rows)], None, timer),
        _pack_row("of these the columns", halves[len(rows) :], None, timer),
        *_unpack_rows("halves of TP 2 shards", halves, goal, timer),
        _pack_row("pack columns from the second on", [x[:, 1:] for x in columns], None, timer),
    ]
    # What a switch takes along of 60 layers: two norms and their Adam states, and nine steps each.
    norms = [torch.randn(HIDDEN, device=timer.device) for _ in range(60 * 2 * 3)]
    steps = [torch.ones((), device=timer.device) for _ in range(60 * 9)]
    many = dataclasses.replace(timer, number=4 * timer.number)
    found.append(_pack_row("pack norms, their Adam states, all steps", norms + steps, None, many))
    found += _unpack_rows("the same", norms + steps, None, many)
    return found


def _pack_row(name: str, pieces: Sequence[Tensor], goal: float | None, timer: Timer) -> Row:
    num_bytes = sum(piece.nbytes for piece in pieces)
    source, out = (torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device) for _ in "ab")
    typed, places = out.view(pieces[0].dtype), views(out, pieces)
    candidates: dict[str, Candidate] = {
        "copy": lambda: out.copy_(source),
        "ours": lambda: pack_boxes.pack(pieces, out),
        "cat": lambda: torch.cat([piece.reshape(-1) for piece in pieces], out=typed),
        "foreach": lambda: torch._foreach_copy_(places, pieces),
    }
    reference.pack(pieces, source)
    for side in ("ours", "cat", "foreach"):
        out.fill_(255)
        candidates[side]()
        _check_equal(side, out, source)
    return _row(name, pieces, 2, goal, timer.medians(candidates))


def _unpack_rows(
    name: str, pieces: Sequence[Tensor], goal: float | None, timer: Timer
) -> list[Row]:
    num_bytes = sum(piece.nbytes for piece in pieces)
    flat, got, out = (torch.empty(num_bytes, dtype=torch.uint8, device=timer.device) for _ in "abc")
    parts = views(flat, pieces)
    for part in parts:
        part.fill_(0.5)
    copy = {"copy": lambda: out.copy_(flat)}
    copies: dict[str, Candidate] = {
        "ours": lambda: pack_boxes.unpack(flat, pieces),
        "foreach": lambda: torch._foreach_copy_(pieces, parts),
    }
    sums: dict[str, Candidate] = {
        "ours": lambda: pack_boxes.unpack_add(flat, pieces),
        "foreach": lambda: torch._foreach_add_(pieces, parts),
    }
    found = []
    for verb, num_passes, candidates, expected in (
        ("unpack", 2, copies, 0.5),
        ("unpack and add", 3, sums, 1.5),
    ):
        for side, run in candidates.items():
            for piece in pieces:
                piece.fill_(1.0)
            run()
            reference.pack(pieces, got)
            for part in views(out, pieces):
                part.fill_(expected)
            _check_equal(side, got, out)
        times = timer.medians({**copy, **candidates})
        found.append(_row(f"{verb} {name}", pieces, num_passes, goal, times))
    return found


def _check_equal(side: str, got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got, expected):
        raise RuntimeError(f"{side} has another result than the definition: nothing to time.")


def _row(
    name: str,
    pieces: Sequence[Tensor],
    num_passes: int,
    goal: float | None,
    times: Mapping[str, float],
) -> Row:
    """Return the row of a candidate that reads and writes ``num_passes`` times the message."""
    num_bytes = sum(piece.nbytes for piece in pieces)
    scale = num_passes / 2 * times["copy"]
    return Row(
        name=name,
        num_pieces=len(pieces),
        num_bytes=num_bytes,
        bandwidth=num_passes * num_bytes / times["ours"],
        ratios={side: scale / each for side, each in times.items() if side != "copy"},
        goal=goal,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a markdown table."""
    lines = [COLUMNS, ("---", *["---:"] * 6, "---", "---"), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(old: str, kind: str, section: str) -> str:
    """Return the page with this section in place of the older one of the same kind of device."""
    sections = dict(re.findall(r"^## (On a (?:CPU|GPU))\n(.*?)(?=^## |\Z)", old, re.M | re.S))
    sections[f"On a {kind}"] = f"\n{section}\n\n"
    head = (
        "# What packing costs\n\n"
        "Bandwidth of `triton_kernels/pack_boxes` beside that of one plain copy of as many bytes "
        "(`dst.copy_(src)`, contiguous): bytes read and written by the time, a sum counting its "
        'term too. "torch.cat" makes strided pieces contiguous first; "foreach" is '
        "`torch._foreach_copy_` or `torch._foreach_add_` on views of the message that exist "
        "already, while our time includes making and checking all that is needed. Medians of "
        "interleaved repeats, with CUDA events on a GPU. All results are compared with the "
        "definition first.\n\n"
    )
    parts = [f"## {name}\n{text.rstrip()}\n" for name, text in sorted(sections.items())]
    return head + "\n".join(parts)


def _num_layers(device: torch.device) -> int:
    """Return how many fit: one in 2 GiB of a CPU, up to eight on a GPU."""
    if device.type != "cuda":
        return 1
    # The shards of TP 2, and four messages of half as much.
    layer_bytes = 3 * 2 * (4 * HIDDEN**2 + 3 * HIDDEN * FEED_FORWARD) // 2
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(8, int(0.9 * free) // layer_bytes))


def main() -> int:
    """Measure, print, write; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=best, help="cpu or cuda, default %(default)s")
    parser.add_argument("--layers", type=int, help="layers of the model; as many as fit by default")
    parser.add_argument("--quick", action="store_true", help="few repeats; the figures are rough")
    parser.add_argument("--page", type=Path, help="write the page here, also after a quick run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    if is_gpu:
        importlib.import_module("triton")  # without it the kernel would not be what is measured
    timer = Timer(device=device, repeats=3 if options.quick else 25, number=5 if is_gpu else 1)

    start = time.monotonic()
    num_layers = options.layers or _num_layers(device)
    rows = measure(num_layers, timer)
    command = " ".join(["python", "benchmarks/bench_pack.py", *sys.argv[1:]])
    facts = machine(command, time.monotonic() - start)
    if is_gpu:
        facts["device"] = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    facts["model"] = f"{num_layers} layer{'s' if num_layers > 1 else ''}"
    lines = [*(f"* {name}: {text}" for name, text in facts.items()), "", table(rows)]
    section = "\n".join(lines)
    print(section)
    target = options.page or (None if options.quick else PAGE)
    if target:
        old = target.read_text() if target.exists() else ""
        write_page(target, page(old, "GPU" if is_gpu else "CPU", section))
    missed = [row for row in rows if row.is_missed]
    for row in missed:
        print(f"miss: {row.name}: {row.ratios['ours']:.2f} (goal {row.goal})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
