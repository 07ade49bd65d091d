"""Plans that nobody chose train as one device does; ``python -m scripts.random_pipelines`` tries more of them."""

import pytest

from tests.pipeline.random_plans import check, draw
from tests.support.world import run_world


@pytest.mark.dist(6)
@pytest.mark.parametrize("world_size", [3, 4, 5, 6])
def test_random_plans_train_as_one_device(world_size):
    drawn = (draw(seed) for seed in range(100))
    cases = [case for case in drawn if case.world_size == world_size][:2]
    run_world(check, world_size, *cases)
