"""Open the planner's report page in a headless browser and check that it looks right.

For pages of several plans, at the width of a laptop and of a phone: the page does not scroll sideways, nothing is
cut off or laid over its neighbour, and a screenshot, of pages that are not very long, has the colours of all
stages. Screenshots are kept in outputs/page.

    python scripts/check_page.py             # where there is no browser it says so and ends well
    python scripts/check_page.py --required  # where there must be one
    python scripts/check_page.py --quick     # one plan, as `make check` does
"""

import argparse
import html
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hdtensor import AnnotationPlan  # noqa: E402 - the repository is on the path by now
from hdtensor.planner.cluster_text import cluster_of_text  # noqa: E402
from hdtensor.planner.emit import Planned, read_planned  # noqa: E402
from hdtensor.planner.models import find_model  # noqa: E402
from hdtensor.planner.page import page_html  # noqa: E402
from hdtensor.planner.page_style import stage_color  # noqa: E402
from hdtensor.planner.planning import make_costs, predict  # noqa: E402
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy  # noqa: E402
from hdtensor.planner.workload import Workload  # noqa: E402


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
WIDTHS = {"laptop": 1280, "phone": 390}
LABELS = ("32B, 16 H800, 32 H20", "C2", "C6", "70B, 16 H800, 16 H20")
OUTPUT = ROOT / "outputs" / "page"
SECONDS = 120
#: Height of pages whose pixels are read; it takes a second for each 100,000 of them.
MOST_PIXELS = 8000

#: A page that holds the report in a frame of a given width and writes down what is wrong in it.
FRAME = """<!doctype html><body style="margin:0"><iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}">
</iframe><pre id="found"></pre><script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, faults = [];
  const root = page.documentElement;
  if (root.scrollWidth > {width}) faults.push("the page is " + root.scrollWidth + " wide");
  for (const element of page.querySelectorAll("main *")) {{
    if (element.closest(".scroll, svg, details")) continue;
    const box = element.getBoundingClientRect(), what = element.className + " " + element.textContent.slice(0, 40);
    if (box.right > {width} + 1 || box.left < -1) faults.push("beyond the edge: " + what);
    if (element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== "inline"
        && !element.matches(".axis, .axis span")) faults.push("cut off: " + what);
  }}
  for (const group of page.querySelectorAll(".ranks, .flow, .figures, .nodes")) {{
    const boxes = [...group.children].map(child => child.getBoundingClientRect());
    boxes.forEach((one, i) => boxes.slice(i + 1).forEach(other => {{
      if (one.left < other.right - 1 && other.left < one.right - 1 && one.top < other.bottom - 1
          && other.top < one.bottom - 1) faults.push("laid over one another in " + group.className);
    }}));
  }}
  document.getElementById("found").textContent = JSON.stringify({{faults, height: root.scrollHeight}});
}};
</script>"""


def find_browser():
    """Return the path of a browser that runs headless, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def run_browser(browser, *arguments):
    """Return what a headless browser prints, in a profile of its own."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [browser, *OPTIONS, f"--user-data-dir={profile}", *arguments],
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{browser} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def measure(browser, page, width, folder):
    """Return the faults of a page at a width, and its height."""
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
    size = f"--window-size={width + 40},1000"
    out = run_browser(browser, "--dump-dom", "--virtual-time-budget=8000", size, frame.as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', out, re.DOTALL)
    if not found or not found[1]:
        raise RuntimeError("the browser did not load the page")
    value = json.loads(html.unescape(found[1]))
    return value["faults"], value["height"]


def read_pixels(path):
    """Return the set of colours of a screenshot, (red, green, blue)."""
    data = path.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind) in ((8, 2), (8, 6)), "screenshots are 8-bit RGB or RGBA"
    chunks, at = [], 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            chunks.append(data[at + 8 : at + 8 + size])
        at += 12 + size
    return _colors(zlib.decompress(b"".join(chunks)), width, height, 3 if kind == 2 else 4)


def _colors(raw, width, height, channels):
    """Return the colours of a PNG's unpacked rows, by undoing each row's filter."""
    import numpy  # noqa: PLC0415 - only here

    rows = numpy.frombuffer(raw, numpy.uint8).reshape(height, 1 + width * channels)
    before = numpy.zeros((width, channels), numpy.uint8)
    colors = set()
    for row in rows:
        line = row[1:].reshape(width, channels).copy()
        before = _unfilter(row[0], line, before, numpy)
        colors.update(map(tuple, numpy.unique(before[:, :3], axis=0).tolist()))
    return colors


