"""Describing models: names, shapes, numbers and tied weights, with and without data."""

import pytest
import torch
from torch import nn

from hdtensor.errors import PlanError
from hdtensor.plan import ModelDescription, ParameterDescription, Pipeline, Stage, StrategyPlan


def tiny(family, **changes):
    """Build a Hugging Face model on the meta device."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        **changes,
    )
    with torch.device("meta"):
        return getattr(transformers, f"{family}ForCausalLM")(config)


def plan(*, num_stages=1):
    """Ranks 0, 1 as TP 2, in stages of one layer or in one of two; rank 9 alone."""
    if num_stages == 1:
        stages = (Stage(ranks=(0, 1), layers=(0, 1)),)
    else:
        stages = (Stage(ranks=(0, 1), layers=(0, 0)), Stage(ranks=(2, 3), layers=(1, 1)))
    alone = Pipeline(stages=(Stage(ranks=(9,), layers=(0, 1)),))
    return StrategyPlan(pipelines=(Pipeline(stages=stages), alone))


@pytest.mark.parametrize("tied", [False, True])
def test_llama_from_its_numbers_is_the_hugging_face_model(tied):
    model = tiny("Llama", tie_word_embeddings=tied)
    numbers = ModelDescription.llama(
        num_layers=2,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        tie_word_embeddings=tied,
    )
    assert ModelDescription.from_module(model) == numbers
    assert plan().expand(model) == plan().expand(numbers)


def test_qwen3_needs_no_pattern_of_its_own():
    model = tiny("Qwen3", head_dim=8)
    expanded = plan().expand(model)
    attention = "model.layers.1.self_attn."
    assert str(expanded.tensors[attention + "q_norm.weight"]) == "R / 0,1:R 9:R"
    assert str(expanded.tensors[attention + "q_proj.weight"]) == "R / 0,1:S0 9:R"
    assert expanded.unmatched == ()


def test_biases_of_columns_are_cut_and_those_of_rows_are_not():
    expanded = plan().expand(tiny("Llama", attention_bias=True, mlp_bias=True))
    layer = "model.layers.0."
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
        assert str(expanded.tensors[f"{layer}{name}.bias"]) == "R / 0,1:S0 9:R", name
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert str(expanded.tensors[f"{layer}{name}.bias"]) == "R / 0,1:R 9:R", name
    assert expanded.unmatched == ()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 4)


class Stack(nn.Module):
    """A model with other names, and a weight that two modules share."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(10, 4)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.wte.weight


def test_a_model_of_ones_own_is_placed_by_registration_order():
    expanded = plan(num_stages=2).expand(Stack(), patterns=[("fc1.*", "column"), ("fc2.*", "row")])
    assert {name: str(spec) for name, spec in expanded.tensors.items()} == {
        "wte.weight": "R / 0,1:R 2,3:R 9:R",
        "h.0.fc1.weight": "R / 0,1:S0 9:R",
        "h.0.fc1.bias": "R / 0,1:S0 9:R",
        "h.0.fc2.weight": "R / 0,1:S1 9:R",
        "h.0.fc2.bias": "R / 0,1:R 9:R",
        "h.1.fc1.weight": "R / 2,3:S0 9:R",
        "h.1.fc1.bias": "R / 2,3:S0 9:R",
        "h.1.fc2.weight": "R / 2,3:S1 9:R",
        "h.1.fc2.bias": "R / 2,3:R 9:R",
        "ln_f.weight": "R / 2,3:R 9:R",
        "ln_f.bias": "R / 2,3:R 9:R",
    }


def test_a_model_without_layers_is_one_piece():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    patterns = [("0.*", "column"), ("1.*", "row")]
    assert str(plan().expand(model, patterns).tensors["1.weight"]) == "R / 0,1:S1 9:R"
    with pytest.raises(PlanError, match=r"pipelines\[0\]\.stages: 2 stages need layers, but no"):
        plan(num_stages=2).expand(model, patterns)


def test_two_stacks_of_layers_need_a_choice():
    model = nn.ModuleDict({"encoder": Stack().h, "decoder": Stack().h})
    both = nn.ModuleDict({name: nn.ModuleDict({"layers": part}) for name, part in model.items()})
    assert plan().expand(both).unmatched[0] == "encoder.layers.0.fc1.weight"
    message = r"more than one stack of layers \(encoder\.layers\.0, decoder\.layers\.0\)"
    with pytest.raises(PlanError, match=message):
        plan(num_stages=2).expand(both)
    chosen = ModelDescription.from_module(both, layer_regex=r"^decoder\.layers\.(\d+)(?=\.)")
    expanded = plan(num_stages=2).expand(chosen)
    assert str(expanded.tensors["encoder.layers.1.fc1.weight"]) == "R / 0,1:R 9:R"
    assert str(expanded.tensors["decoder.layers.1.fc1.weight"]) == "R / 2,3:R 9:R"


def test_numbers_of_the_config_are_read_where_they_are_whole():
    model = nn.Linear(2, 2)
    assert ModelDescription.from_module(model).num_attention_heads is None
    model.config = {"num_attention_heads": 4, "intermediate_size": [1, 2], "hidden_size": True}
    found = ModelDescription.from_module(model)
    assert (found.num_attention_heads, found.num_key_value_heads) == (4, 4)
    assert found.intermediate_size is found.hidden_size is None


def test_bad_models():
    with pytest.raises(
        PlanError, match="expected a torch module or a ModelDescription, got 'model'"
    ):
        ModelDescription.from_module("model")
    with pytest.raises(PlanError, match="no parameters"):
        ModelDescription.from_module(nn.ReLU())
    with pytest.raises(PlanError, match="one group, the index"):
        ModelDescription.from_module(nn.Linear(1, 1), layer_regex=r"layers\.\d+")
    one = (ParameterDescription("layers.100000.w", (1,)),)
    with pytest.raises(PlanError, match=r"no layer index below 100000"):
        ModelDescription(parameters=one).layer_modules  # noqa: B018 - the access raises
    with pytest.raises(PlanError, match=r"'layers\.100000\.w' is described twice"):
        ModelDescription(parameters=one * 2)
    with pytest.raises(PlanError, match="'a' is tied to 'b', which is not before it"):
        ModelDescription(parameters=(ParameterDescription("a", (1,), "b"),))
    with pytest.raises(PlanError, match="num_attention_heads: must be from 1 to"):
        ModelDescription(parameters=one, num_attention_heads=0)
