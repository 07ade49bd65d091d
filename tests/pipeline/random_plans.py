"""Random plans of pipelines, and their training beside the same training on one device."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

import hdtensor as hd
from hdtensor.pipeline import Runner
from tests.pipeline import tiny
from tests.pipeline.test_runner_activations import counted_dropout


#: Llamas whose sizes 2 and 4 ranks divide.
_NUM_HEADS, _NUM_STEPS = 4, 3


@dataclass(frozen=True)
class Case:
    """One plan, with a model, a schedule and a way to hand over batches.

    Attributes:
        seed: What it follows from.
        world_size: Number of ranks; the plan may leave some out.
        plan: As ``AnnotationPlan.from_dict`` takes it.
        schedule: Its name.
        model: Arguments of ``tiny.llama``.
        options: Arguments of ``Runner``.
        feed: "batch", "loader" (one rank has it) or "lanes" (lists of micro-batches of unlike lengths).
        mask: "none", "ones" or "ragged".
        has_positions: Whether batches have position ids.
        late_sync: Whether gradients of the first half of a step stay in the stages.
        frozen: For each step the layers that do not train.
    """

    seed: int
    world_size: int
    plan: dict[str, Any]
    schedule: str
    model: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    feed: str = "batch"
    mask: str = "none"
    has_positions: bool = False
    late_sync: bool = False
    frozen: tuple[tuple[int, ...], ...] = ()


def draw(seed):
    """Return the case of a seed: lanes of any sizes, cuts, tp, loops and Vs, counts, shares, schedules, zero."""
    pick = random.Random(seed)
    world_size, num_layers = pick.randint(3, 6), pick.randint(3, 5)
    ranks = pick.sample(range(world_size), world_size - (pick.random() < 0.25))
    pipelines = [_pipeline(pick, own, num_layers) for own in _dealt(pick, ranks)]
    if len(pipelines) > 1 and pick.random() < 0.2:
        _give_shares(pipelines)
    has_turns = any(_visits(p) > 1 for p in pipelines)
    schedules = ["GPipe", "Interleaved1F1B", "ZBV"] if has_turns else ["1F1B", "GPipe", "ZB-H1"]
    plan = {"pipelines": pipelines, "zero": pick.randint(0, 1)}
    if pick.random() < 0.3:
        plan["sequence_parallel"] = True
    model = {
        "num_layers": num_layers,
        "num_key_value_heads": pick.choice([1, 2, 4]),
        "tie_word_embeddings": pick.random() < 0.3,
        "attn_implementation": pick.choice(["eager", "sdpa"]),
    }
    mask, has_positions = pick.choice(["none", "ones", "ragged"]), pick.random() < 0.3
    options = {"activation_checkpointing": pick.random() < 0.2}
    options["activation_offload"] = pick.random() < 0.15
    options["use_regions"] = pick.random() < 0.8
    if has_positions and mask != "none":
        options["keep_plain"] = ("attention_mask",)
    feed = pick.choice(["batch", "batch", "batch", "loader", "lanes"])
    schedule, late_sync = pick.choice(schedules), pick.random() < 0.2
    can_drop = model["attn_implementation"] == "eager" and feed != "lanes" and not late_sync
    if can_drop and pick.random() < 0.4:
        model["attention_dropout"] = 0.2
    frozen = tuple(
        tuple(i for i in range(num_layers) if is_freezing and pick.random() < 0.4)
        for is_freezing in [pick.random() < 0.3] * _NUM_STEPS
    )
    return Case(
        seed, world_size, plan, schedule, model, options, feed, mask, has_positions, late_sync, frozen
    )  # fmt: skip


def _dealt(pick, ranks):
    """Return the ranks of one to three lanes."""
    ends = sorted(pick.sample(range(1, len(ranks)), min(pick.randint(0, 2), len(ranks) - 1)))
    return [ranks[a:b] for a, b in zip([0, *ends], [*ends, len(ranks)], strict=True)]


def _pipeline(pick, ranks, num_layers):
    groups = []
    while ranks and len(groups) < num_layers:
        size = pick.choice([n for n in (1, 2, 4) if n <= len(ranks)])
        groups.append(ranks[:size])
        ranks = ranks[size:]
    if pick.random() < 0.35:
        groups = (groups + pick.choice([groups, groups[::-1]]))[:num_layers]
    cuts = sorted(pick.sample(range(1, num_layers), len(groups) - 1))
    bounds = [0, *cuts, num_layers]
    return {
        "stages": [
            {"ranks": group, "layers": [first, end - 1]}
            for group, first, end in zip(groups, bounds[:-1], bounds[1:], strict=True)
        ],
        "microbatches": pick.choice([1, 2, 3, 5]),
        "mbs": pick.randint(1, 2),
    }


def _give_shares(pipelines):
    """Have shares say how many samples each lane gets, the last one none."""
    for pipeline in pipelines:
        pipeline["share"] = pipeline["microbatches"] * pipeline.pop("mbs")
    pipelines[-1]["share"] = 0


def _visits(pipeline):
    stages = [tuple(stage["ranks"]) for stage in pipeline["stages"]]
    return max(stages.count(stage) for stage in stages)


# -- training ---------------------------------------------------------------------------------------------------------


def check(rank, *cases):
    """Train each case's model by its plan, and beside it on one device."""
    for case in cases:
        try:
            _train(rank, case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def _train(rank, case):
    torch.manual_seed(0)
    reference = tiny.llama(**case.model)
    plan = hd.AnnotationPlan.from_dict(case.plan)
    model = tiny.llama(**case.model)
    runner = Runner(model, plan, token_loss, schedule=case.schedule, **case.options)
    optimizer = torch.optim.AdamW(runner.optimizer_parameters(), lr=1e-2, eps=1e-3)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    for step in range(_NUM_STEPS):
        for each in (model, reference):
            each.train(step != 1)
            for i, layer in enumerate(each.model.layers):
                layer.requires_grad_(i not in case.frozen[step])
        _step(rank, case, runner, reference, step)
        norm = hd.clip_grad_norm_(runner.optimizer_parameters(), 0.5)
        whole = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(norm, whole, rtol=1e-4, atol=1e-6)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    last, micro = _batches(case, _NUM_STEPS)
    for each in (model, reference):
        each.eval()
    with torch.no_grad():
        _assert_near(runner.eval(**_given(rank, case, runner, last)), _mean(reference, micro))
    for (name, p), q in zip(runner.model.named_parameters(), reference.parameters(), strict=True):
        _assert_near(p.detach().full_tensor(), q.detach(), name)


def _step(rank, case, runner, reference, step):
    """Make one backward of a step's batch on both; compare losses and gradients."""
    samples, micro = _batches(case, step)
    before = []
    if case.late_sync:
        earlier, before = _batches(case, step + 2 * _NUM_STEPS)
        runner.step(**_given(rank, case, runner, earlier), sync=False)
    torch.manual_seed(step)
    loss = runner.step(**_given(rank, case, runner, samples))
    torch.manual_seed(step)
    with torch.no_grad():
        _assert_near(loss, _mean(reference, micro), f"loss of step {step}")
    torch.manual_seed(step)
    _mean(reference, before + micro).backward()
    targets = runner.optimizer_parameters()
    for (name, p), q in zip(reference.named_parameters(), targets, strict=True):
        assert (p.grad is None) == (q.grad is None), f"step {step}, {name}"
        if p.grad is not None:
            _assert_near(q.grad.full_tensor(), p.grad, f"step {step}, {name}")


def _assert_near(found, expected, what=""):
    torch.testing.assert_close(
        found, expected, rtol=1e-3, atol=2e-5, msg=lambda text: f"{what}: {text}"
    )


def token_loss(output, labels):
    """Return the summed cross-entropy of next tokens, and the number of them."""
    logits, targets = output.logits[:, :-1], labels[:, 1:]
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (targets != -100).sum()


def _mean(reference, batches):
    """Return one device's mean loss over the tokens of all batches."""
    with counted_dropout():
        parts = [
            token_loss(reference(**{k: v for k, v in b.items() if k != "labels"}), b["labels"])
            for b in batches
        ]
    return sum(total for total, _ in parts) / sum(int(count) for _, count in parts)


# -- batches ----------------------------------------------------------------------------------------------------------


def _given(rank, case, runner, samples):
    """Return what a rank passes to ``step``."""
    if case.feed == "lanes":
        return {
            "lanes": {}
            if runner.lane_index is None
            else {runner.lane_index: samples[runner.lane_index]}
        }
    if case.feed == "loader":
        source = case.seed % case.world_size
        return {"batch": samples if rank == source else None, "src_data_rank": source}
    return {"batch": samples}


def _batches(case, step):
    """Return what all ranks pass together, and the batches that one device takes one by one."""
    pick = random.Random(1000 * case.seed + step)
    pipelines = case.plan["pipelines"]
    if case.feed != "lanes":
        num_rows = sum(p.get("share", p["microbatches"] * p.get("mbs", 1)) for p in pipelines)
        whole = _samples(case, pick, num_rows)
        return whole, [whole]
    lanes = [
        [_samples(case, pick, pick.randint(1, 2)) for _ in range(p["microbatches"])]
        for p in pipelines
    ]
    return lanes, [part for lane in lanes for part in lane]


def _samples(case, pick, num_rows):
    length = pick.choice([5, 6, 10])
    found = tiny.batch(num_rows, length, seed=pick.randrange(1000))
    found["labels"][num_rows // 2, 1] = 3  # some token counts, in any batch
    if case.mask != "none":
        mask = torch.ones_like(found["input_ids"])
        if case.mask == "ragged":
            for row in range(num_rows):
                mask[row, length - row % 3 :] = 0
        found["attention_mask"] = mask
        found["labels"] = found["labels"].where(mask > 0, -100)
    if case.has_positions:
        found["position_ids"] = torch.arange(length).expand(num_rows, length).contiguous()
    return found
