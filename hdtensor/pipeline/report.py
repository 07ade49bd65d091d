"""A dry run as text."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from hdtensor.pipeline.dry_run import DryRun, LaneDryRun, StageMessage
from hdtensor.pipeline.schedule import Action, peak_activations
from hdtensor.redistribute.explain import bytes_text


def dry_run_text(run: DryRun) -> str:
    """Return what every rank would do: a table of ranks for each lane, then the bubbles.

    Args:
        run: What ``dry_run`` returned.
    """
    timeline = run.timeline
    total = sum(run.num_parameters.values())
    lines = [
        f"dry run: {_count(len(run.lanes), 'lane')}, {_count(len(run.num_parameters), 'rank')}, "
        f"{total:,} elements of parameters on all ranks together"
    ]
    for index, lane in enumerate(run.lanes):
        lines += ["", *_lane_lines(index, lane, run)]
    lines += ["", f"all lanes: {timeline.seconds:g} units, bubble {timeline.bubble_share():.1%}"]
    return "\n".join(lines)


def row_text(row: Sequence[Action]) -> str:
    """Return the kinds of a row in short, repeats counted.

    >>> row_text([Action.parse(text) for text in "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3".split()])
    '2F 2(BF) 2B'
    >>> row_text([Action.parse(text) for text in "0F0 2F0 2B0 0B0".split()])
    '0F 2F 2B 0B'
    """
    is_one_stage = len({action.stage for action in row}) < 2
    words = [a.kind.value if is_one_stage else f"{a.stage}{a.kind.value}" for a in row]
    parts, i = [], 0
    while i < len(words):
        length, times = _repeat(words, i)
        unit = "".join(words[i : i + length])
        text = unit if length == 1 else f"({unit})"
        parts.append(
            text if times == 1 else f"{times}{text}" if is_one_stage else f"{times} x {text}"
        )
        i += length * times
    return " ".join(parts)


def _repeat(words: Sequence[str], start: int) -> tuple[int, int]:
    """Return the length of the pattern at ``start`` that covers most by repeats, and its repeats."""
    best = (1, 1)
    for length in range(1, 7):
        unit = words[start : start + length]
        if len(unit) < length:
            break
        times = 1
        while words[start + times * length : start + (times + 1) * length] == unit:
            times += 1
        if times > 1 and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def _lane_lines(index: int, run: LaneDryRun, whole: DryRun) -> Iterator[str]:
    lane, schedule = run.lane, run.schedule
    bubble = whole.timeline.bubble_share(index)
    yield f"lane {index}: {lane}"
    yield (
        f"{schedule.name}, {_count(schedule.num_microbatches, 'micro-batch', 'es')} of "
        f"{_sizes(run.sizes)}, bubble {bubble:.1%}"
    )
    sent: defaultdict[int, list[StageMessage]] = defaultdict(list)
    for message in run.messages:
        sent[message.src].append(message)
    peaks = peak_activations(schedule.rows)
    table = [("rank", "stages", "layers", "parameters", "sends for each micro-batch")]
    for place in lane.places:
        layers = " ".join(_layers(run.layers[stage]) for stage in place.stages)
        stages = ",".join(map(str, place.stages))
        for rank in place.ranks:
            number = f"{whole.num_parameters.get(rank, 0):,}"
            table.append((str(rank), stages, layers, number, _sent(sent[rank])))
    yield from _columns(table)
    rows = [("stages", "order", "peak activations")]
    for place, row in zip(lane.places, schedule.rows, strict=True):
        held = ", ".join(str(peaks.get(stage, 0)) for stage in place.stages)
        rows.append((",".join(map(str, place.stages)), row_text(row) or "-", held))
    yield from _columns(rows)


def _sent(messages: Sequence[StageMessage]) -> str:
    peers: defaultdict[tuple[bool, str, str], list[int]] = defaultdict(list)
    for dst, edge, num_bytes, link in (message[1:] for message in messages):
        peers[edge[0] < edge[1], bytes_text(num_bytes), link].append(dst)
    texts = []
    for (is_forward, size, link), ranks in peers.items():
        kind = "activations" if is_forward else "gradients"
        to = ", ".join(map(str, ranks))
        each = " each" if len(ranks) > 1 else ""
        texts.append(f"{kind} to {to}: {size}{each} over {link}")
    return "; ".join(texts) or "-"


def _layers(layers: tuple[int, int] | None) -> str:
    return "?" if layers is None else f"{layers[0]}-{layers[1]}"


def _sizes(sizes: Sequence[int]) -> str:
    if not sizes:
        return "no sample"
    runs = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
    if len(runs) == 1:
        return _count(runs[0][0], "sample")
    return ", ".join(f"{num} x {size}" for size, num in runs) + " samples"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  " + "  ".join(cells).rstrip()
