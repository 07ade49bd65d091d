"""torch's checkpoint planners and files, with all ranks played in one process."""

import warnings

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)

import hdtensor as hd
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.shard import shard_of
from hdtensor.tensor import HDTensor


def tensor_of(full, spec, rank, top_sizes=None, *, empty=False):
    """A rank's ``HDTensor`` of a whole tensor, or one of the same layout that holds minus ones."""
    with hd.as_rank(rank):
        spec = hd.HDSpec.from_text(spec) if isinstance(spec, str) else spec
        bound = BoundSpec.bind(spec, full.shape, None, full.dtype, top_sizes)
        local = shard_of(full, bound)
        return HDTensor(torch.full_like(local, -1) if empty else local, bound)


def save(folder, states):
    """Write what ``dcp.save`` does where rank r passes ``states[r]``; return each rank's final plan."""
    planners = [DefaultSavePlanner() for _ in states]
    writers = [FileSystemWriter(folder, sync_files=False) for _ in states]
    plans = []
    for rank, (planner, writer, state) in enumerate(zip(planners, writers, states, strict=True)):
        with hd.as_rank(rank):
            planner.set_up_planner(state, is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for rank, (planner, writer, plan) in enumerate(zip(planners, writers, plans, strict=True)):
        with hd.as_rank(rank):
            results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writers[0].finish(metadata, results)
    return plans


def load(folder, states):
    """Read what ``dcp.load`` does where rank r passes ``states[r]``; return how many items each rank read."""
    counts = []
    for rank, state in enumerate(states):
        with hd.as_rank(rank), warnings.catch_warnings():
            reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
            metadata = reader.read_metadata()
            planner.set_up_planner(state, metadata, is_coordinator=rank == 0)
            reader.set_up_storage_reader(metadata, rank == 0)
            plan = planner.create_local_plan()
            reader.read_data(planner.finish_plan(plan), planner).wait()
            counts.append(len(plan.items))
    return counts
