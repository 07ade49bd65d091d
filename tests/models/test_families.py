"""Unmodified models of many families train as on one device, on unlike subgroups and on two-dimensional meshes."""

import dataclasses

import pytest
import torch

import hdtensor as hd
from hdtensor import HDSpec, Replicate, Subgroup
from hdtensor.plan import ExpandedPlan, ModelDescription
from tests.models.hf import batch, build, compare_gradient, compare_training, strategy
from tests.support.world import run_world


PAIR = strategy(([0, 1], 1))
UNLIKE = strategy(([0, 1], 5), ([2], 3))
THREE = strategy(([0, 1], 2), ([2], 1), ([3], 1))

#: Families that compute norms or routes in float32 whatever the model's dtype.
ROUNDING = 1e-6


def _on_two_axes(plan, family):
    """Return the plan of a family with the pair's mesh (1, 2) instead of (2,)."""

    def with_axes(spec):
        groups = [
            Subgroup(g.ranks, (Replicate(), *g.placements), (1, 2)) if len(g) == 2 else g
            for g in spec.subgroups
        ]
        return HDSpec(groups, spec.top, spec.top_ratio)

    expanded = plan.expand(build(family))
    return ExpandedPlan(
        tensors={name: with_axes(spec) for name, spec in expanded.tensors.items()},
        inputs=with_axes(expanded.inputs),
        labels=with_axes(expanded.labels),
        points=[dataclasses.replace(p, spec=with_axes(p.spec)) for p in expanded.points],
    )


def _train(rank, family):
    for plan in (PAIR, UNLIKE, _on_two_axes(THREE, family)):
        compare_training(family, plan, steps=2, rounding=ROUNDING)


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_training_equals_one_device_under_three_plans(family):
    run_world(_train, 4, family)


def _train_each(rank, families, plan, options):
    for family in families:
        compare_training(family, plan, steps=1, rounding=ROUNDING, **options)


DENSE = ("gemma", "gemma2", "olmo2", "phi", "phi3", "opt", "bloom", "gpt_neox", "gptj")


@pytest.mark.dist(4)
def test_other_families_train_as_on_one_device():
    run_world(_train_each, 4, (*DENSE, "starcoder2", "qwen2_moe", "olmoe"), UNLIKE, {})


def _train_replicated(rank, family):
    compare_training(
        family, UNLIKE, steps=1, rounding=ROUNDING, patterns=[("*", "replicate")], masked=True
    )


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["opt", "qwen2_moe"])
def test_a_model_that_no_rule_knows_is_right_but_not_parallel(family):
    run_world(_train_replicated, 4, family)


def _train_as_regions(rank, family):
    compare_training(family, UNLIKE, steps=5, rounding=1e-4, model={"initializer_range": 0.3})


@pytest.mark.dist(4)
def test_gradients_that_are_pending_at_a_point_are_right_on_plain_tensors():
    """The latent keys' gradient is pending where the block's other one is whole."""
    run_world(_train_as_regions, 4, "deepseek_v3")


def _reasons(rank, family):
    model = hd.parallelize(build(family), UNLIKE, use_regions=False)
    data = hd.distribute_batch(model, batch(0))
    with hd.debug.count_communication() as forward:
        loss = model(**data).loss
    with hd.debug.count_communication() as backward:
        loss.backward()
    return forward.by_reason(), backward.by_reason()


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt"])
def test_a_layer_reduces_twice_in_each_direction_and_nothing_else_is_moved(family):
    """Also where q, k and v are fused: their thirds are cut, so taking them apart is local."""
    forward, backward = run_world(_reasons, 4, family)[0]
    assert forward.pop("redistribute") == 2 * 2
    assert len(forward) == 1, "the weight of the loss"
    assert backward.pop("redistribute") == 2 * 2
    assert set(backward) == {"gradients"}


CUT = {
    "gpt2": {
        "h.0.attn.c_attn.weight": "S1x3",
        "h.0.attn.c_attn.bias": "S0x3",
        "h.0.attn.c_proj.weight": "S0",
        "h.0.mlp.c_fc.weight": "S1",
        "h.0.mlp.c_proj.weight": "S0",
        "h.0.mlp.c_proj.bias": "R",
    },
    "mixtral": {
        "layers.0.mlp.experts.gate_up_proj": "S1x2",
        "layers.0.mlp.experts.down_proj": "S2",
        "layers.0.mlp.gate.weight": "R",
    },
    "deepseek_v3": {
        "layers.0.self_attn.q_a_proj.weight": "R",
        "layers.0.self_attn.q_b_proj.weight": "S0",
        "layers.0.self_attn.kv_b_proj.weight": "S0",
        "layers.0.self_attn.o_proj.weight": "S1",
        "layers.1.mlp.experts.gate_up_proj": "S1x2",
        "layers.1.mlp.shared_experts.down_proj.weight": "S1",
    },
    "gpt_neox": {"layers.1.attention.query_key_value.weight": "S0"},
    "opt": {"layers.1.fc1.bias": "S0", "layers.1.fc2.weight": "S1"},
    "phi3": {"layers.0.mlp.gate_up_proj.weight": "S0x2", "layers.0.self_attn.qkv_proj.weight": "R"},
}


