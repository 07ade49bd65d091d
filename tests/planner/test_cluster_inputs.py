"""Clusters as people describe them: a line, a file, nvidia-smi, SLURM, this machine."""

import json

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Link
from hdtensor.planner.cluster_fields import cluster_of_fields, cluster_to_fields
from hdtensor.planner.cluster_files import parse_cluster, read_cluster
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.library import DEVICES
from hdtensor.planner.machine import cluster_of_slurm, this_machine


TOPO = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-7
GPU1\tNV4\t X \tSYS\tSYS\t0-7
GPU2\tSYS\tSYS\t X \tNV4\t8-15
GPU3\tSYS\tSYS\tNV4\t X \t8-15
"""

MINE = """
# two halls
devices:
  fast: {like: CPU, speed: 2.0}
  own: {memory: 80 GiB, flops: {bfloat16: 500 TFLOPS}, memory_bandwidth: 2 TB/s, link_bandwidth: 200 GB/s}
nodes:
  - 2x 2x fast @ east
  - {device: own, count: 3, name: b, zone: west, inside: {bandwidth: 100 GB/s, latency: 3 us}, uplink: 25 GB/s}
  - {device: H20, repeat: 2}
network: {bandwidth: 400 Gb/s, latency: 20 us}
links:
  - {between: [east, west], bandwidth: 10 Gb/s, latency: 1 ms}
