"""A switch of a model with its Adam states, beside saving and loading a checkpoint, and beside bare messages."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import wall
from report import Row
from settings import Settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hdtensor as hd
from hdtensor.elastic import SwitchOptions


#: A stack of square matrices: 16 x 1024 x 1024 float32, with two Adam states 192 MiB, and an embedding.
NUM_LAYERS, WIDTH, VOCABULARY = 16, 1024, 8192
#: Two pairs of ranks, of which the second goes on with one: the case of Table 4, made small.
BEFORE = "R / 0,1:S0 2,3:S0"
AFTER = "R / 0,1:S0 2:R"


class Stack(nn.Module):
    """An embedding and square linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))


def make_state() -> dict[str, hd.HDTensor]:
    """Return weights and both Adam states, cut as before the switch."""
    torch.manual_seed(0)
    state = {}
    for name, parameter in Stack().named_parameters():
        for kind in ("", ":exp_avg", ":exp_avg_sq"):
            full = parameter.detach() + len(kind)
            state[name + kind] = hd.distribute_tensor(full, BEFORE, src_data_rank=None)
    return state


def measure(settings: Settings) -> list[Row]:
    """Run on 4 ranks."""
    state = make_state()
    num_bytes = sum(tensor.numel() * 4 for tensor in state.values())
    there, back = dict.fromkeys(state, AFTER), dict.fromkeys(state, BEFORE)
    plan = hd.plan_switch(back, there, dict(state))
    folder = [tempfile.mkdtemp(prefix="bench_switch_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    names = ("switch", "rounds", "checkpoint", "messages", "warm messages")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    rounds = SwitchOptions(atomic=False, budget_bytes=64 * 2**20)
    turns: dict[str, Callable[[], object]] = {
        "switch": lambda: hd.switch_tensors(state, there),
        "rounds": lambda: hd.switch_tensors(state, there, options=rounds),
        "checkpoint": lambda: _checkpoint(folder[0]),
        "messages": _bare_messages(plan, is_warm=False),
        "warm messages": _bare_messages(plan, is_warm=True),
    }
    for turn in range(settings.scaled(7) + 1):
        for name, run in turns.items():
            if name == "checkpoint" and turn and turn % 2 == 0:  # it takes long
                continue
            taken = _slowest(run)
            if name in ("switch", "rounds"):
                hd.switch_tensors(state, back)
            if turn:  # the first turn warms up
                seconds[name].append(taken)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])  # type: ignore[arg-type]
    return _rows(seconds, num_bytes, plan.num_bytes)


