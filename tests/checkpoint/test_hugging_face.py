"""Folders of transformers: what it wrote trains here, and what is written here it reads."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

import hdtensor as hd
from hdtensor.checkpoint.names import file_parts
from tests.checkpoint.training import PLANS, train, weights
from tests.models.hf import SIZES, batch
from tests.redistribute.test_cost import PeakStorage
from tests.support.world import run_world


def llama(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes})).to(dtype)


def qwen(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**{**SIZES, **changes}, head_dim=8)
    return transformers.Qwen3ForCausalLM(config).to(dtype)


MOE = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral(seed=0):
    torch.manual_seed(seed)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**MOE))


def qwen_moe(seed=0):
    torch.manual_seed(seed)
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def gpt2(seed=0):
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2,
            n_head=4,
            n_embd=32,
            vocab_size=67,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


FAMILIES = {"llama": llama, "qwen": qwen, "mixtral": mixtral, "qwen_moe": qwen_moe, "gpt2": gpt2}


def stored(folder):
    """Every tensor of a folder, by safetensors' own reader."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                assert name not in found, f"{name} is in two files"
                found[name] = file.get_tensor(name)
    return found


def same(left, right):
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


# -- one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_those_of_transformers(family, tmp_path):
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "theirs")
    hd.save_hf(model, tmp_path / "ours")
    same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    again = type(model).from_pretrained(tmp_path / "ours")
    same(again.state_dict(), model.state_dict())
    other = FAMILIES[family](seed=1)
    hd.load_hf(other, tmp_path / "theirs")
    same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, tmp_path):
    model = llama(dtype=dtype)
    hd.save_hf(model, tmp_path)
    assert {t.dtype for t in stored(tmp_path).values()} == {dtype}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype)[6:]
    same(transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict(), model.state_dict())  # fmt: skip
    wide = llama(seed=1)
    hd.load_hf(wide, tmp_path)
    same(wide.state_dict(), {n: t.float() for n, t in model.state_dict().items()})


