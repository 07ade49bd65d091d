"""Files of torch's distributed checkpoints between HDTensors, DTensors and plain tensors, on ranks."""

import math
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hdtensor as hd
from hdtensor.placements import HDSpec, Subgroup
from hdtensor.tensor import HDTensor
from tests.redistribute.strategies import layouts, rank_sets, sample, shapes
from tests.support.world import run_world


def whole(shape, dtype=torch.float32):
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


FULL = {"a": whole((7, 6)), "b": whole((5,)), "scalar": whole(()) + 3, "empty": whole((0, 4))}
UNLIKE = {"a": "S0[3:1] / 0,1:S1 3:R", "b": "R / 2:R 0,1:S0", "scalar": "R / 3:R 1:R", "empty": "R / 2:R"}  # fmt: skip
OTHER = {"a": "S1 / 2:R 1,3:S0", "b": "S0 / 3:R 1:R", "scalar": "R / 0,2:R", "empty": "R / 1:R 0:R"}


def cut(specs, values=FULL):
    return {name: hd.distribute_tensor(values[name].clone(), specs[name]) for name in values}


def zeros():
    return {name: torch.full_like(value, -1) for name, value in FULL.items()}


def check(state):
    for name, value in state.items():
        found = value.full_tensor() if isinstance(value, HDTensor | DTensor) else value
        assert torch.equal(found, FULL[name]), name


def _kinds(rank, folder):
    mesh = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))

    def dtensors(values):
        return {
            "a": distribute_tensor(values["a"].clone(), mesh, [Shard(0)]),
            "b": distribute_tensor(values["b"].clone(), square, [Shard(0), Replicate()]),
            "scalar": distribute_tensor(values["scalar"].clone(), mesh, [Replicate()]),
            "empty": distribute_tensor(values["empty"].clone(), mesh, [Shard(1)]),
        }

    writers = {
        "hdtensor": lambda: cut(UNLIKE),
        "dtensor": lambda: dtensors(FULL),
        "plain": lambda: {name: value.clone() for name, value in FULL.items()},
    }
    readers = {
        "hdtensor": lambda: cut(OTHER, zeros()),
        "dtensor": lambda: dtensors(zeros()),
        "plain": zeros,
    }
    for source, write in writers.items():
        dcp.save(write(), checkpoint_id=f"{folder}/{source}")
        for read in readers.values():
            state = read()
            dcp.load(state, checkpoint_id=f"{folder}/{source}")
            check(state)


@pytest.mark.dist(4)
def test_each_kind_reads_what_each_kind_wrote(tmp_path):
    run_world(_kinds, 4, str(tmp_path))


def _forms(rank, folder):
    """Lists, dicts, planners' options, threads, parameters, several files, a load into meta tensors."""
    state = {"list": [cut(UNLIKE)["a"], 5], "nested": {"b": torch.nn.Parameter(cut(UNLIKE)["b"])}}
    target = {"list": [cut(OTHER, zeros())["a"], 0], "nested": {"b": cut(OTHER, zeros())["b"]}}
    writer = dcp.FileSystemWriter(folder + "/a", thread_count=2, single_file_per_rank=False)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True, enable_plan_caching=True)
    dcp.save(state, storage_writer=writer, planner=planner)
    dcp.load(target, checkpoint_id=folder + "/a")
    check({"a": target["list"][0], "b": target["nested"]["b"]})
    assert target["list"][1] == 5

    flat = cut(UNLIKE)
    dcp.save(flat, checkpoint_id=folder + "/b", planner=DefaultSavePlanner(flatten_state_dict=False))  # fmt: skip
    back = cut(OTHER, zeros())
    dcp.load(back, checkpoint_id=folder + "/b", planner=DefaultLoadPlanner(flatten_state_dict=False))  # fmt: skip
    check(back)

    meta = {"a": hd.distribute_tensor(torch.empty(7, 6, device="meta"), OTHER["a"])}
    with warnings.catch_warnings():  # torch calls what it deprecates
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(meta, checkpoint_id=folder + "/b")
    assert meta["a"].device.type == "cpu"
    check(meta)


