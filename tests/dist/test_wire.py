"""Ranks on unlike devices: bytes are staged through host memory, or one error says why they cannot be."""

import pytest
import torch

import hdtensor as hd
from hdtensor.collectives import groups, p2p, wire
from hdtensor.errors import GroupError
from hdtensor.redistribute import jobs
from tests.support.world import run_world


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
BOTH = {"cpu": "gloo", "cuda": "nccl"}
X = torch.arange(48.0).reshape(8, 6)
PAIRS = [
    ("R / 0,1:S0", "R / 2:R"),
    ("P / 0:R 1:R", "R / 2:R"),
    ("P / 0,1:S1 2:R", "R / 0,1:S1 2:R"),
    ("S0 / 0:R 1,2:S1", "R / 0-2:R"),
    ("R / 0-2:P", "R / 0-2:S0"),
    ("R / 0-2:S0", "R / 0-2:S1"),
]


@pytest.mark.parametrize(
    ("backends", "kinds", "device", "ranks", "expected"),
    [
        (BOTH, ("cuda", "cuda", "cpu"), CUDA, (0, 1), CUDA),
        (BOTH, ("cuda", "cuda", "cpu"), CUDA, (0, 2), CPU),  # a CUDA rank beside a CPU one
        (BOTH, ("cuda", "cuda", "cpu"), CPU, (0, 1), CPU),
        ({"cpu": "gloo", "cuda": "gloo"}, ("cuda", "cuda"), CUDA, (0, 1), CPU),
        (BOTH, ("cuda", "npu"), CUDA, (0, 1), CPU),  # two vendors
        (BOTH, ("cuda", "npu"), torch.device("npu") if hasattr(torch, "npu") else CPU, (0, 1), CPU),
    ],
)
def test_which_device_the_bytes_leave_from(monkeypatch, backends, kinds, device, ranks, expected):
    monkeypatch.setattr(wire, "backends", lambda: backends)
    monkeypatch.setattr(wire, "accelerators", lambda: kinds)
    assert wire.wire_device(device, ranks) == expected


def test_without_a_host_backend_one_error_names_the_devices(monkeypatch):
    monkeypatch.setattr(wire, "backends", lambda: {"cuda": "nccl"})
    monkeypatch.setattr(wire, "accelerators", lambda: ("cuda", "cpu"))
    with pytest.raises(GroupError, match=r"rank 0: cuda, rank 1: cpu.*'cpu:gloo,cuda:nccl'"):
        wire.wire_device(CUDA, (0, 1))
    with pytest.raises(GroupError, match="a tensor on the CPU cannot be sent"):
        wire.wire_device(CPU, (0, 1))


def _check_staged(rank):
    """Rank 0 takes its tensors for those of another device: all that it sends is copied first."""
    if rank == 0:
        for module in (p2p, jobs):
            module.is_on_host = lambda device: False
            module.wire_device = lambda device, ranks: torch.device("cpu", 0)
    groups.ensure_groups([])
    groups._current.accelerators = ("cuda", "cpu", "cpu")
    try:
        for src, dst in PAIRS:
            x = hd.distribute_tensor(X, src).requires_grad_()
            y = x.redistribute(dst)
            assert torch.equal(y.full_tensor(), X), (src, dst)
            y.backward(hd.distribute_tensor(X, dst))
            assert torch.equal(x.grad.full_tensor(), X), (src, dst)
    finally:
        groups._current.accelerators = ("cpu",) * 3
        if rank == 0:
            for module in (p2p, jobs):
                module.is_on_host, module.wire_device = wire.is_on_host, wire.wire_device


@pytest.mark.dist(3)
def test_staged_bytes_are_the_same():
    run_world(_check_staged, 3)


def _check_mixed(rank):
    device = torch.device("cuda", 0) if rank == 0 else torch.device("cpu")
    for src, dst in PAIRS:
        local = hd.distribute_tensor(X, src).to_local().to(device)
        x = hd.from_local(local, src, shape=X.shape)
        y = x.redistribute(dst)
        assert y.to_local().device == device
        want = hd.distribute_tensor(X, dst).to_local()
        assert torch.equal(y.to_local().cpu(), want), (src, dst)


@pytest.mark.gpu
@pytest.mark.dist(3)
def test_a_cuda_rank_beside_cpu_ranks():
    run_world(_check_mixed, 3)