def _unfilter(kind, line, above, numpy):
    """Return a row of a PNG by its filter: none, left, up, average or Paeth."""
    if kind == 0:
        return line
    if kind == 1:
        return numpy.cumsum(line, axis=0, dtype=numpy.uint8)
    if kind == 2:
        return line + above
    left = corner = [0] * line.shape[1]
    out = numpy.empty_like(line)
    for x, (pixel, up) in enumerate(zip(line.tolist(), above.tolist(), strict=True)):
        guess = _averages(left, up) if kind == 3 else _paeth(left, up, corner)
        left = [(p + g) & 255 for p, g in zip(pixel, guess, strict=True)]
        corner = up
        out[x] = left
    return out


def _averages(left, up):
    return [(a + b) // 2 for a, b in zip(left, up, strict=True)]


def _paeth(left, up, corner):
    out = []
    for a, b, c in zip(left, up, corner, strict=True):
        p = a + b - c
        out.append(min((a, b, c), key=lambda value, p=p: abs(p - value)))
    return out


def made_up(num_lanes):
    """Return a plan of one rank, or of lanes of 16 ranks where every other lane has another share of the batch."""
    model = find_model("llama-7b")
    if num_lanes == 1:
        lanes = [LaneChoice((StageChoice((0,), 32, 1),), 4, 1)]
        cluster = cluster_of_text("1x H20")
    else:
        fast = num_lanes * 8
        lanes = []
        for lane in range(num_lanes):
            first, second = (
                range(lane * 8, lane * 8 + 8),
                range(fast + lane * 8, fast + lane * 8 + 8),
            )
            stages = (StageChoice(tuple(first), 20, 8), StageChoice(tuple(second), 12, 8))
            lanes.append(LaneChoice(stages, 4 + lane % 2, 1))
        cluster = cluster_of_text(f"{fast}x H800 + {fast}x H20")
    batch = sum(lane.num_microbatches for lane in lanes)
    work = Workload(batch=batch, context=2048)
    return Planned(Strategy(tuple(lanes)), model, cluster, work)


def all_planned():
    """Return label -> plan: some of the paper's, and the smallest and a large one."""
    plans = json.loads((ROOT / "tests" / "paper" / "data" / "plans.json").read_text())["plans"]
    found = {}
    for label in LABELS:
        value = next(plan for plan in plans if plan["label"].startswith(label))
        found[label] = read_planned(AnnotationPlan.from_dict(value))
    return {**found, "1 rank": made_up(1), "1,024 ranks": made_up(64)}


def check(browser, most):
    """Return the number of faults of the first plans, after printing each."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    num_faults = 0
    for label, planned in list(all_planned().items())[:most]:
        summary = predict(planned, make_costs(planned.model, planned.workload, planned.cluster))
        page = page_html(summary)
        name = re.sub(r"\W+", "_", label)
        path = OUTPUT / f"{name}.html"
        path.write_text(page, encoding="utf-8")
        lanes = planned.strategy.lanes
        wanted = {stage_color(s.lane, s.stage, len(lanes[s.lane].stages)) for s in summary.stages}
        for device, width in WIDTHS.items():
            faults, height = measure(browser, page, width, OUTPUT)
            shot = OUTPUT / f"{name}_{device}.png"
            size = f"--window-size={width},{height}"
            run_browser(browser, f"--screenshot={shot}", size, path.as_uri())
            if height <= MOST_PIXELS:
                seen = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in read_pixels(shot)}
                faults += [f"the colour {color} is missing" for color in sorted(wanted - seen)]
            print(f"{label}, {device}: {len(faults)} faults, {height} pixels high, {shot}")
            for fault in faults:
                print(f"  {fault}")
            num_faults += len(faults)
    (OUTPUT / "frame.html").unlink()
    return num_faults


def main():
    """Check the page; return 0 if it is right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--required", action="store_true", help="fail where there is no browser")
    parser.add_argument("--quick", action="store_true", help="one plan only")
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        print(
            f"NOT CHECKED: the page in a browser, as there is none ({', '.join(BROWSERS)}); tests/planner/test_page.py reads "
            f"the page's structure"
        )
        return int(options.required)
    return int(check(browser, 1 if options.quick else None) > 0)


if __name__ == "__main__":
    sys.exit(main())
