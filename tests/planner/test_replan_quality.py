"""Re-plans are about as good as plans from nothing, however many ranks are lost."""

from dataclasses import replace

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.models import find_model
from hdtensor.planner.replan import replan
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.search import search
from hdtensor.planner.space import make_space
from hdtensor.planner.workload import Workload


@pytest.fixture(scope="module")
def found():
    workload = Workload(batch=64, context=4096)
    costs = RooflineCosts(model=find_model("llama-32B"), workload=workload)
    return search(make_space(cluster_of_text("16x H800 + 32x H20"), costs, workload, 60))


@pytest.mark.parametrize("lost", [{12}, {7, 21, 38}, {16, 44}, {15, 19, 23, 29, 37, 47}], ids=str)
def test_a_replan_is_nearly_as_fast_as_a_plan_from_nothing(found, lost):
    """The last case leaves no node of eight devices of a kind, so that no table holds."""
    old = found.space
    left = set(range(48)) - lost
    fresh = search(
        make_space(old.cluster, old.costs, old.workload, old.num_layers, old.options, ranks=left)
    )
    again = replan(found, left)
    assert again.seconds <= fresh.seconds * 1.03
    used = {rank for lane in again.strategy.lanes for stage in lane.stages for rank in stage.ranks}
    assert used <= left
    # The tables that come with it serve the next loss.
    assert replan(again, left - {0}).seconds < again.seconds * 1.2


def test_a_result_without_tables_can_be_replanned(found):
    bare = replace(found, levels=())
    left = set(range(48)) - {3}
    again = replan(bare, left)
    assert again.seconds < found.seconds * 1.15
    assert again.levels


def test_nothing_left_is_an_error(found):
    for left in (set(), {48, 99}):
        with pytest.raises(
            PlannerError, match=r"^ranks: none of the cluster's ranks 0 to 47 is left"
        ):
            replan(found, left)
