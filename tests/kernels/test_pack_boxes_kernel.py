"""The kernel that packs boxes against its reference.

It is checked three times: in Triton's interpreter, by compiling every variant for a GPU that need
not be there (each in a process of its own that runs this file as a script), and on a GPU.
"""

import dataclasses
import functools
import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from hdtensor.triton_kernels import pack_boxes
from hdtensor.triton_kernels.pack_boxes import reference, table

from tests.kernels.test_pack_boxes import (
    ADDABLE,
    DTYPES,
    Box,
    bits,
    box_lists,
    check_pack,
    check_unpack,
    random_tensor,
    same_bits,
)


ROOT = Path(__file__).resolve().parent.parent.parent
# More than one part, tile and program; wide and narrow words; 3 levels and dims beyond them.
BOXES = [
    Box(torch.complex128, (7, 9), ((0, 7, 1), (2, 9, 1)), (1, 0)),
    Box(torch.complex64, (5, 6), ((0, 5, 2), (1, 6, 1)), (0, 1)),
    Box(torch.float64, (40, 41), ((3, 40, 1), (1, 41, 1)), (1, 0)),
    Box(
        torch.int64,
        (3, 4, 5, 6, 7),
        ((0, 3, 1), *((1, n, 2) for n in (4, 5, 6, 7))),
        (3, 1, 0, 2, 4),
    ),
    Box(torch.float32),
    Box(torch.float32, (0, 4), ((0, 0, 1), (0, 4, 1)), (0, 1)),
    Box(torch.float32, (60, 512), ((0, 60, 1), (256, 512, 1)), (0, 1)),
    Box(torch.bfloat16, (30000,), ((1, 30000, 1),), (0,)),
    Box(torch.bfloat16, (50, 416), ((0, 50, 1), (0, 208, 1)), (0, 1)),
    Box(torch.float16, (3, 4, 64), ((0, 3, 1), (1, 3, 1), (0, 32, 1)), (1, 0, 2)),
    Box(torch.int8, (300, 420), ((0, 300, 1), (7, 420, 3)), (0, 1)),
    Box(torch.uint8, (2001,), ((1, 2001, 1),), (0,)),
    Box(torch.uint8, (2001,), ((1, 2001, 2),), (0,)),
]


@functools.cache
def kernel():
    return importlib.import_module(".kernel", pack_boxes.__name__)


def pack(pieces, out):
    """What the package does for CUDA tensors, also where there are none."""
    kernel().pack(pieces, pack_boxes._offsets(pieces, out), out)


def unpack(flat, pieces):
    kernel().unpack(flat, pack_boxes._offsets(pieces, flat), pieces)


def unpack_add(flat, pieces):
    kernel().unpack_add(flat, pack_boxes._offsets(pieces, flat), pieces)


def truncating_unpack_add(flat, pieces):
    """`reference.unpack_add` with bfloat16 cut off and not rounded, as in the interpreter."""
    start = 0
    for piece in pieces:
        stop = start + piece.nbytes
        if piece.numel():
            term = flat[start:stop].view(piece.dtype).view(piece.shape)
            total = piece.float() + term.float() if piece.dtype == torch.bfloat16 else None
            if total is None:
                piece.add_(term)
            else:
                upper = total.contiguous().view(torch.int32) >> 16
                piece.copy_(upper.to(torch.int16).view(torch.bfloat16))
        start = stop


def check_all_actions(device):
    rounded = truncating_unpack_add if device == "cpu" else reference.unpack_add
    mask = Box(torch.bool, (70, 9), ((0, 70, 1), (0, 9, 2)), (1, 0))
    check_pack(pack, [*BOXES, dataclasses.replace(mask, expanded=(2, 3))], device)
    check_unpack(unpack, reference.unpack, [*BOXES, mask], device)
    check_unpack(unpack_add, rounded, BOXES, device)


def check_random_boxes(device, num_examples):
    settings = hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    rounded = truncating_unpack_add if device == "cpu" else reference.unpack_add
    checks = [
        (box_lists(DTYPES, can_expand=True), lambda boxes: check_pack(pack, boxes, device)),
        (
            box_lists(DTYPES),
            lambda boxes: check_unpack(unpack, reference.unpack, boxes, device),
        ),
        (box_lists(ADDABLE), lambda boxes: check_unpack(unpack_add, rounded, boxes, device)),
    ]
    for boxes, check in checks:
        settings(hypothesis.given(boxes)(check))()


def check_offsets_beyond_32_bits(device):
    """Offsets in words in a piece, and in bytes in the message, that int32 does not hold."""
    row = 2**31 + 64
    # Memory that is not touched costs nothing on CPU.
    whole = torch.empty(2, row, dtype=torch.uint8, device=device)
    piece = whole[:, 3:8]
    values = torch.arange(1, 11, dtype=torch.uint8, device=device)
    unpack(values, [piece])
    same_bits(piece, values)
    out = torch.zeros_like(values)
    pack([piece], out)
    same_bits(out, values)
    unpack_add(values, [piece])
    same_bits(piece, 2 * values)
    flat = whole.view(-1)
    kernel().pack([values], [row + 16], flat)
    same_bits(flat[row + 16 : row + 26], values)
    copy = torch.zeros_like(values)
    kernel().unpack(flat, [row + 16], [copy])
    same_bits(copy, values)


