"""The kernel of the counter-based random numbers against their reference.

It is checked three times: in Triton's interpreter, by compiling every variant for a GPU that need
not be there (each in a process of its own that runs this file as a script), and on a GPU.
"""

import importlib
import itertools
import os
import subprocess
import sys

import pytest
import torch
from hdtensor.triton_kernels import counter_random
from hdtensor.triton_kernels.counter_random import reference


REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Each function with the dtypes it fills and its own arguments.
FILLS = [
    ("random_bits", torch.int64, ()),
    *(("fill_uniform_", dtype, (-0.3, 0.7)) for dtype in REALS),
    *(("fill_normal_", dtype, (1.0, 2.0)) for dtype in REALS),
    *(("fill_exponential_", dtype, (2.0,)) for dtype in REALS),
    ("fill_randint_", torch.uint8, (3, 200)),
    ("fill_randint_", torch.int32, (-7, 1_000_000)),
    ("fill_randint_", torch.int64, (-(2**63), 2**63)),
    ("fill_randint_", torch.int64, (-(2**62), 2**62 + 12345)),
    ("keep_mask", torch.bool, (0.9,)),
    ("keep_mask", torch.bool, (0.0,)),
    ("keep_mask", torch.bool, (1.0,)),
]
KEYS = (0, 1, 2**63 + 9, 2**64 - 1)
# Shape of the box, start, global strides. The last but one does not merge into four dims.
BOXES = [
    ((), (), ()),
    ((1500,), (2**62,), (1,)),
    ((40, 41), (3, 4), (100, 1)),
    ((2, 3, 2, 3, 2), (1, 0, 2, 1, 5), (10**9, 10**6, 10**4, 100, 3)),
    ((3, 0), (0, 0), (1, 1)),
]
# They may differ by the last bits of log and cos.
INEXACT = ("fill_normal_", "fill_exponential_")
TOLERANCES = {
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float32: 2e-6,
    torch.float64: 1e-14,
}


def check_kernel_equals_reference(device):
    """Compare the kernel with the reference for every function, dtype and box."""
    kernel = importlib.import_module(".kernel", counter_random.__name__)
    for (name, dtype, args), key, box in itertools.product(FILLS, KEYS[1:3], BOXES):
        shape, start, global_strides = box
        expected = torch.zeros(shape, dtype=dtype)
        getattr(reference, name)(expected, key, start, global_strides, *args)
        # A view with room around it, to see that only the view is written.
        memory = torch.zeros(3, *shape, 2, dtype=dtype, device=device)
        view = memory[1, ..., 1]
        getattr(kernel, name)(view, key, start, global_strides, *args)
        # The interpreter truncates to bfloat16.
        truncates = dtype == torch.bfloat16 and device == "cpu"
        tolerance = TOLERANCES[dtype] if name in INEXACT or truncates else 0
        torch.testing.assert_close(view.cpu(), expected, rtol=tolerance, atol=tolerance)
        view.zero_()
        assert not memory.any(), f"{name} wrote outside of its box {box}"


def check_kernel_compiles():
    """Send every function and dtype through the JIT, down to machine code, without a GPU."""
    kernel = importlib.import_module(".kernel", counter_random.__name__)
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
    kernel.counter_random_kernel = compiler = Compiler(kernel.counter_random_kernel)
    for name, dtype, args in FILLS:
        for key in KEYS:
            getattr(kernel, name)(torch.zeros(64, dtype=dtype), key, (3,), (1,), *args)
    strided = torch.zeros(2, 3, 4, 8, dtype=torch.float32)[..., ::2]
    kernel.fill_normal_(strided, 0, (0, 0, 0, 2**40), (2**60, 2**50, 2**45, 1), 0.0, 1.0)
    for compiled in compiler.compiled:
        assert "cubin" in compiled.asm
        # Uniform values are the reference's to the bit only if no product is fused with a sum;
        # the polynomials of log and cos are, and flush subnormals.
        assert "fma.rn.f32" not in compiled.asm["ptx"]
    # Neither a key nor an argument of the distribution makes another variant.
    num_variants = len({compiled.hash for compiled in compiler.compiled})
    assert num_variants == len({(name, dtype) for name, dtype, _ in FILLS}) + 1


CHECKS = {
    "interpret": lambda: check_kernel_equals_reference("cpu"),
    "compile": check_kernel_compiles,
}


@pytest.mark.parametrize("check", CHECKS)
def test_kernel_without_a_gpu(check, tmp_path):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    if check == "interpret":
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [sys.executable, "-W", "error", __file__, check],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.gpu
def test_kernel_equals_reference_on_gpu():
    check_kernel_equals_reference("cuda")


@pytest.mark.gpu
def test_the_package_fills_cuda_tensors_as_cpu_ones():
    for name, dtype, args in FILLS:
        fill = getattr(counter_random, name)
        filled = {
            device: fill(
                torch.zeros(70, 300, dtype=dtype, device=device), 5, (7, 2), (1000, 1), *args
            )
            for device in ("cpu", "cuda")
        }
        tolerance = TOLERANCES[dtype] if name in INEXACT else 0
        torch.testing.assert_close(
            filled["cuda"].cpu(), filled["cpu"], rtol=tolerance, atol=tolerance
        )
    orders = [
        counter_random.permutation(5, 1000, device=device).cpu() for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(orders[0], orders[1])


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
