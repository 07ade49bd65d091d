"""What a step may be called with: whole batches, lists for each lane, one rank that loads. One device is the oracle."""

import pytest
import torch

import hdtensor as hd
from hdtensor.errors import DisagreementError, PlanError
from hdtensor.pipeline import Runner
from tests.pipeline import tiny
from tests.support.world import run_world


def _cut(whole, sizes):
    """Return a batch as micro-batches of these numbers of rows."""
    pieces = {name: t.split(sizes) for name, t in whole.items()}
    return [{name: piece[i] for name, piece in pieces.items()} for i in range(len(sizes))]


def _check_lists_for_each_lane(rank):
    runner, reference = tiny.runner_and_reference(tiny.unlike())
    mine = runner.lane_index
    assert mine == (0 if rank < 3 else 1)
    # Lengths 6 and 10 in one step, sizes 1 to 3, and numbers of micro-batches that change from step to step.
    short, long = tiny.batch(6, 6), tiny.batch(3, 10, seed=2)
    steps = [
        ([*_cut(short, [3, 1, 2]), long], [tiny.batch(1, 7, seed=3)]),
        ([long], [short, *_cut(long, [1, 2])]),
        ([], [short]),
    ]
    for lanes in steps:
        loss = runner.step(lanes={mine: lanes[mine]})
        expected = tiny.one_device(reference, *lanes[0], *lanes[1])
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        tiny.assert_same_gradients(runner.model, reference)
    evaluated = runner.eval(lanes=[*steps[0]])
    reference.zero_grad()
    torch.testing.assert_close(evaluated, tiny.one_device(reference, *steps[0][0], *steps[0][1]))


@pytest.mark.dist(4)
def test_lanes_take_their_own_micro_batches():
    run_world(_check_lists_for_each_lane, 4)


def _check_one_rank_loads(rank):
    runner, reference = tiny.runner_and_reference(tiny.unlike())
    for length in (6, 10):
        whole = tiny.batch(8, length)
        whole["attention_mask"] = torch.ones_like(whole["input_ids"])
        loss = runner.step(whole if rank == 3 else None, src_data_rank=3)
        torch.testing.assert_close(loss, tiny.one_device(reference, whole), rtol=1e-5, atol=1e-6)
    lanes = [_cut(whole, [3, 5]), []]
    loss = runner.step(lanes=lanes if rank == 3 else None, src_data_rank=3)
    torch.testing.assert_close(loss, tiny.one_device(reference, whole), rtol=1e-5, atol=1e-6)
    tiny.assert_same_gradients(runner.model, reference)
    ragged = {"input_ids": torch.ones(3, 2), "labels": torch.ones(2, 2)}
    with pytest.raises((PlanError, DisagreementError), match="samples along dim 0"):
        runner.step(ragged if rank == 3 else None, src_data_rank=3)


@pytest.mark.dist(4)
def test_the_ranks_are_sent_what_one_of_them_loads():
    run_world(_check_one_rank_loads, 4)


class _Scorer(torch.nn.Module):
    """Called by position: ids, and weights of the positions."""

    def __init__(self):
        super().__init__()
        self.model = tiny.llama()

    def forward(self, ids, weights):
        embedded = self.model.model.embed_tokens(ids) * weights.unsqueeze(-1)
        return self.model.model(inputs_embeds=embedded).last_hidden_state


def _squares(output, target):
    return ((output.mean(-1) - target) ** 2).sum(), target.numel()


def _check_tuple(rank):
    runner = Runner(_Scorer(), tiny.pairs(), _squares)
    ids, generator = tiny.batch()["input_ids"], torch.Generator().manual_seed(3)
    weights, target = torch.rand(2, *ids.shape, generator=generator)
    loss = runner.step((ids, weights, target))
    expected = _Scorer()
    value = torch.nn.functional.mse_loss(expected(ids, weights).mean(-1), target)
    torch.testing.assert_close(loss, value.detach())


@pytest.mark.dist(4)
def test_a_tuple_is_positional_arguments_and_the_target():
    run_world(_check_tuple, 4)


def _check_refusals(rank):
    runner, _ = tiny.runner_and_reference(tiny.pairs())
    whole = tiny.batch()
    with pytest.raises(DisagreementError, match="unlike arguments"):
        runner.step(whole if rank else tiny.batch(seed=9))
    with pytest.raises(
        (PlanError, DisagreementError), match=r"a step takes a whole batch.*neither"
    ):
        runner.step(None if rank == 2 else whole)
    with pytest.raises(DisagreementError, match="unlike arguments"):
        runner.step(**({"batch": whole} if rank else {"lanes": [whole, whole]}))
    runner.step(whole)
    with pytest.raises((PlanError, DisagreementError), match="nothing for lane 1"):
        runner.step(lanes=[whole, None])
    with pytest.raises(
        DisagreementError, match="ranks 2 and 3 of lane 1 pass unlike micro-batches"
    ):
        runner.step(lanes=[whole, whole if rank < 3 else tiny.batch(4)])
    no_loss = Runner(tiny.llama(), tiny.pairs(), lambda output, _: output.logits)
    with pytest.raises((PlanError, DisagreementError), match="loss_fn must return"):
        no_loss.step(whole)


