"""Gradients of gradients: on any plan, whether modules run op by op, as a whole, or are skipped as a whole."""

import warnings

import pytest
import torch

import hdtensor as hd
from hdtensor.api.parallelize import state_of
from tests.models.families import build
from tests.models.hf import batch, compare_gradient, strategy
from tests.support.world import run_world


PLANS = {
    "one subgroup": [([0, 1], 1)],
    "TP 2 beside TP 1": [([0, 1], 3), ([2], 1)],
    "three subgroups": [([0], 1), ([3], 2), ([1], 1)],
}


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up_proj = torch.nn.Linear(8, 12).double()
        self.down_proj = torch.nn.Linear(12, 8).double()

    def forward(self, x):
        return self.down_proj(torch.nn.functional.gelu(self.up_proj(x)))


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x)


class Gated(torch.nn.Module):
    """Runs as a whole inside of tensor parallelism, as no bias is added to a pending sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj = torch.nn.Linear(8, 12, bias=False).double()
        self.up_proj = torch.nn.Linear(8, 12, bias=False).double()
        self.down_proj = torch.nn.Linear(12, 8, bias=False).double()

    def forward(self, x):
        gate = torch.nn.functional.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Gated()
        self.norm = torch.nn.RMSNorm(8).double()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def _batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator, dtype=torch.double)


def _penalty(model, x):
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return (slope.norm(dim=-1) - 1).square().mean()


def _compare(tested, reference):
    for (name, p), q in zip(tested.named_parameters(), reference.parameters(), strict=True):
        compare_gradient(name, p, q)
    reference.zero_grad(), tested.zero_grad()


def _penalize(rank, model):
    plan = strategy(([0, 1], 3), ([2], 1))
    reference, tested = model(), hd.parallelize(model(), plan)
    for _ in range(4):
        expected = _penalty(reference, _batch())
        expected.backward()
        loss = _penalty(tested, hd.distribute_batch(tested, _batch()))
        loss.backward()
        assert hd.item(loss) == pytest.approx(expected.item(), rel=1e-12)
        _compare(tested, reference)


@pytest.mark.dist(4)
@pytest.mark.parametrize("model", [Mlp, Outer])
def test_penalties_on_gradients_equal_one_device(model):
    run_world(_penalize, 4, model)


def _train(model, x):
    model(x).square().sum().backward()


def _of_parameters(model, x, wanted=lambda name: True):
    """The sum of the squares of gradients: its gradient is a product with the Hessian."""
    chosen = [p for name, p in model.named_parameters() if wanted(name)]
    grads = torch.autograd.grad(model(x).square().sum(), chosen, create_graph=True)
    return _squares(grads, chosen)


def _squares(grads, parameters):
    homes = [
        g.redistribute(p.spec) if isinstance(g, hd.HDTensor) else g
        for g, p in zip(grads, parameters, strict=True)
    ]
    return sum(g.square().sum() for g in homes)


def _of_gradients(model, x):
    """As ``_of_parameters``, of gradients that a backward left in their places."""
    with warnings.catch_warnings():  # such gradients and their parameters refer to one another
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        model(x).square().sum().backward(create_graph=True)
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters]
    model.zero_grad()
    return _squares(grads, parameters)


def _change_over(rank, plan, model, num_plain):
    """Take plain steps, then penalties, then a plain step again."""
    reference, tested = model(), hd.parallelize(model(), strategy(*plan))
    cut = hd.distribute_batch(tested, _batch().requires_grad_())
    own = _batch().requires_grad_()
    for step in range(num_plain + 1):
        if step == num_plain:
            for loss_of in (_penalty, _of_parameters, _of_gradients):
                expected, found = loss_of(reference, own), loss_of(tested, cut)
                assert hd.item(found) == pytest.approx(expected.item(), rel=1e-12)
                # A penalty with its loss: the graph of first gradients is passed again.
                (expected + reference(own).sum()).backward()
                (found + tested(cut).sum()).backward()
                _compare(tested, reference)
        _train(reference, own), _train(tested, cut)
        _compare(tested, reference)
    torch.testing.assert_close(cut.grad.full_tensor(), own.grad)
    return {s.state for r in state_of(tested).regions for s in r.layouts.values()}


@pytest.mark.dist(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("num_plain", [0, 1, 6])
def test_penalties_after_plain_steps_equal_one_device(plan, num_plain):
    states = run_world(_change_over, 4, PLANS[plan], Block, num_plain)
    if num_plain == 6:
        busy = {rank for ranks, _ in PLANS[plan] for rank in ranks}
        assert [s == {"running" if r in busy else "pruned"} for r, s in enumerate(states)] == [
            True
        ] * 4


def _of_embeddings(model, data):
    """The slope of a language model's loss along its embeddings, as adversarial training penalizes."""
    data = dict(data)
    embedded = model.get_input_embeddings()(data.pop("input_ids"))
    loss = model(inputs_embeds=embedded, **data).loss
    (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + slope.square().sum()


def _of_weights(model, data):
    chosen = [p for name, p in model.named_parameters() if "layers.1" in name or "embed" in name]
    loss = model(**data).loss
    return loss + _squares(torch.autograd.grad(loss, chosen, create_graph=True), chosen)


def _fine_tune(rank, plan, num_plain, checkpoint):
    options = {"attn_implementation": "eager"}  # torch has no second derivative of fused attention
    reference = build("llama", **options)
    tested = hd.parallelize(build("llama", **options), strategy(*plan))
    if checkpoint:
        for model in (reference, tested):
            model.train()
            model.activation_checkpointing_enable()
    for step in range(num_plain + 2):
        data = batch(step)
        cut = hd.distribute_batch(tested, data)
        for loss_of in (_of_embeddings, _of_weights):
            if step < num_plain:
                expected, loss = reference(**data).loss, tested(**cut).loss
            else:
                expected, loss = loss_of(reference, data), loss_of(tested, cut)
            torch.testing.assert_close(hd.item(loss), expected.item(), rtol=1e-6, atol=0)
            expected.backward(), loss.backward()
        _compare(tested, reference)


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("plan", "num_plain", "checkpoint"),
    [
        ("one subgroup", 4, False),
        ("TP 2 beside TP 1", 4, False),
        ("TP 2 beside TP 1", 2, True),
        ("three subgroups", 4, False),
    ],
)
def test_a_language_model_with_penalties_equals_one_device(plan, num_plain, checkpoint):
    run_world(_fine_tune, 4, PLANS[plan], num_plain, checkpoint)


