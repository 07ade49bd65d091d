"""``Topology``: links, bandwidths, and what launchers and drivers print about them."""

import copy
import dataclasses
import json
import pickle
import re

import pytest

from hdtensor.errors import TopologyError
from hdtensor.redistribute.topology import UNIFORM, Topology
from hdtensor.redistribute.topology_fields import RankBandwidth


LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""

_H100_NICS = {
    i: ["PIX" if j == i else "NODE" if j // 4 == i // 4 else "SYS" for j in range(8)]
    for i in range(8)
}
H100 = (
    "\n".join(
        [
            "\t\x1b[4m"
            + "\t".join([*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(8))])
            + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m",
            *(
                f"GPU{i}\t"
                + "\t".join([*(" X " if i == j else "NV18" for j in range(8)), *_H100_NICS[i]])
                + f"\t{48 * (i // 4)}-{48 * (i // 4) + 47}\t{i // 4}\t\tN/A"
                for i in range(8)
            ),
            *(
                f"NIC{i}\t"
                + "\t".join([*_H100_NICS[i], *(" X " if i == j else "NODE" for j in range(8))])
                for i in range(8)
            ),
        ]
    )
    + LEGEND
)

RTX4090 = (
    """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      PHB     SYS     SYS     0-15,32-47      0               N/A
GPU1    PHB      X      SYS     SYS     0-15,32-47      0               N/A
GPU2    SYS     SYS      X      PHB     16-31,48-63     1               N/A
GPU3    SYS     SYS     PHB      X      16-31,48-63     1               N/A
"""
    + LEGEND
)

BRIDGED = """\
	GPU0	GPU1	GPU2	GPU3	mlx5_0	CPU Affinity	NUMA Affinity
GPU0	 X 	PXB	NV4	SYS	NODE	0-31	0
GPU1	PXB	 X 	NODE	NV12	SYS	0-31	0
GPU2	NV4	NODE	 X 	PIX	SYS	32-63	1
GPU3	SYS	NV12	PIX	 X 	SYS	32-63	1
mlx5_0	NODE	SYS	SYS	SYS	 X
"""


def test_uniform_knows_one_class_for_any_rank():
    assert Topology() == UNIFORM
    assert UNIFORM.links == ("any",)
    assert UNIFORM.link(3, 4000) == 0 == UNIFORM.network
    assert UNIFORM.neighbours(7) == (7,)
    assert UNIFORM.seconds_per_byte(0, 5) == (1e-10, 1e-10)


def test_nodes_of_consecutive_ranks():
    topology = Topology.of_nodes(8, 20)
    assert topology.nodes == (0,) * 8 + (1,) * 8 + (2,) * 4
    assert [topology.links[topology.link(0, rank)] for rank in (7, 8, 19)] == ["nvlink", "ib", "ib"]
    assert topology.neighbours(17) == (16, 17, 18, 19)
    assert Topology.of_nodes([3, 1]).nodes == (0, 0, 0, 1)
    assert topology.seconds_per_byte(0, 1) == (1 / 400e9, 1 / 400e9)
    assert topology.seconds_per_byte(0, 8) == (1 / 50e9, 1 / 50e9)


def test_a_rank_may_be_slower_than_its_class():
    slow = RankBandwidth(10e9, 25e9, 200e9, 100e9)
    usual = RankBandwidth(50e9, 50e9, 400e9, 400e9)
    topology = Topology(nodes=(0, 0, 1), ranks=(slow, usual, usual))
    assert topology.seconds_per_byte(0, 1) == (1 / 200e9, 1 / 400e9)
    assert topology.seconds_per_byte(1, 0) == (1 / 400e9, 1 / 100e9)
    assert topology.seconds_per_byte(0, 2) == (1 / 10e9, 1 / 50e9)
    assert topology.seconds_per_byte(2, 0) == (1 / 50e9, 1 / 25e9)


def test_links_inside_a_node_take_their_class_share_of_a_rank():
    inside = ((0, 1), (1, 0))
    topology = Topology(
        nodes=(0, 1, 0, 1),
        links=("nvlink", "pcie", "ib"),
        bytes_per_s=(100e9, 20e9, 50e9),
        inside=(((0, 0), (0, 0)), inside),
    )
    assert [topology.link(0, rank) for rank in range(4)] == [0, 2, 0, 2]
    assert topology.link(1, 3) == 1
    assert topology.seconds_per_byte(1, 3) == pytest.approx((1 / 20e9, 1 / 20e9))


@pytest.mark.parametrize("rank", [4, -1])
def test_unknown_ranks_raise(rank):
    topology = Topology.of_nodes(2, 4)
    for call in (topology.node, topology.neighbours, topology.bandwidth):
        with pytest.raises(TopologyError, match=rf"ranks 0 to 3, not {rank}\. Describe every rank"):
            call(rank)
    for pair in ((0, rank), (rank, 0)):
        with pytest.raises(TopologyError, match=f"not {rank}"):
            topology.link(*pair)


