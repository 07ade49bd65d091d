"""The style sheet of the report page, and the colours of lanes and stages."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from functools import cache


#: Colours of the parts of a timeline, (light, dark) alike: readable on white and on black.
PART_COLORS = {
    "F": "#3b82c4",
    "B": "#2a9d8f",
    "I": "#2a9d8f",
    "W": "#7bc4a4",
    "sync": "#e08e3c",
    "gather": "#e08e3c",
    "optimizer": "#8e6bbf",
}

#: Colours of the parts of memory.
MEMORY_COLORS = {
    "parameters": "#3b82c4",
    "gradients": "#2a9d8f",
    "optimizer": "#8e6bbf",
    "activations": "#e08e3c",
    "buffers": "#8a94a3",
}

#: Colours of the parts of a lane's step.
LANE_COLORS = {
    "balanced": "#3b82c4",
    "imbalance": "#7fb0dd",
    "start": "#8a94a3",
    "fill": "var(--idle)",
    "messages": "#d9a0b4",
    "wait": "var(--held)",
    "sync": "#e08e3c",
    "optimizer": "#8e6bbf",
}

#: Colours of the parts of a stage's step.
STEP_COLORS = {
    "busy": "#3b82c4",
    "waiting": "var(--idle)",
    "sync": "#e08e3c",
    "optimizer": "#8e6bbf",
    "gather": "#c9743a",
}

_GOLDEN_ANGLE = 137.508
_SATURATION = 0.6
#: Relative luminance of the first and of the last stage of a long lane.
_DARKEST, _LIGHTEST = 0.06, 0.178


@cache
def stage_color(lane: int, stage: int, num_stages: int) -> str:
    """Return the colour of a stage: lanes differ in hue, stages of a lane in luminance.

    Luminances are such that white text has a contrast of 4.5 or more on every hue (WCAG 2, AA).

    >>> stage_color(0, 0, 1)
    '#2962a4'

    Args:
        lane: Number of the lane.
        stage: Number in the lane.
        num_stages: Stages of the lane.
    """
    hue = ((212 + lane * _GOLDEN_ANGLE) % 360) / 360
    wanted = _DARKEST + (_LIGHTEST - _DARKEST) * (stage + 0.5) / num_stages
    low, high = 0.0, 1.0
    for _ in range(20):
        lightness = (low + high) / 2
        channels = colorsys.hls_to_rgb(hue, lightness, _SATURATION)
        low, high = (lightness, high) if _luminance(channels) < wanted else (low, lightness)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _luminance(channels: Sequence[float]) -> float:
    """Return the relative luminance of a colour by its channels from 0 to 1 (WCAG 2)."""
    linear = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


STYLE = """
:root { --ground: #f6f7f9; --card: #ffffff; --ink: #1c2430; --faint: #5d6878; --line: #dfe3e9;
  --track: #e9ecf1; --idle: #c9ced6; --held: #a3adba; --accent: #2f6db1; --warn: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --card: #1b2129; --ink: #e7ebf0;
  --faint: #9aa6b5; --line: #2e3743; --track: #29313c; --idle: #4c5868; --held: #6b7889; --accent: #6ea8e6; --warn: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 40px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 2px; }
p { margin: 0 0 10px; }
.faint { color: var(--faint); }
.small { font-size: .86rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 18px 20px; margin-top: 18px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 18px; }
.figure { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 12px 16px; }
.figure b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.figure span { color: var(--faint); font-size: .82rem; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 12px; font-size: .86rem; color: var(--faint); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.nodes { display: grid; grid-template-columns: repeat(auto-fill, minmax(212px, 1fr)); gap: 12px; }
.node { border: 1px solid var(--line); border-radius: 10px; padding: 8px 10px 10px; min-width: 0; }
.node header { display: flex; justify-content: space-between; gap: 8px; font-size: .82rem; margin-bottom: 6px; }
.ranks { display: grid; grid-template-columns: repeat(4, 1fr); gap: 5px; }
.rank { border-radius: 6px; color: #fff; font-size: .78rem; line-height: 1; padding: 7px 4px 5px; text-align: center;
  font-variant-numeric: tabular-nums; min-width: 0; }
.rank small { display: block; font-size: .66rem; opacity: .88; margin: 3px 0 5px; white-space: nowrap; overflow: hidden; }
.ranks.long .rank { font-size: .66rem; padding-left: 1px; padding-right: 1px; }
.ranks.long small { font-size: .58rem; }
.rank.idle { background: var(--track); color: var(--faint); }
.meter { display: block; height: 4px; border-radius: 2px; background: rgba(255, 255, 255, .3); overflow: hidden; }
.meter i { display: block; height: 100%; background: #fff; }
.meter.over i { background: #ff5449; }
.lane { margin-top: 12px; }
.lane > p { margin: 0 0 5px; font-size: .9rem; overflow-wrap: anywhere; }
.lane-title { margin: 16px 0 4px; font-size: .9rem; overflow-wrap: anywhere; }
.flow { display: flex; flex-wrap: wrap; gap: 6px; }
.box { flex: 1 1 128px; border-radius: 8px; color: #fff; padding: 7px 10px; font-size: .8rem; line-height: 1.35; min-width: 0;
  overflow-wrap: anywhere; }
.box b { font-size: .92rem; }
.row { display: grid; grid-template-columns: 190px minmax(0, 1fr); gap: 4px 14px; align-items: center; margin-top: 6px; }
.row .name { font-size: .84rem; line-height: 1.3; overflow-wrap: anywhere; }
.row .name i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.bar { position: relative; display: flex; height: 18px; border-radius: 5px; background: var(--track); overflow: hidden; }
.bar i { display: block; height: 100%; flex: none; }
.value { font-size: .8rem; color: var(--faint); font-variant-numeric: tabular-nums; }
svg.time { display: block; width: 100%; background: var(--track); border-radius: 5px; }
.axis { position: relative; height: 20px; font-size: .76rem; color: var(--faint); font-variant-numeric: tabular-nums; }
.axis span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.axis span:first-child { transform: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-top: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums; }
thead th { border-top: 0; color: var(--faint); font-weight: 600; white-space: nowrap; }
td.short { white-space: nowrap; }
.warn { color: var(--warn); }
ul { margin: 6px 0; padding-left: 20px; }
details summary { cursor: pointer; color: var(--accent); margin-top: 10px; font-size: .88rem; }
footer { margin-top: 22px; font-size: .8rem; color: var(--faint); }
@media (max-width: 640px) { main { padding: 18px 12px 28px; } section { padding: 14px 14px; }
  h1 { font-size: 1.28rem; } .row { grid-template-columns: minmax(0, 1fr); margin-top: 10px; }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); } .figure b { font-size: 1.15rem; }
  .nodes { grid-template-columns: repeat(auto-fill, minmax(158px, 1fr)); } .narrow-hidden { display: none; } }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""
