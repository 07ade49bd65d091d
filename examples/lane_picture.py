"""A plan's lanes as text: stages as boxes, micro-batches as a grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hdtensor.pipeline import Action, Durations, Kind, LaneRun, microbatch_sizes, simulate
from hdtensor.pipeline.dry_run import DryRun, LaneDryRun
from hdtensor.pipeline.schedule.grid import draw_grid
from hdtensor.plan import AnnotationPlan, StrategyPlan


def draw_lanes(plan: AnnotationPlan, run: DryRun, rows: Sequence[int]) -> str:
    """Return who holds which layers, lane by lane, and what each place does when.

    Args:
        plan: The plan.
        run: Its dry run.
        rows: Rows of the batch of each lane.
    """
    lines = []
    for index, (lane, count) in enumerate(zip(run.lanes, rows, strict=True)):
        schedule = lane.schedule
        sizes = microbatch_sizes(count, schedule.num_microbatches)
        lines.append(
            f"lane {index}: {schedule.name}, {schedule.num_microbatches} micro-batches of "
            f"{_sizes(sizes)}, bubble {run.timeline.bubble_share(index):.0%}"
        )
        lines += [*_boxes(lane, _degrees(plan)), ""]
    return "\n".join([*lines, draw_clock(run)])


def draw_clock(run: DryRun) -> str:
    """Return the grid of all lanes, as if every forward, backward, or half of a backward took one step.

    Args:
        run: A dry run.
    """
    runs = []
    for lane in run.lanes:
        ones = (1.0,) * lane.lane.num_stages
        kinds = {action.kind for row in lane.schedule.rows for action in row}
        whole = (2.0,) * len(ones) if Kind.BACKWARD_INPUT in kinds else ones
        durations = Durations(forward=ones, backward=whole)
        runs.append(LaneRun(lane=lane.lane, schedule=lane.schedule, durations=durations))
    spans = [span for span in simulate(runs).spans if span.kind != "message"]
    places = [(index, place) for index, lane in enumerate(run.lanes) for place in lane.lane.places]
    columns: list[list[Action | None]] = []
    for index, place in places:
        column = {
            step: Action.parse(span.name)
            for span in spans
            if span.lane == index and set(place.ranks) & set(span.ranks)
            for step in range(round(span.start), round(span.end))
        }
        columns.append([column.get(step) for step in range(max(column, default=-1) + 1)])
    titles = [f"lane {i}: {','.join(map(str, place.ranks))}" for i, place in places]
    return draw_grid(columns, titles)


def _boxes(run: LaneDryRun, degrees: dict[tuple[int, ...], int]) -> Iterator[str]:
    columns = []
    for stage, layers in zip(run.lane.stages, run.layers, strict=True):
        words = [_ranks(stage.ranks), _layers(layers)]
        if stage.ranks in degrees:
            words.insert(1, f"TP {degrees[stage.ranks]}")
        width = max(map(len, words))
        edge = f"+-{'-' * width}-+"
        columns.append([edge, *(f"| {word.ljust(width)} |" for word in words), edge])
    arrows = ["    ", " -> "]
    for number, cells in enumerate(zip(*columns, strict=True)):
        yield "  " + arrows[number == 1].join(cells)


def _degrees(plan: AnnotationPlan) -> dict[tuple[int, ...], int]:
    """Return the tensor parallel degree of each stage that the plan writes out, by its ranks."""
    pipelines = plan.pipelines if isinstance(plan, StrategyPlan) else ()
    return {stage.ranks: stage.tp for pipeline in pipelines for stage in pipeline.stages}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"


def _layers(layers: tuple[int, int] | None) -> str:
    if layers is None:
        return "parts of layers"
    first, last = layers
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def _sizes(sizes: Sequence[int]) -> str:
    runs = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
    if len(runs) == 1:
        return f"{runs[0][0]} row{'s' if runs[0][0] != 1 else ''}"
    return ", ".join(f"{number} x {size}" for size, number in runs) + " rows"
