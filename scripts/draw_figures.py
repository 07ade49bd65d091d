"""Draw the pictures of the documentation from real specs, so that they cannot disagree with the code.

    python scripts/draw_figures.py

writes ``docs/figures/*.svg``. A test fails where a file there is not what this script draws.
"""

from collections.abc import Callable
from pathlib import Path

from torch.distributed.tensor import Replicate, Shard

from hdtensor.debug import canvas, transfer_svg
from hdtensor.debug.svg import legend, spec_block, subgroup_colours
from hdtensor.placements import HDSpec, Subgroup
from hdtensor.redistribute import resolve
from hdtensor.redistribute.topology import Topology


FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"


def two_tiers() -> str:
    """A matrix of 4 x 4: the top tier cuts rows 3:1, the bottom tier cuts one block by columns."""
    fast = Subgroup(ranks=(0, 1), placements=(Shard(1),))
    slow = Subgroup(ranks=(2,), placements=(Replicate(),))
    spec = HDSpec(subgroups=(fast, slow), top=Shard(0), top_ratio=(3, 1))
    top_only = spec.map_bottom(lambda placement: Replicate())
    colours = subgroup_colours([spec])
    frames = [
        spec_block(shown, (4, 4), colours=colours, title=title, dim_names=("rows", "columns"))
        for title, shown in (
            ("Top tier: one block per subgroup", top_only),
            ("Bottom tier: each cuts its own block", spec),
        )
    ]
    arrow = canvas.text(10, 170, "\N{RIGHTWARDS ARROW}", size=28, anchor="middle")
    frames.insert(1, canvas.Block(20, 200, (arrow,)))
    row = canvas.beside(frames, gap=24, max_width=900)
    return canvas.document(
        canvas.below([row, legend([spec], colours)], gap=14),
        description=f"A matrix cut in two tiers, {spec}",
    )


def bottom_steps() -> str:
    """Reduce-scatter, all-gather and all-reduce, each inside one subgroup (Fig. 8)."""
    plan = resolve("S0 / 0,1:P 2,3:S1 4,5:P", "S0 / 0,1:S1 2,3:R 4,5:R", (6, 4))
    return transfer_svg(plan, title="Bottom steps: each subgroup by itself")


def split_all_reduce() -> str:
    """SplitAllReduce: one all-reduce for each cell (Fig. 9)."""
    plan = resolve("P / 0,1:S1 2:R", "R / 0,1:S1 2:R", (4, 4))
    return transfer_svg(plan, title="A top step: one collective for each group of holders")


def both_tiers() -> str:
    """A reduce-scatter inside one subgroup, then SplitAllGather (Fig. 10)."""
    plan = resolve("S0 / 0,1:P 2:R", "R / 0,1:S1 2:R", (4, 4))
    return transfer_svg(plan, title="Bottom first, then the top")


def batched_send_receive() -> str:
    """Each rank gets its cells from the nearest owner that has sent least (Fig. 11)."""
    topology = Topology.of_nodes(8, 16)
    plan = resolve("S0 / 1,2:R 9:R", "R / 1,3-5:S0 8:R", (8, 4), topology=topology)
    return transfer_svg(plan, topology=topology, title="Batched send-receive on two nodes of eight")


FIGURES: dict[str, Callable[[], str]] = {
    "two_tiers.svg": two_tiers,
    "bottom_steps.svg": bottom_steps,
    "split_all_reduce.svg": split_all_reduce,
    "both_tiers.svg": both_tiers,
    "batched_send_receive.svg": batched_send_receive,
}


def main() -> None:
    """Write every figure."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(FOLDER.name + "/" + name)


if __name__ == "__main__":
    main()
