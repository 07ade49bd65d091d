"""``executable_graph`` in one process: the paper's figure by hand, parts, whole models, many ranks, errors, pictures."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hdtensor as hd
from hdtensor.debug import executable_graph
from hdtensor.errors import DeductionError, SpecError
from tests.compile.graph_programs import (
    COLUMNS,
    INNER,
    PROGRAMS,
    ROWS,
    WHOLE,
    mlp,
    moves,
    several,
    tensor,
)
from tests.debug.documents import read
from tests.models.hf import batch, build, strategy


def lines(nodes):
    return [str(node) for node in nodes]


def test_the_text_of_a_graph():
    graph = executable_graph(mlp, *PROGRAMS[mlp](), rank=0)
    assert graph.text == str(graph)
    assert graph.text.splitlines() == [
        "rank 0, mlp: 8 operators, 0 communications (0 bytes put in)",
        "",
        "inputs",
        "  x: float32[4, 8]",
        "  w1: float32[8, 6]",
        "  w2: float32[6, 8]",
        "  tangent: float32[4, 8]",
        "",
        "forward",
        "  mm: float32[4, 6] = aten.mm(x, w1)",
        "  gelu: float32[4, 6] = aten.gelu(mm)",
        "  mm_1: float32[4, 8] = aten.mm(gelu, w2)",
        "",
        "backward",
        "  t: float32[6, 4] = aten.t(gelu)",
        "  mm_2: float32[6, 8] = aten.mm(t, tangent)",
        "  t_1: float32[8, 6] = aten.t(w2)",
        "  mm_3: float32[4, 6] = aten.mm(tangent, t_1)",
        "  gelu_backward: float32[4, 6] = aten.gelu_backward(mm_3, mm)",
        "  t_2: float32[8, 4] = aten.t(x)",
        "  mm_4: float32[8, 6] = aten.mm(t_2, gelu_backward)",
        "  t_3: float32[6, 8] = aten.t(w1)",
        "  mm_5: float32[4, 8] = aten.mm(gelu_backward, t_3)",
        "",
        "outputs",
        "  result: mm_1",
        "  grad of x: mm_5",
        "  grad of w1: mm_4",
        "  grad of w2: mm_2",
    ]


def figure_12(x, w):
    w = w.redistribute("R / 0,3:S0 1:R 2,4:R")
    y = F.gelu(x) @ w
    return y.redistribute("S0 / 0,3:S0 5,6:S0 2,4:S1")


def figure_12_graph(rank):
    x = tensor((12, 4, 6), "S0 / 0,3:S2 1:R 2,4:S1").detach()
    w = tensor((6, 6), "S1 / 0,3:S0 1:R 2,4:R").detach()
    return executable_graph(figure_12, x, w, rank=rank)


@pytest.mark.paper("Fig. 12, Sec. 6.2")
def test_figure_12():
    """GPUs 0 to 4 gather the weight (SplitAG); then 0 and 3 reduce-scatter, 1 sends to 5 and 6, 2 and 4 go on alone."""
    graphs = {rank: figure_12_graph(rank) for rank in range(8)}
    kinds = {
        rank: [node.transfer.kind for node in graph.communication] for rank, graph in graphs.items()
    }
    for rank in (0, 1, 2, 3, 4):
        assert set(kinds[rank][:1]) == {"all_gather"}, "Reshard (id=1) is SplitAG on each of them"
        computing = [n.op for n in graphs[rank].forward if n.kind == "compute"]
        assert computing[0] == "aten.gelu"
    for rank in (0, 3):
        assert kinds[rank][-1] == "reduce_scatter"
        assert graphs[rank].communication[-1].transfer.ranks == (0, 3)
        assert graphs[rank].communication[-1].phase == "forward"
    assert set(kinds[2]) == set(kinds[4]) == {"all_gather"}
    sent = graphs[1].communication[-1].transfer
    # The block is [4, 4, 6] of float32, cut in two along its first dim.
    assert (sent.kind, sent.ranks, sent.sent_bytes) == ("send_recv", (5, 6), (192, 192))
    for rank in (5, 6):
        (receive,) = graphs[rank].communication
        assert (receive.transfer.ranks, receive.transfer.received_bytes) == ((1,), (192,))
        assert receive.phase == "forward", (
            "it is the second Reshard, also where it is the first that happens"
        )
        assert not graphs[rank].pre
        assert all(node.kind != "compute" for node in graphs[rank].nodes)
    assert graphs[7].nodes == ()
    assert {n.phase for r in range(5) for n in graphs[r].communication if "gather" in n.op} == {
        "pre"
    }


def test_parameters_are_gathered_before_and_their_gradients_scattered_after():
    def step(x, w):
        return F.relu(x @ w.redistribute("R / 0,1:R")).sum()

    x, w = tensor((6, 8), "R / 0,1:S0").detach(), tensor((8, 4), "R / 0,1:S0")
    graph = executable_graph(step, x, w, rank=1)
    assert [(n.transfer.kind, n.phase) for n in graph.communication] == [
        ("all_gather", "pre"),
        ("reduce_scatter", "post"),
    ]
    assert [n.transfer.sent_bytes for n in graph.communication] == [(64,), (128,)]
    assert [n.op for n in graph.forward if n.kind == "compute"] == [
        "aten.mm",
        "aten.relu",
        "aten.sum",
    ]
    assert "aten.mm" in [n.op for n in graph.backward]


def test_several_results_and_a_rank_outside():
    graph = executable_graph(several, *PROGRAMS[several](), rank=2)
    assert [what for what, _ in graph.outputs] == ["result[0]", "result[1]", "grad of x"]
    outside = executable_graph(several, *PROGRAMS[several](), rank=3)
    assert outside.nodes == ()
    assert {name for _, name in outside.outputs} == {"no part here"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(tensor((8, 12), COLUMNS).detach())
        self.down = nn.Parameter(tensor((12, 8), INNER).detach())

    def forward(self, x):
        return F.gelu(x @ self.up) @ self.down


def test_modules_and_what_functions_refer_to_are_played_and_given_back():
    block, x = Block(), tensor((6, 8), ROWS).detach()
    block.up.grad = grad = torch.zeros_like(block.up)
    before = [(p._local_tensor, p._spec) for p in block.parameters()]

    def closed_over(x):
        return block(x)

    texts = [
        lines(executable_graph(fn, x, rank=2).forward)
        for fn in (block, closed_over, functools.partial(Block.forward, block), block.forward)
    ]
    assert texts[0][0] == "mm: float32[2, 12] = aten.mm(x, up)"
    assert all("float32[2, 12] = aten.mm(x, " in text[0] for text in texts)
    assert [(p._local_tensor, p._spec) for p in block.parameters()] == before
    assert block.up.grad is grad
    assert block.down.grad is None


def test_a_training_step_ends_with_the_optimizer():
    block, x = Block(), tensor((6, 8), ROWS).detach()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        block(x).pow(2).sum().redistribute(WHOLE).backward()
        for parameter in block.parameters():
            parameter.grad = parameter.grad.redistribute(parameter.spec)
        optimizer.step()

    values = [p.to_local().clone() for p in block.parameters()]
    for rank in (0, 2):
        graph = executable_graph(step, x, rank=rank)
        ops = [node.op for node in graph.post if node.kind == "compute"]
        assert ops.count("aten._foreach_add_") or ops.count("aten.add_"), ops
        assert {n.transfer.kind for n in graph.post if n.transfer} <= {"all_reduce", "send_recv"}
        assert any(n.transfer for n in graph.post)
        assert "aten.mm" in [node.op for node in graph.backward]
    assert executable_graph(step, x, rank=3).nodes == ()
    assert not optimizer.state
    assert all(
        torch.equal(p.to_local(), v) for p, v in zip(block.parameters(), values, strict=True)
    )


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    with hd.as_rank(0):
        model = build("llama")
        hd.parallelize(model, strategy(([0, 1], 5), ([2], 3)))
        return model, hd.distribute_batch(model, batch(0))


def test_a_whole_model(llama):
    model, inputs = llama

    def loss(inputs):
        return model(**inputs).loss

    graphs = [executable_graph(loss, inputs, rank=rank) for rank in range(4)]
    layers = [n for n in graphs[0].forward if n.module.startswith("model.layers.0")]
    assert [n.transfer.ranks for n in layers if n.transfer] == [(0, 1), (0, 1)], (
        "TP 2: two sums a layer"
    )
    assert not [n for n in graphs[2].forward if n.transfer and n.module.startswith("model.layers")]
    queries = [
        n.outputs[0].shape for n in graphs[0].forward if n.module.endswith("0.self_attn.q_proj")
    ]
    assert (5 * 12, 16) in queries
    assert {n.transfer.why for n in graphs[0].post if n.transfer} == {"gradients"}
    assert {n.transfer.why for n in graphs[2].post if n.transfer} == {"gradients"}
    # Only the empty results of another dtype than the inputs': one for the forward, and one for the backward.
    assert [node.op for node in graphs[3].nodes] == ["aten.new_empty"] * 2
    assert all(p.grad is None for p in model.parameters())
    assert {type(p._local_tensor) for p in model.parameters()} == {torch.Tensor}


def test_a_model_without_weights(llama):
    """On the meta device it communicates as one with weights, though attention runs as other operators there."""
    with hd.as_rank(0), torch.device("meta"):
        model = build("llama")
    with hd.as_rank(0):
        hd.parallelize(model, strategy(([0, 1], 5), ([2], 3)), device="meta")
        inputs = hd.distribute_batch(model, {key: x.to("meta") for key, x in batch(0).items()})

    graphs = [
        executable_graph(lambda model, inputs: model(**inputs).loss, *args, rank=2)
        for args in ((model, inputs), llama)
    ]
    sent = [[(n.transfer, n.phase) for n in graph.communication] for graph in graphs]
    assert sent[0] == sent[1]
    assert len(sent[0]) > 1
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_specs_of_a_thousand_ranks():
    spec = f"S0 / {' '.join(f'{4 * i}-{4 * i + 3}:S1' for i in range(256))}"
    x = torch.empty(512, 16, device="meta", requires_grad=True)
    w = torch.empty(16, 16, device="meta")
    with hd.as_rank(0):
        x = hd.distribute_tensor(x, spec, src_data_rank=None)
        w = hd.distribute_tensor(
            w, spec.replace("S0", "R", 1).replace("S1", "S0"), src_data_rank=None
        )
    whole = spec.replace("S1", "R")

    def program(x, w):
        return (x @ w).redistribute(whole)

    graph = executable_graph(program, x, w, rank=1023)
    (reduce,) = graph.communication
    assert (reduce.transfer.kind, reduce.transfer.ranks) == ("all_reduce", (1020, 1021, 1022, 1023))
    assert [n.outputs[0].shape for n in graph.forward if n.op == "aten.mm"] == [(2, 16)]
    assert executable_graph(program, x, w, rank=1024).nodes == ()


def test_what_was_compiled_is_seen_as_it_was():
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    args = PROGRAMS[mlp]()
    ran = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    graph = executable_graph(compiled, *args, rank=2)
    assert graph == executable_graph(mlp, *args, rank=2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == ran


@pytest.mark.parametrize("rank", [-1, 1.0, True, None, "0"])
def test_what_is_no_rank_is_refused(rank):
    with pytest.raises(SpecError, match="number of a rank"):
        executable_graph(moves, *PROGRAMS[moves](), rank=rank)


def test_a_program_that_breaks_says_of_which_rank():
    def unlike(x, y):
        return x + y

    x, y = tensor((6, 8), ROWS), tensor((6, 8), "S0 / 0,1:R 3:R")
    with pytest.raises(DeductionError) as caught:
        executable_graph(unlike, x, y, rank=2)
    assert caught.value.__notes__ == ["while the executable graph of rank 2 was made of unlike"]
    assert type(x._local_tensor) is torch.Tensor

    def reads(x):
        return x if hd.item(x.sum().redistribute(WHOLE)) > 0 else -x

    with pytest.raises(DeductionError, match=r"reads reads a value .* leaves item\(\)"):
        executable_graph(reads, x, rank=0)
    assert type(x._local_tensor) is torch.Tensor


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_picture_is_well_formed_and_names_every_operator(program, rank):
    graph = executable_graph(program, *PROGRAMS[program](), rank=rank)
    drawing = read(graph.svg)
    assert graph.heading in drawing.values
    rows = [value for value in drawing.values if " = " in value]
    assert len(rows) == len(graph)
    for row, node in zip(rows, graph.nodes, strict=True):
        assert row.startswith(node.name)
        assert node.op in row
    assert {
        value for value in drawing.values if value in ("pre", "forward", "backward", "post")
    } == {node.phase for node in graph.nodes}
    for rectangle in drawing.rectangles:
        assert 0 <= rectangle.x <= rectangle.x + rectangle.width <= drawing.width
        assert 0 <= rectangle.y <= rectangle.y + rectangle.height <= drawing.height
    assert all(x >= 0 and y >= 0 for line in drawing.lines for x, y in line)
    assert graph.svg == executable_graph(program, *PROGRAMS[program](), rank=rank).svg