@pytest.mark.dist(4)
def test_batches_that_do_not_fit_are_refused_on_every_rank():
    run_world(_check_refusals, 4)


def _mean_of_squares(output, target):
    return torch.nn.functional.mse_loss(output.mean(-1), target)


def _token_mean(output, labels):
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def _check_means(rank):
    even = tiny.plan(
        ([tiny.stage([0, 1], 0, 1), tiny.stage([2], 2, 2)], 3, 2), ([tiny.stage([3], 0, 2)], 1, 2)
    )
    runner, reference = Runner(_Scorer(), even, _mean_of_squares), _Scorer()
    ids, generator = tiny.batch()["input_ids"], torch.Generator().manual_seed(3)
    weights, target = torch.rand(2, *ids.shape, generator=generator)
    loss, expected = (
        runner.step((ids, weights, target)),
        _mean_of_squares(reference(ids, weights), target),
    )
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    tiny.assert_same_gradients(runner.model.model.model, reference.model.model)

    whole = tiny.batch()
    labels = whole["labels"].clone().fill_(-100)
    labels[:, 1::2] = 5  # 3 targets a row
    tokens = Runner(tiny.llama(), even, _token_mean)
    with torch.no_grad():
        expected = _token_mean(tiny.llama()(whole["input_ids"]), labels)
        torch.testing.assert_close(tokens.eval({**whole, "labels": labels}), expected)
    labels[-1, 1] = -100
    for step in (tokens.eval, tokens.step):
        with pytest.raises(PlanError, match=r"a mean alone, and .* from 5 to 6 targets.*Return"):
            step({**whole, "labels": labels})
    part = (ids[:2], weights[:2], target[:2])
    long = tuple(torch.cat([t, t], 1) for t in part)
    with pytest.raises(PlanError, match="from 12 to 24 targets"):
        runner.step(lanes=[[part, part], [long]])
    reference.zero_grad()
    runner.model.zero_grad()
    runner.step((ids, weights, target))
    _mean_of_squares(reference(ids, weights), target).backward()
    tiny.assert_same_gradients(runner.model.model.model, reference.model.model)


@pytest.mark.dist(4)
def test_a_mean_alone_will_do_where_all_micro_batches_count_alike():
    run_world(_check_means, 4)


def _check_parts(rank, plan, num_rows, expected):
    runner, reference = tiny.runner_and_reference(plan)
    batch = tiny.batch(num_rows)
    with runner.record() as recording:
        loss = runner.step(batch)
    torch.testing.assert_close(loss, tiny.one_device(reference, batch))
    tiny.assert_same_gradients(runner.model, reference)
    spans = [s for s in recording.timeline().spans if "F" in s.name and s.ranks == (rank,)]
    assert len(spans) == expected[runner.lane_index]


_PARTS = {
    "share": ([{"share": 5}, {"share": 3}], 16, (8, 6)),
    "share, m": ([{"share": 5, "microbatches": 2}, {"share": 3, "microbatches": 3}], 8, (2, 3)),
    "share, b": ([{"share": 5, "mbs": 2}, {"share": 3, "mbs": 1}], 8, (3, 3)),
    "m, b": ([{"microbatches": 2, "mbs": 2}, {"microbatches": 3, "mbs": 1}], 7, (2, 3)),
    "nothing": ([{}, {}], 8, (4, 4)),
}


@pytest.mark.dist(4)
@pytest.mark.parametrize("form", _PARTS)
def test_every_form_of_a_part_of_the_batch_runs(form):
    parts, num_rows, expected = _PARTS[form]
    stages = [
        [tiny.stage([0], 0, 1), tiny.stage([1], 2, 2)],
        [tiny.stage([2], 0, 0), tiny.stage([3], 1, 2)],
    ]
    pipelines = [{"stages": s, **part} for s, part in zip(stages, parts, strict=True)]
    plan = hd.AnnotationPlan.from_dict({"pipelines": pipelines})
    run_world(_check_parts, 4, plan, num_rows, expected)


@pytest.mark.dist(4)
def test_a_uniform_plan_says_how_many_micro_batches_its_lanes_run():
    uniform = {"dp": 2, "tp": 1, "pp": 2, "microbatches": 4, "mbs": 1}
    run_world(_check_parts, 4, hd.AnnotationPlan.from_dict({"uniform": uniform}), 8, (4, 4))
