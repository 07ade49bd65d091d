"""The report page: all that it shows is in it, for plans small and large, and it needs nothing from elsewhere."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from hdtensor import AnnotationPlan
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.emit import Planned, read_planned
from hdtensor.planner.models import find_model
from hdtensor.planner.page import page_html
from hdtensor.planner.page_style import stage_color
from hdtensor.planner.planning import make_costs, predict
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.summary import LaneGroup, group_lanes
from hdtensor.planner.text_report import step_text
from hdtensor.planner.workload import Workload
from tests.paper.test_plans_json import DATA


VOID = {"meta", "br", "path", "link", "img", "hr", "input"}
WHY = {
    "bound_seconds": 5.0,
    "gap": 0.1,
    "uniform_seconds": 9.0,
    "uniform": "4 lanes",
    "reasons": ["memory of <H800> & others binds"],
    "alternatives": [{"what": "2 lanes", "seconds": 7.0, "reason": "slower"}],
}


class Page(HTMLParser):
    """What stands in a page: elements by class, texts, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.classes, self.tags, self.texts, self.attributes = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.classes.append(dict(attrs).get("class", ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def of_paper(label):
    value = next(plan for plan in DATA["plans"] if plan["label"].startswith(label))
    planned = read_planned(AnnotationPlan.from_dict(value))
    return predict(planned, make_costs(planned.model, planned.workload, planned.cluster), WHY)


def test_a_page_has_every_rank_lane_stage_and_reason():
    summary = of_paper("C6")
    page = Page(page_html(summary))
    assert page.classes.count("rank") == 39
    assert page.classes.count("rank idle") == 1  # rank 15 was lost
    assert page.classes.count("node") == 5
    assert page.classes.count("box") == page.classes.count("time") == len(summary.stages) == 11
    text = "".join(page.texts)
    for words in ("layers 40-52", "33 micro-batches of 1", "memory of <H800> & others binds", "Rejected", "2 lanes",
                  "10.0%", "above the lower bound of 5.000 s", "as fast as the best uniform plan, 9.000 s"):  # fmt: skip
        assert words in text
    assert [t for t in page.tags if t == "h2"] == ["h2"] * 8


def test_a_page_needs_nothing_from_elsewhere_and_has_no_scripts():
    text = page_html(of_paper("C6"))
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {name for name, _ in page.attributes} & {"src", "href", "onclick", "onload"}
    assert "url(" not in text
    assert "http" not in text
    assert ("name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text


def test_names_from_outside_are_text_and_no_markup():
    planned = read_planned(AnnotationPlan.from_dict(DATA["plans"][0]))
    evil = '<script>alert("x")</script>'
    nodes = tuple(dataclasses.replace(node, name=evil, zone=evil) for node in planned.cluster.nodes)
    planned = planned._replace(
        model=dataclasses.replace(planned.model, name=evil),
        cluster=dataclasses.replace(planned.cluster, nodes=nodes),
    )
    costs = make_costs(planned.model, planned.workload, planned.cluster)
    why = {
        **WHY,
        "reasons": [evil],
        "alternatives": [{"what": evil, "seconds": 1.0, "reason": evil}],
    }
    text = page_html(predict(planned, costs, why))
    assert "<script" not in text
    assert text.count("&lt;script") >= 6


def test_bars_are_never_wider_than_what_they_stand_in():
    for label in ("C1", "C6", "32B, 16 H800, 32 H20"):
        text = page_html(of_paper(label))
        for bar in re.findall(r'<div class="bar">(.*?)</div>', text):
            widths = [float(width) for width in re.findall(r"width:([\d.]+)%", bar)]
            assert 0 < sum(widths) <= 100.1
        for start, width in re.findall(r"M([\d.]+) 0h([\d.]+)v", text):
            assert 0 <= float(start) <= float(start) + float(width) <= 2000.2


def lanes_of(num_lanes, num_microbatches, model="llama-7B", cluster="1024x H20"):
    lanes = tuple(
        LaneChoice(
            (StageChoice((2 * lane,), 16, 1), StageChoice((2 * lane + 1,), 16, 1)),
            num_microbatches,
            1,
        )
        for lane in range(num_lanes)
    )
    workload = Workload(batch=num_lanes * num_microbatches, context=1024)
    planned = Planned(Strategy(lanes), find_model(model), cluster_of_text(cluster), workload)
    return predict(planned, make_costs(planned.model, workload, planned.cluster))


def test_lanes_that_do_the_same_are_shown_once():
    summary = lanes_of(512, 4)
    (group,) = group_lanes(summary)
    assert group.lanes == tuple(range(512))
    text = page_html(summary)
    page = Page(text)
    assert page.classes.count("rank") == 1024
    assert page.classes.count("time") == 2
    assert len(text) < 600_000
    lines = step_text(summary).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) < 250


def test_many_spans_become_few_paths():
    few, many = (
        page_html(lanes_of(1, 8, cluster="2x H20")),
        page_html(lanes_of(1, 900, cluster="2x H20")),
    )
    assert few.count("<title>") == 1 + 2 * 2 * 8 + 2  # the page, passes, optimizer
    assert many.count("<title>") == 1
    assert many.count("<path") < 20
    assert many.count("M") > 2 * 2 * 900


def test_what_is_too_much_for_a_device_is_marked():
    summary = lanes_of(1, 4, model="llama-13B", cluster="2x RTX-3090")
    assert len(summary.overfull) == 2
    page = Page(page_html(summary))
    assert page.classes.count("meter over") == 2
    text = "".join(page.texts)
    assert "too much" in text
    assert "but its device has 25.8 GB" in text
    assert step_text(summary).count("warning: lane 0 stage") == 2
    assert summary.to_dict()["fits"] is False


@pytest.mark.parametrize("num_stages", [1, 4, 8])
def test_white_text_is_readable_on_every_stage(num_stages):
    """WCAG 2 asks for a contrast of 4.5."""

    def light(channel):
        value = int(channel, 16) / 255
        return value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4

    seen = set()
    for lane in range(40):
        for stage in range(num_stages):
            color = stage_color(lane, stage, num_stages)
            red, green, blue = (light(color[i : i + 2]) for i in (1, 3, 5))
            luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
            assert 1.05 / (luminance + 0.05) > 4.45, (lane, stage, color)
            seen.add(color)
    assert len(seen) > 36 * num_stages


def test_long_lists_of_lanes_are_cut_between_numbers_and_long_numbers_are_small():
    few, many = LaneGroup((0, 2, 4), ()), LaneGroup(tuple(range(0, 1000, 2)), ())
    assert few.title == "lanes 0,2,4 (alike)"
    assert many.title == "lanes 0,2,4,6,8,10,12,14,16,... (500 lanes) (alike)"
    for num, nodes in ((8, 0), (1008, 126)):
        cluster = cluster_of_text(f"{num}x H800")
        stage = StageChoice(tuple(range(8)), 32, 8)
        planned = Planned(
            Strategy((LaneChoice((stage,), 4, 1),)),
            find_model("llama-7b"),
            cluster,
            Workload(batch=4, context=2048),
        )
        page = page_html(predict(planned, make_costs(planned.model, planned.workload, cluster)))
        assert page.count('class="ranks long"') == nodes
