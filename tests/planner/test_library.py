"""What the library says of devices follows from their chips: units, clocks, and widths of memory."""

import re

import pytest

from hdtensor.planner.library import DEVICES


# Device: float32 lanes; multiprocessors and fused multiply-adds of 16-bit matrices in each a clock, with sums in
# float32; GHz at which lanes and matrices are rated; bits of memory and Gb/s of each.
CHIPS = {
    "RTX-2080": (2944, 46, 256, 1.8, 1.8, 256, 14),
    "RTX-2080Ti": (4352, 68, 256, 1.635, 1.635, 352, 14),
    "Titan-RTX": (4608, 72, 512, 1.77, 1.77, 384, 14),
    "RTX-3080": (8704, 68, 256, 1.71, 1.71, 320, 19),
    "RTX-3090": (10496, 82, 256, 1.695, 1.695, 384, 19.5),
    "RTX-4090": (16384, 128, 256, 2.52, 2.52, 384, 21),
    "V100-16": (5120, 80, 512, 1.53, 1.53, 4096, 1.754),
    "V100-32": (5120, 80, 512, 1.53, 1.53, 4096, 1.754),
    "A100-40": (6912, 108, 1024, 1.41, 1.41, 5120, 2.43),
    "A100-80": (6912, 108, 1024, 1.41, 1.41, 5120, 3.186),
    "H100": (16896, 132, 2048, 1.98, 1.83, 5120, 5.24),
    "H800": (16896, 132, 2048, 1.98, 1.83, 5120, 5.24),
    "H200": (16896, 132, 2048, 1.98, 1.83, 6144, 6.25),
    "GH200": (16896, 132, 2048, 1.98, 1.83, 6144, 5.24),
    "MI300X": (304 * 128, 304, 1024, 2.1, 2.1, 8192, 5.2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHIPS)
def test_rates_are_units_times_clock_and_memory_is_width_times_clock(name):
    lanes, processors, products, clock, clock_of_matrices, bits, rate = CHIPS[name]
    device = DEVICES[name]
    assert device.flops["float32"] == pytest.approx(2 * lanes * clock * 1e9, rel=0.005)
    matrices = 2 * processors * products * clock_of_matrices * 1e9
    assert device.flops["float16"] == pytest.approx(matrices, rel=0.005)
    assert device.memory_bandwidth == pytest.approx(bits / 8 * rate * 1e9, rel=0.007)


def test_links_are_one_direction_of_what_sources_give_for_both():
    seen = 0
    for device in DEVICES.values():
        both = re.search(r"(\d+) GB/s both directions", device.source)
        if both:
            seen += 1
            assert device.link_bandwidth == int(both[1]) / 2 * 1e9, device.name
    assert seen == 12


def test_memory_is_what_the_driver_reports_where_a_source_says_it():
    """Makers' gigabytes are sometimes 10^9 and sometimes 2^30 bytes, and less is left for programs than is soldered."""
    for device in DEVICES.values():
        said = re.search(r"reports (?:as )?(\d+) (MiB|bytes)", device.source)
        if said:
            unit = {"MiB": 1 << 20, "bytes": 1}[said[2]]
            assert device.memory_bytes == pytest.approx(int(said[1]) * unit, rel=1e-3)
    assert DEVICES["H800"].memory_bytes == 81559 << 20  # the paper's table 7
    assert DEVICES["H20"].memory_bytes == 97871 << 20
    assert (DEVICES["H800"].flops["bfloat16"], DEVICES["H20"].flops["bfloat16"]) == (990e12, 148e12)