@pytest.mark.parametrize("family", CUT)
def test_rules_cut_each_family(family):
    plan = UNLIKE.expand(build(family))
    for end, placement in CUT[family].items():
        (name,) = (name for name in plan.tensors if name.endswith(end))
        assert str(plan.tensors[name]) == f"R / 0,1:{placement} 2:R", name


UNLIKE_PARTS = {"phi3": {"self_attn.qkv_proj.weight"}}


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen3_moe", "deepseek_v3", *DENSE])
def test_rules_name_every_matrix_but_those_fused_of_unlike_parts(family):
    model = ModelDescription.from_module(build(family))
    plan = PAIR.expand(model)
    inside = [n for n in plan.unmatched if len(model.shapes[n]) > 1 and model.layer_of(n)]
    found = {name.removeprefix(f"{model.layer_of(name)[0]}.") for name in inside}
    assert found == UNLIKE_PARTS.get(family, set())


def test_a_rule_that_does_not_fit_leaves_the_parameter_whole():
    model = build("qwen2")
    model.config.num_attention_heads = 6  # does not divide the rows
    name = "model.layers.0.self_attn.q_proj.weight"
    plan = UNLIKE.expand(model)
    assert str(plan.tensors[name]) == "R / 0,1:R 2:R"
    assert name in plan.unmatched


class Gate(torch.nn.Module):
    """Sends each row to one of two matrices, by its sign: shapes inside depend on data."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 4, 4, dtype=torch.double))

    def forward(self, x):
        out = torch.zeros_like(x)
        for k, rows in enumerate((x.sum(-1) >= 0, x.sum(-1) < 0)):
            at = rows.nonzero()[:, 0]
            out = out.index_add(0, at, x[at] @ self.weight[k])
        return out


class Routed(torch.nn.Module):
    """A model with a module that only local tensors can run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(4, 4).double()
        self.gate = Gate()

    def forward(self, x):
        return self.gate(x=self.up(x))


def _own_local_module(rank, size):
    reference = Routed()
    tested = hd.parallelize(Routed(), strategy(([0, 1], 3), ([2], 1)), local_modules=["Gate"])
    x = torch.randn(size, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    reference(x).square().sum().backward()
    out = tested(hd.distribute_batch(tested, x))
    out.square().sum().backward()
    torch.testing.assert_close(out.detach().full_tensor(), reference(x).detach())
    for (name, p), q in zip(tested.named_parameters(), reference.parameters(), strict=True):
        compare_gradient(name, p, q)


@pytest.mark.dist(4)
@pytest.mark.parametrize("size", [8, 1])
def test_users_modules_run_on_local_rows(size):
    run_world(_own_local_module, 4, size)


@pytest.mark.parametrize("globs", [["nothing"], "Gate", [3]])
def test_local_modules_that_name_nothing_are_refused(globs):
    plan = hd.AnnotationPlan.from_dict(
        {"pipelines": [{"stages": [{"ranks": [0], "layers": [0, 0]}]}]}
    )
    with pytest.raises(hd.PlanError, match="local_modules"):
        hd.parallelize(Routed(), plan, local_modules=globs)


def _balanced(rank, family, masked):
    compare_training(
        family,
        UNLIKE,
        steps=3,
        masked=masked,
        rounding=1e-5,
        model={"output_router_logits": True, "router_aux_loss_coef": 0.5, "initializer_range": 0.3},
    )


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_balancing_loss_is_that_of_all_tokens(family):
    run_world(_balanced, 4, family, False)


class Optional(torch.nn.Module):
    """Uses one of its parameters only when told to, as models with a token for masks do."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4, dtype=torch.double))
        self.token = torch.nn.Parameter(torch.ones(4, dtype=torch.double))

    def forward(self, x, masked):
        y = x @ self.weight
        return y + self.token if masked else y


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Optional()

    def forward(self, x, masked=False):
        return self.inner(x, masked)


def _optional(rank):
    model = hd.parallelize(Outer(), strategy(([0, 1], 3), ([2], 1)))
    x = hd.distribute_batch(model, torch.ones(8, 4, dtype=torch.double))
    found = []
    for masked in (False, False, False, True, True, True, False, False):
        model(x, masked=masked).sum().backward()
        found.append([p.grad is not None for p in model.parameters()])
        model.zero_grad()
    return found


@pytest.mark.dist(4)
def test_parameters_that_a_pass_does_not_use_have_no_gradient_on_any_rank():
    plain, used = [True, False], [True, True]
    assert run_world(_optional, 4) == [[plain] * 3 + [used] * 3 + [plain] * 2] * 4
