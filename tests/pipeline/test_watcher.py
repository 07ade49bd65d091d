"""Watchers of a runner's steps end with their runner, and do not abort a program that ends while they look."""

from __future__ import annotations

import subprocess
import sys

import pytest


_PROGRAM = """
import gc, os, threading, time
import torch.distributed as dist
from hdtensor.pipeline.runtime import failure

failure.WATCH_SECONDS = 0.0
store = dist.HashStore()
dist.init_process_group("gloo", rank=0, world_size=1, store=store)

def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "hdtensor-watch"]

guards = [failure.FailureGuard((0,)) for _ in range(8)]
with guards[0].step(lambda: None):
    time.sleep(0.1)  # it looks, and there is nothing to see
assert len(watchers()) == 8
kept = watchers()
while len(guards) > 7:
    guards.pop()
gc.collect()
end = time.monotonic() + 20
while len(watchers()) > 7 and time.monotonic() < end:
    time.sleep(0.01)
print(len(watchers()))
for guard in guards:
    guard._running.set()  # as in a step: all look at the store while the interpreter ends
time.sleep(0.2)
"""


@pytest.mark.slow
def test_a_program_ends_well_while_watchers_look(tmp_path):
    (tmp_path / "program.py").write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout, done.stderr[-2000:]) == (0, "7\n", "")
