"""Devices by name: datasheet numbers, each with its source.

Rates are dense operations per second (no sparsity), with accumulation in float32. A type that the hardware
does not have is left out: Volta and Turing know no bfloat16. Memory is what the driver reports where a source
says it, else the datasheet's. Links are one direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from hdtensor.errors import PlannerError
from hdtensor.planner.devices import Device


#: Network of desktop cards, 10 Gb/s Ethernet, which all cards of a machine share.
DESKTOP_NETWORK = 1.25e9

#: Network adapters of 100 to 400 Gb/s, one beside each of the other devices.
_NETWORKS = (("V100", 12.5e9), ("A100", 25e9), ("910B", 25e9), ("RTX", DESKTOP_NETWORK), ("Titan", DESKTOP_NETWORK),
             ("CPU", DESKTOP_NETWORK), ("", 50e9))  # fmt: skip

_GIB = 1 << 30
_MIB = 1 << 20
_PCIE3, _PCIE4 = 15.75e9, 31.5e9


def _device(
    name: str,
    memory_bytes: int,
    tflops: tuple[float, float, float],
    memory_bandwidth: float,
    link_bandwidth: float,
    source: str,
) -> Device:
    """Return a device from its rates for (bfloat16, float16, float32) in 10^12 per second; 0: none."""
    kinds = ("bfloat16", "float16", "float32")
    flops = {kind: rate * 1e12 for kind, rate in zip(kinds, tflops, strict=True) if rate}
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        flops=MappingProxyType(flops),
        memory_bandwidth=memory_bandwidth,
        link_bandwidth=link_bandwidth,
        source=source,
        network_bandwidth=next(rate for start, rate in _NETWORKS if name.startswith(start)),
    )


_TURING = "NVIDIA Turing GPU architecture whitepaper (WP-09183-001), appendix A"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture whitepaper (V2), table 9"
_HOPPER = "NVIDIA H100 Tensor Core GPU datasheet, SXM"
_HSPMD = "HSPMD paper, table 7"

_DEVICES = (
    _device(
        "RTX-2080",
        8 * _GIB,
        (0, 42.4, 10.6),
        448e9,
        _PCIE3,
        f"{_TURING}: RTX 2080 Founders Edition",
    ),
    _device(
        "RTX-2080Ti",
        11 * _GIB,
        (0, 56.9, 14.2),
        616e9,
        _PCIE3,
        f"{_TURING}: RTX 2080 Ti Founders Edition",
    ),
    _device("RTX-3080", 10 * _GIB, (59.5, 59.5, 29.8), 760e9, _PCIE4, f"{_AMPERE}: RTX 3080"),
    _device("RTX-3090", 24 * _GIB, (71.0, 71.0, 35.6), 936e9, _PCIE4, f"{_AMPERE}: RTX 3090"),
    _device(
        "RTX-4090",
        24 * _GIB,
        (165.2, 165.2, 82.6),
        1008e9,
        _PCIE4,
        "NVIDIA Ada GPU architecture whitepaper (V2.1), appendix A: RTX 4090",
    ),
    _device("Titan-RTX", 24 * _GIB, (0, 130.5, 16.3), 672e9, _PCIE3, f"{_TURING}: Titan RTX"),
    _device(
        "V100-16",
        16 * _GIB,
        (0, 125.0, 15.7),
        900e9,
        150e9,
        "NVIDIA V100 datasheet, SXM2: NVLink 300 GB/s both directions",
    ),
    _device(
        "V100-32",
        32 * _GIB,
        (0, 125.0, 15.7),
        900e9,
        150e9,
        "NVIDIA V100 datasheet, SXM2: NVLink 300 GB/s both directions",
    ),
    _device(
        "A100-40",
        40 * _GIB,
        (312.0, 312.0, 19.5),
        1555e9,
        300e9,
        "NVIDIA A100 Tensor Core GPU datasheet (1758950), SXM4 40 GB: NVLink 600 GB/s both directions",
    ),
    _device(
        "A100-80",
        80 * _GIB,
        (312.0, 312.0, 19.5),
        2039e9,
        300e9,
        "NVIDIA A100 Tensor Core GPU datasheet (1758950), SXM4 80 GB: NVLink 600 GB/s both directions",
    ),
    _device(
        "H20",
        97871 * _MIB,
        (148.0, 148.0, 44.0),
        4.0e12,
        450e9,
        f"{_HSPMD}: 97871 MB, 148 TFLOPS, NVLink 900 GB/s both directions; NVIDIA H20 datasheet",
    ),
    _device(
        "H800",
        81559 * _MIB,
        (990.0, 990.0, 67.0),
        3.35e12,
        200e9,
        f"{_HSPMD}: 81559 MB, 990 TFLOPS, NVLink 400 GB/s both directions; NVIDIA H800 datasheet, SXM",
    ),
    _device(
        "H100",
        81559 * _MIB,
        (989.4, 989.4, 66.9),
        3.35e12,
        450e9,
        f"{_HOPPER}: NVLink 900 GB/s both directions",
    ),
    _device(
        "H200",
        143771 * _MIB,
        (989.4, 989.4, 66.9),
        4.8e12,
        450e9,
        "NVIDIA H200 Tensor Core GPU datasheet, SXM: 141 GB, of which the driver reports 143771 MiB, NVLink 900 GB/s "
        "both directions",
    ),
    _device(
        "B200",
        183359 * _MIB,
        (2250.0, 2250.0, 75.0),
        7.7e12,
        900e9,
        "NVIDIA HGX B200 datasheet, an eighth of it: the driver reports 183359 MiB, NVLink 1800 GB/s both directions",
    ),
    _device(
        "GH200",
        97871 * _MIB,
        (989.4, 989.4, 66.9),
        4.0e12,
        450e9,
        "NVIDIA GH200 Grace Hopper Superchip datasheet, 96 GB HBM3, as H20: NVLink 900 GB/s both directions",
    ),
    _device(
        "MI300X",
        192 * _GIB,
        (1307.4, 1307.4, 163.4),
        5.3e12,
        448e9,
        "AMD Instinct MI300X datasheet: 192 GB, which rocm-smi reports as 206141652992 bytes, 7 Infinity Fabric links, "
        "896 GB/s both directions",
    ),
    _device(
        "910B",
        64 * _GIB,
        (313.0, 313.0, 75.0),
        1.6e12,
        196e9,
        "Huawei Atlas 800T A2 datasheet with Ascend 910B3, an eighth of it: HCCS 392 GB/s both directions",
    ),
    _device(
        "CPU",
        4 * _GIB,
        (96e-3, 96e-3, 96e-3),
        10e9,
        5e9,
        "one core with AVX2 at 3 GHz: 2 fused multiply-adds of 8 floats a cycle; low types are computed in "
        "float32. Memory and links are a share of a usual server's.",
    ),
)

#: Name -> device.
DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})

#: Other names. Where a name leaves the memory open, it is the smaller one.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "V100": "V100-16",
        "A100": "A100-40",
        "GH-96": "GH200",
        "GH200-96": "GH200",
        "Ascend-910B": "910B",
    }
)

#: What ``torch.cuda.get_device_name`` or a scheduler says, without marks -> the device. The first match wins.
_SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"a100.*80", "A100-80"),
    (r"a100", "A100-40"),
    (r"v100.*32", "V100-32"),
    (r"v100", "V100-16"),
    (r"2080 ?ti", "RTX-2080Ti"),
    (r"2080", "RTX-2080"),
    (r"3080", "RTX-3080"),
    (r"3090", "RTX-3090"),
    (r"4090", "RTX-4090"),
    (r"titan rtx", "Titan-RTX"),
    (r"gh200", "GH200"),
    (r"mi300x", "MI300X"),
    (r"910b", "910B"),
    (r"h800", "H800"),
    (r"h200", "H200"),
    (r"h100", "H100"),
    (r"h20", "H20"),
    (r"b200", "B200"),
)


def find_device(
    name: str, own: Mapping[str, Device] | None = None, field: str = "device"
) -> Device:
    """Return a device by its name, in any case, with or without marks between its parts.

    >>> find_device("rtx 3090").name, find_device("A100").name
    ('RTX-3090', 'A100-40')

    Args:
        name: Such as ``H800``.
        own: Devices of the user, which come before those of the library.
        field: What an error begins with.

    Raises:
        PlannerError: If there is none.
    """
    own = own or {}
    wanted = _plain(name)
    known: Iterable[Mapping[str, Device]] = (own, DEVICES)
    for devices in known:
        for key, device in devices.items():
            if _plain(key) == wanted:
                return device
    for alias, key in ALIASES.items():
        if _plain(alias) == wanted:
            return DEVICES[key]
    raise PlannerError(
        f"{field}: {name[:60]!r} is unknown; known are {', '.join([*own, *DEVICES])}. Describe another one "
        f"under devices in a cluster file."
    )


def recognize_device(text: str, field: str = "device") -> Device:
    """Return the device that a driver or a scheduler calls so.

    >>> recognize_device("NVIDIA A100-SXM4-80GB").name
    'A100-80'

    Args:
        text: Such as ``NVIDIA H100 80GB HBM3`` or ``gpu:h100``.
        field: What an error begins with.

    Raises:
        PlannerError: If the library has no such device.
    """
    plain = re.sub(r"[^a-z0-9]+", " ", text[:200].lower())
    for pattern, name in _SPELLINGS:
        if re.search(rf"(?<![a-z0-9]){pattern}(?![0-9])", plain):
            return DEVICES[name]
    return find_device(text, field=field)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())