def _whole(value):
    return value.detach().full_tensor() if isinstance(value, hd.HDTensor) else value.detach()


def _ask(model, x, v):
    """What torch offers to ask for gradients, of a model with regions: each answer by its name."""
    parameters, answers = list(model.parameters()), {}

    def loss_at(x):
        return model(x).square().sum()

    answers["grad"] = torch.autograd.grad(loss_at(x), parameters)
    answers["some"] = torch.autograd.grad(loss_at(x), parameters[1:2])
    assert all(p.grad is None for p in parameters)
    loss_at(x).backward(inputs=parameters[:1])
    assert [p.grad is None for p in parameters] == [False, *[True] * (len(parameters) - 1)]
    answers["backward(inputs)"] = [parameters[0].grad]
    model.zero_grad()
    doubled = {name: (2 * p).detach() for name, p in model.named_parameters()}
    answers["functional_call"] = [torch.func.functional_call(model, doubled, (x,))]
    answers["hvp"] = [torch.autograd.functional.hvp(loss_at, x, v)[1]]
    answers["vhp"] = [torch.autograd.functional.vhp(loss_at, x, v)[1]]
    answers["func"] = [torch.func.grad(loss_at)(x.detach())]
    answers["func twice"] = [
        torch.func.grad(lambda x: (torch.func.grad(loss_at)(x) * v).sum())(x.detach())
    ]
    return answers


def _ask_after_training(rank, plan):
    reference, tested = Block(), hd.parallelize(Block(), strategy(*plan))
    generator = torch.Generator().manual_seed(2)
    own = [torch.randn(8, 8, generator=generator).double() for _ in range(2)]
    cut = [hd.distribute_batch(tested, x) for x in own]
    own[0].requires_grad_(), cut[0].requires_grad_()
    for _ in range(4):
        _train(reference, own[0]), _train(tested, cut[0])
    reference.zero_grad(), tested.zero_grad()
    expected = _ask(reference, *own)
    for name, found in _ask(tested, *cut).items():
        for a, b in zip(found, expected[name], strict=True):
            torch.testing.assert_close(_whole(a), _whole(b), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.dist(4)
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_may_be_asked_for_in_any_way_after_plain_steps(plan):
    run_world(_ask_after_training, 4, PLANS[plan])
