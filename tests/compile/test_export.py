"""torch.export of one rank's program, with its local tensors, and what AOTInductor compiles of it for other processes."""

import functools
import io
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hdtensor as hd
from hdtensor.debug.graph_parts import kind_of
from tests.compile.capture import operators_of
from tests.compile.graph_programs import COLUMNS, INNER, ROWS, WHOLE, tensor
from tests.support.world import run_world


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(tensor((8, 12), COLUMNS).detach())
        self.down = nn.Parameter(tensor((12, 8), INNER).detach())

    def forward(self, x):
        return (F.gelu(x @ self.up) @ self.down).redistribute(ROWS)


def names_of(program):
    """Names of the operators that compute or communicate."""
    operators = [operator for operator, _ in operators_of(program.graph_module)]
    return [str(operator) for operator in operators if kind_of(operator) != "layout"]


def quiet(function):
    """Have torch's export copy its own tree specs, which warns of how they are made."""

    @functools.wraps(function)
    def call(*args):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)
            return function(*args)

    return call


def reloaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@quiet
def export_both(rank, strict):
    block, x = Block(), tensor((6, 8), ROWS).detach()
    expected = block(x).to_local()
    program = torch.export.export(block, (x,), strict=strict)
    whole = reloaded(program).module()(x)
    local = program.run_decompositions({})
    own = reloaded(local).module()(x.to_local())
    return names_of(program), names_of(local), str(whole.spec), (expected, whole.to_local(), own)


@pytest.mark.dist(4)
@pytest.mark.parametrize("strict", [False, True])
def test_a_program_is_exported_as_all_ranks_share_it_and_as_one_rank_runs_it(strict):
    ranks = run_world(export_both, 4, strict)
    shared = [
        "aten.matmul.default",
        "aten.gelu.default",
        "aten.matmul.default",
        "hdtensor.redistribute.default",
    ]
    assert [names for names, *_ in ranks] == [shared] * 4
    compute = ["aten.mm.default", "aten.gelu.default", "aten.mm.default"]
    reduced = [*compute, "hdtensor.split_all_reduce.default"]
    assert [names for _, names, *_ in ranks] == [reduced, reduced, compute, []], (
        "as each has a part"
    )
    for _, _, spec, (expected, whole, own) in ranks:
        assert spec == ROWS
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(own, expected)


def block_of(x, up, down):
    return (F.gelu(x @ up) @ down).redistribute(ROWS)


@quiet
def compile_ahead(rank, folder):
    """Compile a program on ranks 0 and 2; rank 1 loads what rank 0 compiled, since both run the same on other values."""
    args = [tensor((6, 8), ROWS), tensor((8, 12), COLUMNS), tensor((12, 8), INNER)]
    locals_ = tuple(x.to_local().clone() for x in args)
    expected = block_of(*args).to_local()
    path = f"{folder}/subgroup{args[0].spec.index_of(rank)}"
    if rank in (0, 2):
        program = torch.export.export(Program(), tuple(x.detach() for x in args))
        torch._inductor.aoti_compile_and_package(
            program.run_decompositions({}), package_path=f"{path}.pt2"
        )
        torch.save((locals_, expected), f"{path}.data")
    hd.prepare_groups(WHOLE)
    torch.distributed.barrier()
    if rank == 3:
        return expected, expected
    return expected, torch._inductor.aoti_load_package(f"{path}.pt2")(*locals_)


class Program(nn.Module):
    def forward(self, x, up, down):
        return block_of(x, up, down)


_ALONE = """
import sys, torch
args, expected = torch.load(sys.argv[1] + ".data")
with torch.no_grad():
    got = torch._inductor.aoti_load_package(sys.argv[1] + ".pt2")(*args)
torch.testing.assert_close(got, expected)
assert "hdtensor" not in sys.modules and not torch.distributed.is_initialized()
print("equal")
"""


@pytest.mark.dist(4)
def test_what_is_compiled_for_a_subgroup_loads_and_runs(tmp_path):
    """That of one rank in a process that knows nothing of hdtensor; that of two with a collective inside."""
    for expected, got in run_world(compile_ahead, 4, str(tmp_path), timeout=200):
        torch.testing.assert_close(got, expected)
    command = [sys.executable, "-c", _ALONE, str(tmp_path / "subgroup1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.stdout.strip(), done.returncode) == ("equal", 0), done.stderr