def test_a_topology_is_a_value():
    topology = Topology.from_nvidia_smi(RTX4090, 2)
    again = Topology.from_nvidia_smi(RTX4090, 2)
    assert topology == again
    assert hash(topology) == hash(again)
    assert copy.deepcopy(topology) == pickle.loads(pickle.dumps(topology)) == topology
    faster = dataclasses.replace(topology, bytes_per_s=(20e9, 10e9, 100e9))
    assert faster != topology
    assert faster.neighbours(5) == (4, 5, 6, 7)


# ---- files ----


TOPOLOGIES = {
    "uniform": UNIFORM,
    "nodes": Topology.of_nodes([3, 1]),
    "matrix": Topology.from_nvidia_smi(BRIDGED, 2),
    "ranks": Topology(nodes=(0, 1), ranks=(RankBandwidth(1.0, 2.0, 3.0, 4.5),) * 2),
}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_a_file_gives_back_what_was_saved(topology, tmp_path):
    topology.save(tmp_path / "cluster.json")
    assert Topology.load(tmp_path / "cluster.json") == topology
    assert Topology.from_dict(topology.to_dict()) == topology


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ('{"version": NaN}', "is not JSON: NaN is no number"),
        ("[" * 100_000, "is not JSON"),
        ("\xff", "topology"),
        ("[]", "topology: must be an object"),
    ],
)
def test_bad_files_raise(text, message, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(TopologyError, match=message):
        Topology.load(path)
    with pytest.raises(
        TopologyError, match=r"cannot read the topology .*absent.json': No such file"
    ):
        Topology.load(tmp_path / "absent.json")


def document(**changes):
    value = Topology.from_nvidia_smi(RTX4090).to_dict()
    value["ranks"] = [{"nic_out": 1, "nic_in": 1, "fast_out": 1, "fast_in": 1} for _ in range(4)]
    return {**value, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version: 2 is unknown; this package reads version 1"),
        ({"version": True}, "version: True is unknown"),
        ({"version": None}, "version: None is unknown"),
        ({"bandwidth": 3}, "'bandwidth': no such field; allowed: version, nodes"),
        ({"nodes": 3}, "nodes: must be a list, got 3"),
        ({"nodes": [0, 0, 0, "a"]}, "nodes[3]: must be an integer from 0 to 3, got 'a'"),
        ({"nodes": [0, 0, 0, 9]}, "nodes[3]: must be an integer from 0 to 3, got 9"),
        ({"nodes": [0, 0, 0, True]}, "nodes[3]: must be an integer from 0 to 3, got True"),
        ({"nodes": [0, 0, 0, 2]}, "nodes: no rank is on node 1; number the nodes from 0"),
        ({"nodes": []}, "links: without nodes all links are alike"),
        ({"links": ["a"]}, "links: nodes need a class inside them and one between them"),
        ({"links": ["a", "a", "b"]}, "links: each name once"),
        ({"links": [1, 2, 3]}, "links: must be a tuple of names"),
        ({"bytes_per_s": [1.0]}, "bytes_per_s: must be 3 numbers"),
        (
            {"bytes_per_s": [1.0, 0, 1.0]},
            "bytes_per_s[1]: must be a positive number of bytes/s, got 0",
        ),
        ({"bytes_per_s": [1.0, 1.0, "x"]}, "bytes_per_s[2]: must be a positive number"),
        ({"bytes_per_s": [1.0, 10**400, 1.0]}, "bytes_per_s[1]: must be a positive number"),
        ({"inside": [[[0]]]}, "inside[0]: must be 4 x 4"),
        ({"inside": []}, None),
        ({"inside": [0]}, "inside: must be a list, got 0"),
        ({"inside": [[[0] * 4] * 4] * 2}, "inside: must be one matrix for each of 1 nodes"),
        ({"inside": [[[2] * 4] * 4]}, "inside[0][0][0]: must be a class from 0 to 1"),
        (
            {"ranks": [1, 2, 3, 4]},
            "ranks[0]: must be an object of nic_out, nic_in, fast_out, fast_in",
        ),
        ({"ranks": [{"nic_out": 1}]}, "ranks[0]: must be an object"),
        (
            {"ranks": [{"nic_out": 1, "nic_in": -1, "fast_out": 1, "fast_in": 1}] * 4},
            "ranks[0].nic_in: must be a positive number of bytes/s, got -1",
        ),
        (
            {"ranks": [{"nic_out": 1, "nic_in": 1, "fast_out": 1, "fast_in": 1}]},
            "ranks: must be one entry for each of 4",
        ),
    ],
)
def test_bad_documents_name_the_field(changes, message):
    if message is None:
        assert Topology.from_dict(document(**changes)).inside == ()
        return
    with pytest.raises(TopologyError, match=f"^{re.escape(message)}"):
        Topology.from_dict(document(**changes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "ranks_per_node, num_ranks: must be positive"),
        ((4,), "ranks_per_node, num_ranks: must be positive"),
        ((4, 1 << 21), "at most 1048576"),
        (([2, 0],), "each node needs a positive number"),
        (([2, 2], 5), "ranks_per_node: describes 4 ranks, but the world has 5"),
    ],
)
def test_bad_sizes_of_nodes(arguments, message):
    with pytest.raises(TopologyError, match=message):
        Topology.of_nodes(*arguments)


