"""Plain tensors beside ``HDTensor``s in compiled programs: as in eager ones, refused but inside of ``implicit_replication``."""

import pytest
import torch

import hdtensor as hd
from tests.compile.programs import BATCH
from tests.support.world import run_world


def _check(rank):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = hd.distribute_tensor(torch.randn(6, 8), BATCH)
    plain = torch.arange(8.0)

    def accepted(x):
        with hd.implicit_replication():
            y = x * plain
            with hd.implicit_replication():
                y = y + plain
            return y * plain

    compiled = torch.compile(accepted, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x).to_local(), accepted(x).to_local())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    with pytest.raises(Exception, match="implicit_replication"):
        torch.compile(lambda x: x * plain, fullgraph=True, backend="aot_eager")(x)
    with pytest.raises(hd.DeductionError, match="implicit_replication"):
        x * plain

    def fails(x):
        with hd.implicit_replication():
            return (x * plain).view(5, 5)

    with pytest.raises(Exception, match="view"):
        torch.compile(fails, fullgraph=True, backend="aot_eager")(x)
    with pytest.raises(hd.DeductionError, match="implicit_replication"):
        x * plain


@pytest.mark.dist(4)
def test_plain_operands_are_accepted_where_eager_programs_accept_them():
    run_world(_check, 4)
