"""Settings of every test process: one thread, no network, and a template process for gloo ranks."""

import os


# Before torch is imported: OpenMP reads it once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random

import hypothesis
import pytest
import torch

from tests.support import world


torch.set_num_threads(1)

# No deadlines and no speed checks: other processes share the cores. CI draws the same examples every
# time; elsewhere new ones are tried.
hypothesis.settings.register_profile(
    "hdtensor",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("hdtensor")


def pytest_configure(config):
    if config.getoption("dist", "no") == "no":  # with pytest-xdist its workers, not its controller
        world.start_template()


def pytest_collection_modifyitems(items):
    num_gpus = torch.cuda.device_count()
    for item in items:
        marks = [1 for _ in item.iter_markers("gpu")]
        marks += [mark.args[0] for mark in item.iter_markers("multi_gpu")]
        if marks and max(marks) > num_gpus:
            reason = f"needs {max(marks)} CUDA devices, this machine has {num_gpus}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        world.stop_pools()  # a failed test may have left messages or groups half made
    return report


@pytest.fixture(autouse=True)
def _seed():
    random.seed(0)
    torch.manual_seed(0)