"""


def test_a_cluster_of_one_line():
    cluster = cluster_of_text("16x H800 + 2x 12x H20 + 5x V100/4 @ b")
    assert [(node.device.name, node.num_devices) for node in cluster.nodes] == [
        ("H800", 8), ("H800", 8), ("H20", 12), ("H20", 12), ("V100-16", 4), ("V100-16", 1)
    ]  # fmt: skip
    assert cluster.nodes[-1].zone == "b"
    # A link is as fast as its slower end.
    assert cluster.link(0, 20).bandwidth == DEVICES["H20"].network_bandwidth
    assert cluster.link(0, 44).bandwidth == DEVICES["V100-16"].network_bandwidth
    assert cluster.link(0, 1).bandwidth == DEVICES["H800"].link_bandwidth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cluster: '' is no group of devices; allowed: 16x H800"),
        ("H800", "cluster: 'H800' is no group"),
        ("8x H800 +", "cluster: '' is no group"),
        ("0x H20", "cluster: '0x H20' is no device at all"),
        ("2x 8x H20/4", "cluster: '2x 8x H20/4' says the size of a node twice"),
        ("999999x H20", "cluster: more than 65536 devices"),
        ("8x H20 @ a b", "cluster: '8x H20 @ a b' is no group"),
    ],
)
def test_a_wrong_line_is_refused(text, message):
    with pytest.raises(PlannerError, match=f"^{message}"):
        cluster_of_text(text)


def test_a_file_has_devices_of_its_own_nodes_and_links():
    cluster = parse_cluster(MINE)
    assert cluster.num_ranks == 2 + 2 + 3 + 8 + 8
    fast, own = cluster.nodes[0].device, cluster.nodes[2].device
    assert fast.flops["float32"] == 2 * DEVICES["CPU"].flops["float32"]
    assert fast.memory_bytes == DEVICES["CPU"].memory_bytes
    assert (own.memory_bytes, own.flops) == (80 << 30, {"bfloat16": 5e14})
    assert cluster.link(4, 5) == Link(1e11, pytest.approx(3e-6))
    assert cluster.link(0, 4) == Link(1.25e9, 1e-3)  # east to west
    assert cluster.link(0, 2) == cluster.link(4, 8) == Link(5e10, pytest.approx(2e-5))
    assert cluster.nodes[2].uplink == 25e9
    assert cluster.nodes[0].uplink is None  # the file says what network each device has
    assert cluster.nodes[3].uplink is None
    shared = parse_cluster(
        "devices: {fast: {like: CPU}, far: {like: H20}}\nnodes: [2x fast, 2x far]"
    )
    assert [node.uplink for node in shared.nodes] == [1.25e9, None]
    assert shared.link(0, 2).bandwidth == 1.25e9


def test_a_cluster_is_what_its_fields_say():
    for cluster in (parse_cluster(MINE), cluster_of_text("16x A100-80 + 96x V100/4")):
        fields = json.loads(json.dumps(cluster_to_fields(cluster)))
        assert cluster_of_fields(fields) == cluster
    assert len(cluster_to_fields(cluster_of_text("512x H20 + 512x H800"))["nodes"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nods: [8x H20]", r"nods: unknown key; did you mean 'nodes'\? allowed:"),
        ("cluster: 8x H20\nnodes: [8x H20]", "nodes: give either nodes"),
        ("nodes: []", "nodes: must hold at least one node"),
        ("nodes: [{count: 8}]", r"nodes\[0\].device: missing"),
        ("nodes: [{device: H20, count: 0}]", r"nodes\[0\].count: must be from 1 to 65536, got 0"),
        ("nodes: [{device: H20, cuont: 1}]", r"nodes\[0\].cuont: unknown key; did you mean 'count'"),
        ("nodes: [{device: H20, inside: fast}]", r"nodes\[0\].inside: must be a number with one of"),
        ("cluster: 8x H20\nnetwork: 5 GB", "network: must be a number with one of the units B/s"),
        ("cluster: 8x a\ndevices: {a: {like: H20, speed: fast}}", "devices.a.speed: must be a number, got 'fast'"),
        ("cluster: 8x H20\nnetwork: 0", "network: must be from 1 to"),
        ("cluster: 8x H20\nnetwork: -1", "network: must be from 1 to"),
        ("cluster: 8x H20\nlinks: [{between: [a, b], bandwidth: 1 GB/s}]", r"links\[0\].between: must be two of the zones and devices H20"),
        ("devices: {a: {like: b}}\ncluster: 8x a", r"devices.a.like: 'b' is unknown"),
        ("devices: {a: {memory: 1 GB}}\ncluster: 8x a", r"devices.a.flops: missing"),
        ("devices: {a: {flops: 1 TFLOPS}}\ncluster: 8x a", r"devices.a.memory: missing"),
        ("devices: {a: {like: H20, speed: fast}}\ncluster: 8x a", r"devices.a.speed: must be a number"),
        ("a: b: c", "cluster: the description of the cluster is not YAML: .* at line 1"),
        ("a: &x 1", "cluster: the description of the cluster: an anchor at line 1 is not read"),
        ("a: 1\na: 2", "cluster: the description of the cluster: the key 'a' stands twice"),
        ("{\"a\": NaN}", "cluster: NaN is not JSON"),
        ("[" * 5000, "cluster: the description of the cluster is nested deeper"),
        ("- " * 5000, "cluster: the description of the cluster is nested deeper"),
        ("", "cluster: must be an object"),
    ],
)  # fmt: skip
def test_a_wrong_description_names_its_field(text, message):
    with pytest.raises(PlannerError, match=f"^{message}"):
        parse_cluster(text)


def test_nvidia_smi_gives_the_links_and_the_user_the_kind(tmp_path):
    path = tmp_path / "topo.txt"
    path.write_text(TOPO)
    cluster = read_cluster(str(path), device="A100-80", num_nodes=2)
    assert [node.num_devices for node in cluster.nodes] == [4, 4]
    assert cluster.nodes[0].inside.bandwidth == 10e9  # SYS, the slowest inside
    with pytest.raises(
        PlannerError, match=r"^device: .* prints links but no kind of device; give one"
    ):
        read_cluster(str(path))
    path.write_text(TOPO.replace("SYS", "SUS"))
    with pytest.raises(
        PlannerError, match=r"^cluster: the link between GPU0 and GPU2 is 'SUS'; allowed"
    ):
        read_cluster(str(path), device="A100")


def test_slurm_that_is_too_large_is_refused_before_anything_is_made():
    for tasks in ("1(x1048576)", "65537", "32768(x2),1"):
        with pytest.raises(
            PlannerError, match=r"^SLURM_TASKS_PER_NODE: .* is more than 65536 ranks"
        ):
            cluster_of_slurm({"SLURM_TASKS_PER_NODE": tasks}, "H20")
        with pytest.raises(
            PlannerError, match=r"^SLURM_TASKS_PER_NODE: .* is more than 65536 ranks"
        ):
            cluster_of_slurm({"SLURM_TASKS_PER_NODE": tasks, "SLURM_GPUS_PER_NODE": "1"}, "H20")
    # A node of very many and very many nodes of one: cyclic order takes no longer than their ranks.
    cyclic = {"SLURM_TASKS_PER_NODE": "30000,1(x30000)", "SLURM_DISTRIBUTION": "cyclic"}
    with pytest.raises(PlannerError, match=r"^SLURM_DISTRIBUTION: cyclic deals"):
        cluster_of_slurm(cyclic, "H20")


def test_slurm_says_nodes_and_perhaps_devices():
    job = {"SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_PER_NODE": "h100:4"}
    assert [(n.device.name, n.num_devices) for n in cluster_of_slurm(job).nodes] == [
        ("H100", 4)
    ] * 3
    tasks = {"SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_NTASKS": "20"}
    assert [n.num_devices for n in cluster_of_slurm(tasks, "H20").nodes] == [8, 8, 4]
    for environ, message in (
        ({}, "the environment says nothing about nodes"),
        (tasks, "device: SLURM does not say the kind"),
        ({**job, "SLURM_GPUS_PER_NODE": "h100"}, "SLURM_GPUS_PER_NODE: must be a number such as 8"),
        ({**job, "SLURM_JOB_NUM_NODES": "-1"}, "SLURM_JOB_NUM_NODES: must be from 1"),
        ({**tasks, "SLURM_DISTRIBUTION": "cyclic"}, "SLURM_DISTRIBUTION: cyclic deals"),
        ({**tasks, "SLURM_NTASKS": "21"}, "SLURM_TASKS_PER_NODE: .* is 20 ranks"),
        ({"SLURM_GPUS_PER_NODE": "8"}, "SLURM_JOB_NUM_NODES: missing"),
    ):
        with pytest.raises(PlannerError, match=f"^{message}"):
            read_cluster("slurm", environ=environ)


def test_words_that_do_not_fit_a_source_are_refused(tmp_path):
    with pytest.raises(PlannerError, match=r"^nodes: 2 is for what `nvidia-smi topo -m` printed"):
        read_cluster("8x H20", num_nodes=2)
    with pytest.raises(PlannerError, match=r"^device: 'H20' is for SLURM"):
        read_cluster("8x H20", device="H20")
    with pytest.raises(PlannerError, match=r"^cluster: there is no file"):
        read_cluster(str(tmp_path / "none.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlannerError, match=r"^cluster: .* is no UTF-8 text"):
        read_cluster(str(tmp_path / "bytes.yaml"))


def test_this_machine_has_its_cores():
    cluster = this_machine()
    assert cluster.num_ranks >= 1
    assert all(node.device.memory_bytes > 1 << 20 for node in cluster.nodes)
    assert cluster_of_fields(cluster_to_fields(cluster)) == cluster
