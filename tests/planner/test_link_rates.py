"""The header's line of links: what is said is what the simulator is given."""

import json

import pytest

from hdtensor.planner.cluster_files import parse_cluster
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.link_rates import link_rates, links_text
from tests.planner.test_commands import run


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1x H800", "none: one device"),
        ("8x H800", "200 GB/s inside nodes"),
        ("2x 1x H800", "50 GB/s (400 Gb/s) between nodes, for each device"),
        ("2x 8x RTX-4090", "31.5 GB/s inside nodes, 1.25 GB/s (10 Gb/s) between nodes, shared by a node's devices"),
        ("2x 8x A100-80 + 2x 8x RTX-4090",
         "300 GB/s inside A100-80 nodes, 31.5 GB/s inside RTX-4090 nodes, 25 GB/s (200 Gb/s) between A100-80 <-> A100-80 "
         "nodes, 1.25 GB/s (10 Gb/s) between A100-80 <-> RTX-4090, RTX-4090 <-> RTX-4090 nodes, the devices of each "
         "RTX-4090 node share 1.25 GB/s (10 Gb/s)"),
    ],
)  # fmt: skip
def test_words(text, words):
    assert links_text(cluster_of_text(text)) == words


def test_rates_are_those_of_every_pair_of_ranks():
    text = """
nodes: [4x H800 @ east, 4x H800 @ west, 2x H20 @ east, 1x RTX-4090 @ west]
network: 3 GB/s
links:
  - {between: [east, west], bandwidth: 1 Gb/s}
"""
    for cluster in (parse_cluster(text), cluster_of_text("2x 4x H800 + 4x H20/2 + 8x RTX-4090/4")):
        rates = link_rates(cluster)
        pairs = [(a, b) for a in range(cluster.num_ranks) for b in range(a)]
        inside = {
            c.bandwidth
            for a, b in pairs
            if cluster.node_of(a) == cluster.node_of(b)
            for c in [cluster.link(a, b)]
        }
        between = {c.bandwidth for a, b in pairs if cluster.node_of(a) != cluster.node_of(b) for c in [cluster.link(a, b)]}  # fmt: skip
        assert {rate.bandwidth for rate in rates if rate.where == "inside"} == inside
        assert {rate.bandwidth for rate in rates if rate.where == "between"} == between
        uplinks = {n.uplink for n in cluster.nodes if n.uplink is not None and n.num_devices > 1}
        assert {rate.bandwidth for rate in rates if rate.where == "uplink"} == uplinks


def test_the_header_and_json_say_it(capsys):
    arguments = ["plan", "--model", "llama-7b", "--cluster", "2x 2x H800", "--batch", "8", "--context", "1024"]  # fmt: skip
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    words = "links 200 GB/s inside nodes, 50 GB/s (400 Gb/s) between nodes, for each device"
    assert out.splitlines()[2] == words
    value = json.loads(run(capsys, *arguments, "--json")[1])
    assert value["links"] == [
        {"where": "inside", "of": ["H800"], "bandwidth": 200e9},
        {"where": "between", "of": ["H800 <-> H800"], "bandwidth": 50e9},
    ]
