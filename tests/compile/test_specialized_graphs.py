"""What torch.compile captures on a rank is that rank's executable graph, and ``executable_graph`` knows it on any rank."""

import pytest
import torch

import hdtensor as hd
from hdtensor.debug.graph_parts import kind_of, name_of
from tests.compile.capture import captured, operators_of
from tests.compile.graph_programs import PROGRAMS, ROWS, WHOLE, mlp, tensor
from tests.support.world import run_world


MAKES_GROUPS = "hdtensor.make_groups"


def worked(operators):
    """Names and shapes of operators that compute or communicate; compilers write in-place ones otherwise."""
    return [
        (name_of(operator).rstrip("_"), shape)
        for operator, shape in operators
        if kind_of(operator) != "layout"
        and name_of(operator) not in (MAKES_GROUPS, "aten.slice_scatter")
    ]


def compile_all(rank):
    """Return the operators of the forward and backward of each program, and what each rank's graph is said to be."""
    found = {}
    for program, make in PROGRAMS.items():
        said = [
            [
                [
                    (node.op.rstrip("_"), node.outputs[0].shape)
                    for node in hd.debug.executable_graph(program, *make(), rank=r).nodes
                    if node.kind != "layout" and node.phase in phases
                ]
                for phases in (("pre", "forward"), ("backward", "post"))
            ]
            for r in range(4)
        ]
        graphs = captured(program, *make())
        names = [[name_of(operator) for operator, _ in operators_of(graph)] for graph in graphs]
        found[program.__name__] = said, [worked(operators_of(graph)) for graph in graphs], names
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_world(compile_all, 4)


@pytest.mark.dist(4)
def test_each_rank_captures_the_graph_that_any_rank_foretells(ranks):
    for name in ranks[0]:
        for rank in range(4):
            _, graphs, _ = ranks[rank][name]
            assert len(graphs) == 2, f"{name} has a forward and a backward"
            for teller in range(4):
                said = ranks[teller][name][0][rank]
                assert said == graphs, f"{name}: rank {teller} of rank {rank}"
    # What ranks hold differs: the graphs do too.
    assert ranks[0]["mlp"][1] != ranks[2]["mlp"][1]
    assert ("aten.mm", (4, 6)) in ranks[0]["mlp"][1][0]
    assert ("aten.mm", (2, 12)) in ranks[2]["mlp"][1][0]


@pytest.mark.dist(4)
def test_a_rank_outside_captures_nothing_but_what_all_ranks_do_together(ranks):
    for name, (_, _, graphs) in ranks[3].items():
        operators = {operator for graph in graphs for operator in graph}
        if name == "elsewhere":  # this program brings the tensor there
            assert "hdtensor.send_recv" in operators
        elif name == "drops":
            assert operators == {"hdtensor.draw_key"}, "each rank's generator goes on alike"
        else:
            assert operators <= {MAKES_GROUPS}, f"{name}: {operators}"


def redistribute_meta_first(rank):
    x = tensor((9, 5), ROWS).detach()
    empty = hd.HDTensor(x._local_tensor.to("meta"), x._spec)
    empty.redistribute(WHOLE)
    return x.redistribute(WHOLE).to_local()


@pytest.mark.dist(4)
def test_a_tensor_without_values_does_not_decide_how_others_move():
    whole = torch.randn(9, 5, generator=torch.Generator().manual_seed(14))
    for local in run_world(redistribute_meta_first, 4)[:3]:
        torch.testing.assert_close(local, whole)


def run_after_graph(rank):
    """Return gradients of a program whose graphs were asked for before anything ran."""
    args = PROGRAMS[mlp]()
    graphs = [str(hd.debug.executable_graph(mlp, *args, rank=r)) for r in range(4)]
    assert [a.grad for a in args] == [None, None, None]
    mlp(*args).redistribute(WHOLE).sum().backward()
    return graphs, [a.grad.redistribute(WHOLE).to_local() for a in args]


@pytest.mark.dist(4)
def test_asking_for_graphs_changes_nothing():
    ranks = run_world(run_after_graph, 4)
    assert all(graphs == ranks[0][0] for graphs, _ in ranks)
    whole = [
        torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()
        for shape in ((6, 8), (8, 12), (12, 8))
    ]
    mlp(*whole).sum().backward()
    for _, grads in ranks[:3]:
        for grad, expected in zip(grads, whole, strict=True):
            torch.testing.assert_close(grad, expected.grad)