def check_kept_tables(device):
    """A table that is kept is used again for the same addresses only, whatever they hold."""
    generator = torch.Generator().manual_seed(1)
    whole = random_tensor(torch.float32, (32, 48), generator, device)
    out = torch.zeros(32 * 24 * 4, dtype=torch.uint8, device=device)
    build = kernel()._table
    for view in (whole[:, :24], whole[:, :24], whole[:, 24:], whole.t()[:24], whole[:, :24]):
        whole += 1
        pack([view], out)
        same_bits(out, bits(view))
    info = build.cache_info()
    assert info.hits >= 2
    assert info.currsize <= info.maxsize < 1000


def check_several_tiles_a_program(device):
    """Programs that walk over many parts, and parts that many programs share."""
    generator = torch.Generator().manual_seed(2)
    sizes = [5, 40_000, 1, 3, 17, 30_000, 2, 1025, 1, 1]
    pieces = [random_tensor(torch.int8, (size, 2), generator, device)[:, 1] for size in sizes]
    expected = torch.cat([bits(piece) for piece in pieces])
    launch = kernel()
    chosen = launch._tiles_per_program
    for tiles in (1, 3, 16, 1000):
        launch._tiles_per_program = lambda num_tiles, device, tiles=tiles: tiles
        out = torch.full_like(expected, 255, device=device)
        pack(pieces, out)
        same_bits(out, expected)
    launch._tiles_per_program = chosen
    assert [chosen(num, torch.device("cpu")) for num in (1, 64, 10**6)] == [1, 2, 16]


def check_kernel_equals_reference(device, num_examples):
    check_all_actions(device)
    check_offsets_beyond_32_bits(device)
    check_kept_tables(device)
    check_several_tiles_a_program(device)
    check_random_boxes(device, num_examples)


def check_kernel_compiles():
    """Send every action through the JIT, down to machine code, without a GPU."""
    backends = importlib.import_module("triton.backends.compiler")
    runtime = importlib.import_module("triton.runtime")

    class Driver:
        def get_current_target(self):
            return backends.GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    class Compiler:
        def __init__(self, function):
            self.function = function
            self.compiled = []

        def __getitem__(self, grid):
            def compile_only(*args, **kwargs):
                self.compiled.append(self.function.warmup(*args, grid=grid, **kwargs))

            return compile_only

    runtime.driver.set_active(Driver())
    kernel().pack_boxes_kernel = compiler = Compiler(kernel().pack_boxes_kernel)
    actions = (
        lambda pieces, flat: pack(pieces, flat),
        lambda pieces, flat: unpack(flat, pieces),
        lambda pieces, flat: unpack_add(flat, pieces),
    )
    sides = (
        [torch.zeros(1)],
        [torch.zeros(16, 16)],
        [torch.zeros(1000, 30)[:, 3:11], torch.zeros(70, dtype=torch.bfloat16)],
    )
    for act, pieces in itertools.product(actions, sides):
        flat = torch.zeros(sum(piece.nbytes for piece in pieces), dtype=torch.uint8)
        act(pieces, flat)
    for compiled in compiler.compiled:
        ptx = compiled.asm["ptx"]
        assert "cubin" in compiled.asm
        # 16 bytes at a time on both sides, sums rounded to nearest and subnormals kept.
        for access in ("ld.global", "st.global"):
            assert f"{access}.v2.b64" in ptx or f"{access}.v4.b32" in ptx
        assert ".rz" not in ptx
        assert ".ftz" not in ptx
    # Neither numbers nor shapes nor dtypes make another variant.
    assert len({compiled.hash for compiled in compiler.compiled}) == len(actions)


CHECKS = {
    "interpret": lambda: check_kernel_equals_reference("cpu", 40),
    "compile": check_kernel_compiles,
}


@pytest.mark.parametrize("check", CHECKS)
def test_kernel_without_a_gpu(check, tmp_path):
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    if check == "interpret":
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [sys.executable, "-W", "error", __file__, check],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.gpu
def test_kernel_equals_reference_on_gpu():
    check_kernel_equals_reference("cuda", 100)


@pytest.mark.gpu
def test_bfloat16_sums_on_gpu_are_torchs_to_the_bit():
    a = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    a = a[a.isfinite()].cuda()
    for b in (a.flip(0), a.flip(0) * 0.37, a.roll(100)):
        got = a.clone()
        pack_boxes.unpack_add(b.clone().view(torch.uint8), [got])
        same_bits(got, a.clone().add_(b))


@pytest.mark.gpu
def test_the_package_packs_cuda_tensors_in_one_launch():
    pieces = [torch.randn(40, 50, device="cuda")[:, i : i + 8] for i in range(40)]
    flat = torch.zeros(40 * 40 * 8 * 4, dtype=torch.uint8, device="cuda")
    pack_boxes.pack(pieces, flat)  # compiles and loads
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pack_boxes.pack(pieces, flat)
        torch.cuda.synchronize()
    on_device = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    work = [name for name in on_device if "kernel" in name.lower() or "mem" in name.lower()]
    assert work == ["pack_boxes_kernel"]
    same_bits(flat, torch.cat([bits(piece) for piece in pieces]))


@pytest.mark.gpu
def test_a_capture_is_refused_on_gpu():
    piece, flat = torch.zeros(4, device="cuda"), torch.zeros(16, dtype=torch.uint8, device="cuda")
    pack_boxes.pack([piece], flat)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        piece.add_(1)
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
            pack_boxes.pack([piece], flat)


def test_a_tile_of_the_table_is_a_block_of_the_kernel():
    for size in (table.NARROW_TILE_WORDS, table.WIDE_COPY_TILE_BYTES, table.WIDE_ADD_TILE_BYTES):
        assert size & (size - 1) == 0


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