@pytest.mark.dist(4)
def test_forms_of_state_dicts_and_planners(tmp_path):
    run_world(_forms, 4, str(tmp_path))


def _some_ranks(rank, folder):
    """A plain value of one rank, beside tensors of all; and a group of ranks that saves alone."""
    dcp.save({**cut(UNLIKE), f"rank{rank}": rank}, checkpoint_id=folder)
    state = {**cut(OTHER, zeros()), f"rank{(rank + 1) % 4}": None}
    dcp.load(state, checkpoint_id=folder)
    assert state.pop(f"rank{(rank + 1) % 4}") == (rank + 1) % 4
    check(state)
    missing = {**cut(OTHER, zeros()), "rank4": None, "rank5": None}
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .* rank4"):
        dcp.load(missing, checkpoint_id=folder)


@pytest.mark.dist(4)
def test_values_of_single_ranks(tmp_path):
    run_world(_some_ranks, 4, str(tmp_path))


def _refused(rank, folder):
    state = {"w": hd.distribute_tensor(torch.ones(4, 4), "P / 0:R 2:R")}
    with pytest.raises(dcp.api.CheckpointException, match=r"w, HDTensor.* has a reduction pending"):
        dcp.save(state, checkpoint_id=folder)
    dcp.save({"w": torch.ones(4, 4)}, checkpoint_id=folder)
    with pytest.raises(dcp.api.CheckpointException, match="has a reduction pending"):
        dcp.load(state, checkpoint_id=folder)


@pytest.mark.dist(4)
def test_pending_reductions_are_refused_on_every_rank(tmp_path):
    run_world(_refused, 4, str(tmp_path))


def _converted(rank, folder):
    dcp.save({"m": cut(UNLIKE)}, checkpoint_id=folder + "/dcp")
    if rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(folder + "/dcp", folder + "/file.pt")
            check(torch.load(folder + "/file.pt", weights_only=True)["m"])
            torch_save_to_dcp(folder + "/file.pt", folder + "/again")
    torch.distributed.barrier()
    state = {"m": cut(OTHER, zeros())}
    dcp.load(state, checkpoint_id=folder + "/again")
    check(state["m"])


@pytest.mark.dist(4)
def test_to_a_torch_file_and_back(tmp_path):
    run_world(_converted, 4, str(tmp_path))


def _cut_as(layout, full):
    groups = [Subgroup(g.ranks, g.placements, g.mesh_shape) for g in layout.spec.subgroups]
    spec = HDSpec(groups, layout.spec.top, layout.spec.top_ratio)
    return hd.distribute_tensor(full, spec, top_sizes=layout.top_sizes, src_data_rank=None)


def _random(rank, folder, pairs):
    """All pairs in one checkpoint: each is a name."""
    sources, targets = {}, {}
    for number, (src, dst) in enumerate(pairs):
        full = whole(src.shape, torch.int64)
        sources[f"t{number}"] = _cut_as(src, full)
        targets[f"t{number}"] = _cut_as(dst, torch.full_like(full, -1))
    future = dcp.async_save(sources, checkpoint_id=folder)
    future.result()
    dcp.load(targets, checkpoint_id=folder)
    for number, (_, dst) in enumerate(pairs):
        expected = _cut_as(dst, whole(dst.shape, torch.int64))
        assert torch.equal(targets[f"t{number}"]._local_tensor, expected._local_tensor), dst


@st.composite
def pairs_of_layouts(draw):
    shape = draw(shapes())
    both = [layouts(shape, draw(rank_sets(4))) for _ in range(2)]
    return tuple(draw(one.filter(lambda at: not at.spec.has_partial())) for one in both)


@pytest.mark.dist(4)
def test_random_layouts(tmp_path):
    run_world(_random, 4, str(tmp_path), sample(pairs_of_layouts(), 40))