# ---- launchers ----


def torchrun(**changes):
    base = {
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "RANK": "11",
        "LOCAL_RANK": "3",
    }
    return {**base, **changes}


def test_torchrun_describes_equal_nodes():
    assert Topology.from_environment(torchrun(), 16) == Topology.of_nodes(8, 16)
    least = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}
    assert Topology.from_environment(least) == Topology.of_nodes(4, 16)


def test_torchrun_inside_slurm_wins():
    agents = {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2"}
    assert Topology.from_environment(torchrun(**agents)) == Topology.of_nodes(8, 16)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "says nothing about nodes: neither LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "8", "RANK": "0"}, "says nothing about nodes"),
        ({"LOCAL_WORLD_SIZE": "8"}, "WORLD_SIZE: must be an integer from 1 to 1048576, got ''"),
        (torchrun(LOCAL_WORLD_SIZE="0"), "LOCAL_WORLD_SIZE: must be an integer from 1"),
        (torchrun(WORLD_SIZE="many"), "WORLD_SIZE: must be an integer .* got 'many'"),
        (torchrun(WORLD_SIZE="12"), "12 ranks on 2 nodes, 8 of them here .* unequal"),
        (torchrun(RANK="9"), "unequal or their ranks not consecutive"),
        ({"SLURM_TASKS_PER_NODE": "8(x2"}, r"SLURM_TASKS_PER_NODE: '8\(x2' in '8\(x2' is no count"),
        ({"SLURM_TASKS_PER_NODE": ""}, "'' in '' is no count"),
        ({"SLURM_TASKS_PER_NODE": "9999999(x9999999)"}, "is more than 1048576 ranks"),
        ({"SLURM_TASKS_PER_NODE": "0(x9999999)"}, "is more than 1048576 ranks"),
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_NTASKS": "9"}, "is 8 ranks, but SLURM_NTASKS is 9"),
        (
            {"SLURM_TASKS_PER_NODE": "8", "SLURM_JOB_NODELIST": "gpu[1-2]"},
            r"is 1 nodes, but SLURM_JOB_NODELIST is 'gpu\[1-2\]'",
        ),
        (
            {"SLURM_TASKS_PER_NODE": "8", "SLURM_JOB_NODELIST": "gpu[1-"},
            "is no node list",
        ),
        (
            {"SLURM_TASKS_PER_NODE": "8", "SLURM_JOB_NODELIST": "gpu[3-1]"},
            "the range '3-1' in",
        ),
        (
            {"SLURM_TASKS_PER_NODE": "8", "SLURM_DISTRIBUTION": "plane=4"},
            "SLURM_DISTRIBUTION: 'plane=4' does not say",
        ),
    ],
)
def test_environments_without_an_answer(environ, message):
    with pytest.raises(TopologyError, match=message):
        Topology.from_environment(environ)


def test_a_world_of_another_size_raises():
    with pytest.raises(TopologyError, match="environment: describes 16 ranks, but the world has 8"):
        Topology.from_environment(torchrun(), 8)


@pytest.mark.parametrize(
    ("environ", "sizes"),
    [
        ({"SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_NTASKS": "20"}, [8, 8, 4]),
        ({"SLURM_TASKS_PER_NODE": "3"}, [3]),
        (
            {"SLURM_TASKS_PER_NODE": "2,3,1(x3)", "SLURM_JOB_NODELIST": "a,gpu[01-03,07]"},
            [2, 3, 1, 1, 1],
        ),
        (
            {"SLURM_TASKS_PER_NODE": "1(x4)", "SLURM_JOB_NODELIST": "r[1-2]c[5-6]"},
            [1, 1, 1, 1],
        ),
        (
            {
                "SLURM_TASKS_PER_NODE": "8(x4)",
                "SLURM_NTASKS": "32",
                "SLURM_STEP_TASKS_PER_NODE": "8,4",
                "SLURM_STEP_NUM_TASKS": "12",
                "SLURM_STEP_NODELIST": "gpu[01-02]",
                "SLURM_JOB_NODELIST": "gpu[01-04]",
                "SLURM_DISTRIBUTION": "block:cyclic",
            },
            [8, 4],
        ),
    ],
)
def test_slurm_describes_unequal_nodes(environ, sizes):
    assert Topology.from_environment(environ) == Topology.of_nodes(sizes)


def test_slurm_may_deal_ranks_out():
    environ = {"SLURM_TASKS_PER_NODE": "3,1,2", "SLURM_DISTRIBUTION": "cyclic"}
    assert Topology.from_environment(environ).nodes == (0, 1, 2, 0, 2, 0)


def test_the_real_environment_is_the_default(monkeypatch):
    for name, value in torchrun().items():
        monkeypatch.setenv(name, value)
    assert Topology.from_environment() == Topology.of_nodes(8, 16)


def test_the_file_is_json_with_a_version(tmp_path):
    Topology.of_nodes([2, 1]).save(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == {
        "version": 1,
        "nodes": [0, 0, 1],
        "links": ["nvlink", "ib"],
        "bytes_per_s": [400e9, 50e9],
    }
