"""``Topology`` from what ``nvidia-smi topo -m`` prints."""

import pytest

from hdtensor.errors import TopologyError
from hdtensor.redistribute.topology import Topology
from tests.redistribute.test_topology import BRIDGED, H100, LEGEND, RTX4090


def test_eight_gpus_on_nvlink():
    topology = Topology.from_nvidia_smi(H100, 2)
    assert topology.nodes == (0,) * 8 + (1,) * 8
    assert topology.links == ("NV18", "network")
    assert topology.bytes_per_s == (450e9, 50e9)
    assert topology.link(0, 7) == 0
    assert topology.link(0, 8) == 1


def test_gpus_on_pcie_across_two_sockets():
    topology = Topology.from_nvidia_smi(RTX4090, network_bytes_per_s=12.5e9)
    assert topology.links == ("PHB", "SYS", "network")
    assert topology.bytes_per_s == (20e9, 10e9, 12.5e9)
    assert [topology.link(0, rank) for rank in range(1, 4)] == [0, 1, 1]
    assert topology.seconds_per_byte(1, 2) == pytest.approx((1 / 10e9, 1 / 10e9))


def test_bridges_across_sockets_rank_before_pcie():
    topology = Topology.from_nvidia_smi(BRIDGED)
    assert topology.links == ("NV12", "NV4", "PIX", "PXB", "NODE", "SYS", "network")
    assert topology.link(1, 3) == 0
    assert topology.link(0, 2) == 1
    assert topology.link(2, 3) == 2
    assert topology.link(0, 3) == 5


def test_one_gpu_has_no_links_inside():
    topology = Topology.from_nvidia_smi("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n", 3)
    assert topology.nodes == (0, 1, 2)
    assert topology.link(0, 1) == topology.network == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line of column names that begins with GPU0"),
        ("NVIDIA-SMI has failed because it couldn't communicate", "no line of column names"),
        (LEGEND, "no line of column names"),
        (RTX4090.partition("GPU2  ")[0] + "GPU2", "there is no line|the row of GPU"),
        ("\n".join(RTX4090.splitlines()[:4]), "the row of GPU3 is missing"),
        ("\n".join(RTX4090.splitlines()[:4]) + "\nGPU3 SYS", "the row of GPU3 .* fewer than 4"),
        (RTX4090.replace("PHB     SYS", "FAST    SYS", 1), "between GPU0 and GPU1 is 'FAST'"),
        (RTX4090.replace("PHB     SYS", "PIX     SYS", 1), "GPU0 to GPU1 is PIX, but .* is 'PHB'"),
        (RTX4090.replace(" X      PHB", "PHB     PHB", 1), "between GPU0 and GPU0 is 'PHB'"),
        (H100.replace("NV18", "NV0"), "between GPU0 and GPU1 is 'NV0'; allowed: X, NV#, PIX"),
    ],
)
def test_faulty_matrices_raise(text, message):
    with pytest.raises(TopologyError, match=message):
        Topology.from_nvidia_smi(text)


def test_bad_number_of_nodes():
    with pytest.raises(TopologyError, match="num_nodes: must be 1 to 1048576, got 0"):
        Topology.from_nvidia_smi(RTX4090, 0)
