"""``python -m hdtensor explain``: what it prints, and one line for whatever is wrong."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from hdtensor import cli
from hdtensor.redistribute import explain, resolve
from hdtensor.redistribute.topology import Topology
from tests.debug.documents import read


SRC, DST = "S0 / 0-3:S1 4,5:R", "R / 2,3:S0 6:R"
PAIR = ["explain", "--src", SRC, "--dst", DST]


def run(capsys, *arguments):
    """Return (exit code, stdout, stderr)."""
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    return code, out, err


def test_it_prints_what_explain_says(capsys):
    code, out, err = run(capsys, *PAIR, "--shape", "16,8")
    assert (code, err) == (0, "")
    assert out == explain(SRC, DST, (16, 8)) + "\n"
    assert not dist.is_initialized()


def test_dtype_and_nodes(capsys):
    topology = Topology.of_nodes(4, 7)
    _, out, _ = run(capsys, *PAIR, "--shape", "16, 8", "--dtype", "bf16", "--ranks-per-node", "4")
    assert out == explain(SRC, DST, (16, 8), dtype=torch.bfloat16, topology=topology) + "\n"
    assert "as bfloat16: 224 bytes over nvlink, 256 bytes over ib" in out


def test_a_topology_from_a_file(capsys, tmp_path):
    topology = Topology.of_nodes([3, 4], links=("bus", "wire"), bytes_per_s=(1e9, 1e6))
    topology.save(tmp_path / "t.json")
    _, out, _ = run(capsys, *PAIR, "--shape", "16,8", "--topology", str(tmp_path / "t.json"))
    assert out == explain(SRC, DST, (16, 8), topology=topology) + "\n"
    assert "over wire" in out


def test_exact_extents(capsys):
    sizes = ["--src-top-sizes", "10,6", "--dst-top-sizes", "0,16"]
    pair = ["--src", "S0 / 0:R 1:R", "--dst", "S0 / 1:R 2:R", "--shape", "16"]
    _, out, _ = run(capsys, "explain", *pair, *sizes)
    plan = resolve(pair[1], pair[3], (16,), src_top_sizes=(10, 6), dst_top_sizes=(0, 16))
    assert out == explain(plan) + "\n"


def test_a_tensor_without_dims(capsys):
    code, out, _ = run(
        capsys, "explain", "--src", "R / 0:R", "--dst", "R / 1:R", "--shape", "", "--dtype", "bool"
    )
    assert code == 0
    assert "0 -> 1: [], 1 byte over any" in out


def test_a_picture(capsys, tmp_path):
    path = tmp_path / "new" / "plan.svg"
    code, out, _ = run(capsys, *PAIR, "--shape", "16,8", "--svg", str(path))
    assert code == 0
    assert out.startswith(SRC)
    assert f"{SRC} -> {DST}" in read(path.read_text()).values


def test_help_names_the_commands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "explain" in out
    code, out, _ = run(capsys, "explain", "--help")
    assert code == 0
    assert "hdtensor explain --src" in out


GOOD = {"--src": SRC, "--dst": DST, "--shape": "16,8"}
WRONG = [
    ({"--src": "S0 / 0-3:S1 4,5"}, "4,5"),
    ({"--src": "Q / 0:R"}, "Q"),
    ({"--dst": "R / 0,0:R"}, "repeat"),
    ({"--shape": "16"}, "dim"),
    ({"--shape": "16,x"}, "'16,x' is not a list of numbers"),
    ({"--shape": "16,-8"}, "is not a list of numbers"),
    ({"--shape": "16,٣"}, "is not a list of numbers"),
    ({"--shape": None}, "--shape"),
    ({"--dtype": "float33"}, "'float33' is not a dtype"),
    ({"--dtype": "nn"}, "'nn' is not a dtype"),
    ({"--src-top-sizes": "10,7"}, "17"),
    ({"--src-top-sizes": "10"}, "10"),
    ({"--ranks-per-node": "0"}, "'0' is not a positive number"),
    ({"--ranks-per-node": "4", "--topology": "t.json"}, "not allowed with"),
    ({"--topology": "no/such/file.json"}, "no/such/file.json"),
    ({"--topology": __file__}, "is not JSON"),
    ({"--src": "P(avg) / 0:R 1:R", "--dst": "R / 2:R", "--dtype": "int64"}, "torch.int64"),
    ({"--svg": "/dev/null/plan.svg"}, "/dev/null"),
    ({"--nodes": "3"}, "--nodes"),
]


@pytest.mark.parametrize(("changed", "named"), WRONG, ids=lambda value: str(value)[:40])
def test_errors_are_one_line_and_code_2(capsys, changed, named):
    options = {name: value for name, value in (GOOD | changed).items() if value is not None}
    code, out, err = run(capsys, "explain", *(part for pair in options.items() for part in pair))
    assert (code, out) == (2, "")
    assert err.startswith("hdtensor explain: error: ") or changed == {"--nodes": "3"}
    assert err.count("\n") == 1
    assert named in err
    assert "Traceback" not in err


def test_a_topology_that_lacks_ranks(capsys, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(Topology.of_nodes(2, 4).to_dict()))
    code, _, err = run(capsys, *PAIR, "--shape", "16,8", "--topology", str(path))
    assert code == 2
    assert "ranks 0 to 3" in err


@pytest.mark.parametrize("arguments", [[], ["no-such-command"]])
def test_no_command(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "command" in err


@pytest.mark.slow
def test_as_a_program():
    command = [sys.executable, "-m", "hdtensor", *PAIR, "--shape", "16,8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == explain(SRC, DST, (16, 8)) + "\n"


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "hdtensor", *PAIR, "--shape", "16,8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.close()
        assert program.stderr.read() == b""
        assert program.wait(timeout=100) == 1