def measure_memory(settings: Settings) -> list[Row]:
    """Return the most memory that a switch in rounds takes beside the state, over its budget.

    Tensors of the CPU are counted as they are made and freed. Run on 4 ranks.
    """
    state = make_state()
    there, back = dict.fromkeys(state, AFTER), dict.fromkeys(state, BEFORE)
    rows = []
    for budget in (48, 128):
        options = SwitchOptions(atomic=False, budget_bytes=budget * 2**20)
        hd.switch_tensors(state, there, options=options)
        hd.switch_tensors(state, back, options=options)
        held = sum(t.to_local().untyped_storage().nbytes() for t in state.values())
        with PeakStorage(t.to_local() for t in state.values()) as storage:
            hd.switch_tensors(state, there, options=options)
        after = sum(t.to_local().untyped_storage().nbytes() for t in state.values())
        extra = storage.peak - max(0, after - held)
        most = torch.tensor([extra], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        hd.switch_tensors(state, back, options=options)
        rows.append(
            Row(
                section="Memory of a switch in rounds",
                name=f"budget {budget} MiB",
                figure="peak extra memory / budget",
                value=most.item() / (budget * 2**20),
                goal=1.1,
            )
        )
    return rows


class PeakStorage(TorchDispatchMode):
    """The most bytes that storages held above those of the start, as they are made and freed."""

    def __init__(self, old: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in old:
            self._note(tensor.untyped_storage())
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
                self._note(value.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.alive.pop(key)


def _rows(seconds: dict[str, list[float]], num_bytes: int, moved: int) -> list[Row]:
    section = "Switch of a model and its Adam states, 4 to 3 ranks"
    middle = {name: wall.middle(values) for name, values in seconds.items()}
    what = f"{num_bytes / 2**20:.0f} MiB, of which {moved / 2**20:.0f} MiB move"
    return [
        Row(
            section=section,
            name=f"atomic switch, {what}",
            figure="switch / DCP save and load",
            value=middle["switch"] / middle["checkpoint"],
            goal=0.1,
            plain_us=middle["checkpoint"] * 1e6,
            hdtensor_us=middle["switch"] * 1e6,
        ),
        *(
            Row(
                section=section,
                name=f"{name}, {what}",
                figure=f"switch / bare isend and irecv of the moved bytes into {into}",
                value=middle[key] / middle[beside],
                goal=goal,
                plain_us=middle[beside] * 1e6,
                hdtensor_us=middle[key] * 1e6,
            )
            for key, name in (("switch", "atomic switch"), ("rounds", "in rounds of 64 MiB"))
            for beside, into, goal in (
                ("messages", "new buffers", 1.3),
                ("warm messages", "buffers used before", None),
            )
        ),
    ]


def _slowest(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def _bare_messages(plan: Any, *, is_warm: bool) -> Callable[[], None]:
    """Return the bytes between each pair of ranks, in one message from and into contiguous buffers.

    A switch needs new memory for what it receives, which costs a page fault at the first touch of each page;
    ``is_warm`` receives into the same buffers each time.
    """
    rank = dist.get_rank()
    sizes: dict[tuple[int, int], int] = {}
    for index in range(len(plan.items)):
        for box, hops in plan.routes(index):
            if len(hops) == 2:
                sizes[hops] = sizes.get(hops, 0) + box.numel
    sent = {dst: torch.zeros(n) for (src, dst), n in sizes.items() if src == rank}
    expected = {src: n for (src, dst), n in sizes.items() if dst == rank}
    kept = {src: torch.zeros(n) for src, n in expected.items() if is_warm}

    def run() -> None:
        received = kept if is_warm else {src: torch.empty(n) for src, n in expected.items()}
        works = [dist.irecv(buffer, src) for src, buffer in received.items()]
        works += [dist.isend(buffer, dst) for dst, buffer in sent.items()]
        for work in works:
            work.wait()

    return run


_groups: dict[str, Any] = {}


def _checkpoint(folder: str | None) -> None:
    """Save the same bytes from four ranks, and load them into the cut of three: torch's own way."""
    if not _groups:
        _groups["before"] = DeviceMesh("cpu", list(range(4)))
        _groups["after"] = DeviceMesh("cpu", list(range(3)))
    rows = {"embedding": VOCABULARY, **{f"layer{i}": WIDTH for i in range(NUM_LAYERS)}}
    kinds = ("", ":exp_avg", ":exp_avg_sq")

    def state(mesh: DeviceMesh) -> dict[str, DTensor]:
        out = {}
        for name, length in rows.items():
            for kind in kinds:
                size, rank = mesh.size(), dist.get_rank()
                mine = -(-length // size)
                num = max(0, min(mine, length - rank * mine)) if rank < size else 0
                local = torch.zeros(num, WIDTH)
                out[name + kind] = DTensor.from_local(
                    local,
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=torch.Size((length, WIDTH)),
                    stride=(WIDTH, 1),
                )
        return out

    dcp.save(state(_groups["before"]), checkpoint_id=folder)
    group = _groups.setdefault("group", dist.new_group([0, 1, 2]))
    if dist.get_rank() < 3:
        dcp.load(state(_groups["after"]), checkpoint_id=folder, process_group=group)
    dist.barrier()
