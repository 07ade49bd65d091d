"""docs/planner_inputs.md says what the code does."""

import json
import re
from pathlib import Path

import pytest

from hdtensor import cli
from hdtensor.planner import cluster_fields, commands
from hdtensor.planner.cluster_files import parse_cluster
from hdtensor.planner.library import ALIASES, DEVICES
from hdtensor.planner.models import MODELS
from hdtensor.planner.profiles import Profile
from hdtensor.planner.workload import OPTIMIZERS, SCHEDULES


TEXT = (Path(__file__).parents[2] / "docs" / "planner_inputs.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def rows(names):
    cells = [
        [c.strip() for c in line.split("|")[1:-1]]
        for line in TEXT.splitlines()
        if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[1:] for row in cells if row[0].strip("`") in names}


def test_the_table_of_devices_is_the_library():
    found = rows(DEVICES)
    assert list(found) == list(DEVICES)
    for name, device in DEVICES.items():
        memory, rates, reads, link, network, source = found[name]
        assert float(memory) == pytest.approx(device.memory_bytes / 1e9, abs=0.05)
        kinds = ("bfloat16", "float16", "float32")
        said = dict(zip(kinds, rates.split(" / "), strict=True))
        assert {k: float(v) * 1e12 for k, v in said.items() if v != "-"} == pytest.approx(
            dict(device.flops), rel=1e-6
        )
        speeds = (device.memory_bandwidth, device.link_bandwidth, DEVICES[name].network_bandwidth)
        assert tuple(float(v) * 1e9 for v in (reads, link, network)) == pytest.approx(speeds)
        assert source == device.source
    assert all(f"`{alias}` is `{name}`" in TEXT for alias, name in ALIASES.items())


def test_the_table_of_models_is_the_presets():
    found = rows(MODELS)
    assert list(found) == list(MODELS)
    for name, shape in MODELS.items():
        layers, hidden, heads, mlp, vocab, parameters = found[name]
        assert (int(layers), int(hidden), int(vocab)) == (
            shape.num_layers,
            shape.hidden,
            shape.vocab,
        )
        assert heads == f"{shape.num_heads} ({shape.num_kv_heads})"
        assert str(shape.ffn) in mlp
        assert parameters == f"{shape.num_parameters / 1e9:.2f} B"


def test_the_examples_of_clusters_are_read():
    one, other = map(parse_cluster, blocks("yaml"))
    assert [node.device.name for node in one.nodes] == ["H800", "H800", "mine", "mine", "H20"]
    assert one.link(0, 16).bandwidth == 1.25e9
    assert other.num_ranks == 48
    text = "".join(blocks("yaml"))
    keys = (*cluster_fields._KEYS, *cluster_fields._NODE_KEYS, *cluster_fields._DEVICE_KEYS)
    assert [key for key in keys if f"{key}:" not in text] == []


def test_the_example_of_a_profile_is_one():
    (block,) = blocks("json")
    profile = Profile.from_dict(json.loads(block))
    assert profile.to_dict() == json.loads(block)


def test_commands_options_and_words_are_named(capsys):
    for word in (*OPTIMIZERS, *SCHEDULES):
        assert f"`{word}`" in TEXT
    assert f"| {commands.INTERRUPTED} |" in TEXT
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    names = re.findall(r"^    (\S+)  +\S", capsys.readouterr().out, flags=re.MULTILINE)
    assert {"plan", "explain", "simulate", "profile", "devices"} <= set(names)
    for line in blocks("")[0].splitlines():
        assert line.split()[:1] == ["hdtensor"]
        assert line.split()[1] in names