def test_shards_and_their_index(tmp_path):
    model = llama()
    hd.save_hf(model, tmp_path, max_shard_bytes=20_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == sum(p.numel() for p in model.parameters())
    assert sorted(index["weight_map"]) == sorted(model.state_dict())
    same(transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict(), model.state_dict())
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    other = llama(seed=1)
    hd.load_hf(other, tmp_path / "theirs")
    same(other.state_dict(), model.state_dict())

    hd.save_hf(qwen(), tmp_path)  # one file now; nothing of the old ones may stay
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_tied_weights_are_written_once(tmp_path):
    model = llama(tie_word_embeddings=True)
    hd.save_hf(model, tmp_path)
    assert "lm_head.weight" not in stored(tmp_path)
    again = llama(seed=1, tie_word_embeddings=True)
    hd.load_hf(again, tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    same(again.state_dict(), model.state_dict())


def test_any_module(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model(torch.randn(5, 3))
    hd.save_hf(model, tmp_path)
    again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    hd.load_hf(again, tmp_path)
    same(again.state_dict(), model.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_experts_are_parts_of_one_tensor():
    model = mixtral()
    parts = {part.name: part for part in file_parts(model, model.state_dict())}
    third = parts["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    assert third.key == "model.layers.0.mlp.experts.gate_up_proj"
    assert (third.start, third.shape, third.dims) == ((1, 48, 0), (48, 32), (1, 2))


def test_what_conversions_compute_is_refused_with_its_names(monkeypatch, tmp_path):
    def joined(model, tensors):
        q = [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]
        rest = {name: tensor for name, tensor in tensors.items() if name not in q}
        return {**rest, "qk.weight": torch.cat([tensors[name] for name in q])}

    monkeypatch.setattr(transformers.core_model_loading, "revert_weight_conversion", joined)
    with pytest.raises(hd.CheckpointError, match=r"LlamaForCausalLM hold .*q_proj\.weight, qk\.weight in another form"):  # fmt: skip
        hd.save_hf(llama(), tmp_path)


# -- ranks --------------------------------------------------------------------------------------------------------


def _round_trip(rank, folder, plan, tied):
    """Read into one plan, train, write, read into another, go on."""
    model = llama(seed=5, dtype=torch.float64, tie_word_embeddings=tied)
    model = hd.parallelize(model, PLANS[plan])
    hd.load_hf(model, f"{folder}/theirs")
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer, range(2))
    hd.save_hf(model, f"{folder}/ours", max_shard_bytes=40_000)
    with torch.device("meta"):
        config = transformers.LlamaConfig.from_pretrained(f"{folder}/ours")
        other = transformers.LlamaForCausalLM(config)
    other = hd.parallelize(other.double(), PLANS["three"])
    hd.load_hf(other, f"{folder}/ours")
    torch.testing.assert_close(weights(other), weights(model), rtol=0, atol=0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    return before, losses + train(other, optimizer, range(2, 4)), weights(other)


@pytest.mark.dist(4)
@pytest.mark.parametrize(("plan", "tied"), [("unlike", False), ("dp", True)])
def test_a_checkpoint_of_transformers_trains_and_goes_back(tmp_path, plan, tied):
    reference = llama(dtype=torch.float64, tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path / "theirs")
    results = run_world(_round_trip, 4, str(tmp_path), plan, tied)
    before, losses, after = results[0]
    same(before, dict(reference.named_parameters()))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = []
    for step in range(4):
        loss = reference(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
        if step == 1:
            ours = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
            torch.testing.assert_close(ours.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-7)  # fmt: skip
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(after, dict(reference.named_parameters()), rtol=1e-5, atol=1e-7)


SPECS = ["S0[3:1] / 0,1:S1 2:R", "R / 3,0:S0 1:R", "S1 / 2,1:S0 0:R 3:R", "R / 2:R"]


def cut_model(model, first):
    """Cut every parameter by another spec, as no plan would; tied ones stay tied."""
    cut = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            spec = SPECS[(len(cut) + first) % 4] if parameter.ndim > 1 else "R / 0:R 2,1:S0"
            if id(parameter) not in cut:
                cut[id(parameter)] = nn.Parameter(hd.distribute_tensor(parameter.detach(), spec))
            setattr(module, name, cut[id(parameter)])
    return model


def _experts(rank, folder, family):
    model = cut_model(FAMILIES[family](seed=3), 0)
    hd.load_hf(model, f"{folder}/theirs")
    hd.save_hf(model, f"{folder}/ours", max_shard_bytes=100_000)
    again = cut_model(FAMILIES[family](seed=4), 1)
    hd.load_hf(again, f"{folder}/ours")
    return [weights(m) for m in (model, again)]


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["mixtral", "qwen_moe", "gpt2"])
def test_cut_experts_and_tied_weights(tmp_path, family):
    reference = FAMILIES[family]()
    reference.save_pretrained(tmp_path / "theirs")
    for read in run_world(_experts, 4, str(tmp_path), family)[1]:
        same(read, dict(reference.named_parameters()))
    same(type(reference).from_pretrained(tmp_path / "ours").state_dict(), reference.state_dict())


class Peak(PeakStorage):
    """Without tensors on the meta device, which take no memory."""

    def _note(self, storage):
        if storage.device.type != "meta":
            super()._note(storage)


def _peaks(rank, folder):
    model = hd.parallelize(llama(hidden_size=256, intermediate_size=704), PLANS["unlike"])
    local = [p.to_local() for p in model.parameters()]
    peaks = []
    for work in (lambda: hd.save_hf(model, folder), lambda: hd.load_hf(model, folder)):
        with Peak(*local) as storage:
            work()
        peaks.append(storage.peak)
    sizes = [p.numel() * p.dtype.itemsize for p in model.parameters()]
    return peaks, max(sizes), sum(sizes)


@pytest.mark.dist(4)
def test_no_rank_holds_more_than_one_tensor_beside_its_shards(tmp_path):
    ranks = run_world(_peaks, 4, str(tmp_path))
    for rank, ((saving, loading), largest, total) in enumerate(ranks):
        assert total > 8 * largest
        assert saving <= largest * (1.5 if rank == 0 else 0.5), "on rank 0 half of it arrives"
        assert loading <= largest + 64, "the file's memory is counted, as far as it is looked at"
