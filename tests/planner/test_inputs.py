"""What people have: devices, models and workloads, each by its own words."""

import json

import pytest
import torch
import transformers

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster_fields import cluster_of_fields, cluster_to_fields
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.library import DEVICES, find_device, recognize_device
from hdtensor.planner.models import MODELS, find_model, shape_of_config
from hdtensor.planner.workload import Workload


def test_every_device_of_the_library_has_sane_numbers_and_a_source():
    asked = (
        "RTX-2080 RTX-3080 RTX-3090 RTX-4090 Titan-RTX V100-16 A100-40 A100-80 H20 H800 H100 H200"
    )
    assert set(f"{asked} B200 GH200 MI300X 910B CPU".split()) <= set(DEVICES)
    for name, device in DEVICES.items():
        assert device.name == name
        assert len(device.source) > 20
        assert device.memory_bytes >= 4 << 30
        rates = list(device.flops.values())
        assert rates == sorted(rates, reverse=True)  # bfloat16, float16, float32
        if name != "CPU":
            # A byte read from memory pays for 16 to 500 operations on every accelerator so far.
            assert 16 < device.flops["float32"] * 4 / device.memory_bandwidth < 500 or name == "H20"
            assert device.link_bandwidth < device.memory_bandwidth
        assert DEVICES[name].network_bandwidth < device.link_bandwidth


@pytest.mark.parametrize("name", ["RTX-2080", "RTX-2080Ti", "Titan-RTX", "V100-16", "V100-32"])
def test_volta_and_turing_have_no_bfloat16(name):
    with pytest.raises(
        PlannerError, match=f"precision: {name} has no rate for bfloat16; it has float16"
    ):
        DEVICES[name].flops_of("bfloat16")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080Ti"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA TITAN RTX", "Titan-RTX"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA B200", "B200"),
        ("gpu:a100", "A100-40"),
        ("h800", "H800"),
    ],
)
def test_a_driver_s_name_is_recognized(said, name):
    assert recognize_device(said).name == name


def test_an_unknown_device_names_the_field_and_the_known_ones():
    with pytest.raises(PlannerError, match=r"cluster: 'H21' is unknown; known are RTX-2080, .*H20"):
        cluster_of_text("8x H21")
    with pytest.raises(PlannerError, match=r"device: 'Radeon' is unknown"):
        recognize_device("Radeon")


# Parameters as the papers and model cards count them.
@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("llama-7B", 6_738_415_616),
        ("llama-13B", 13_015_864_320),
        ("llama-70B", 68_976_648_192),
        ("llama-3-8B", 8_030_261_248),
        ("llama-3-70B", 70_553_706_496),
        ("mixtral-8x7B", 46_702_792_704),
        ("deepseek-moe-16B", 16_375_728_128),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, num_parameters):
    assert MODELS[name].num_parameters == num_parameters


def test_deepseek_v3_has_the_published_size_within_its_norms_and_biases():
    assert MODELS["deepseek-v3"].num_parameters == pytest.approx(671.0e9, rel=1e-4)
    assert MODELS["deepseek-v2-lite"].num_parameters == pytest.approx(15.7e9, rel=1e-3)


def test_the_paper_s_32b_is_table_6():
    shape = find_model("LLAMA-32b")
    assert (shape.num_layers, shape.hidden, shape.num_heads, shape.ffn) == (60, 6656, 64, 17920)
    assert (shape.vocab, shape.num_kv_heads, shape.num_matrices) == (50304, 64, 3)


SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2}),
        ("mistral", {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32}),
        ("qwen3", {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
        ("gemma", {**SMALL, "intermediate_size": 128, "num_key_value_heads": 1, "head_dim": 16}),
        ("mixtral", {**SMALL, "intermediate_size": 128, "num_local_experts": 4, "num_key_value_heads": 2}),
        ("gpt2", {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
        ("opt", {**SMALL, "ffn_dim": 256, "word_embed_proj_dim": 64, "max_position_embeddings": 50}),
        ("gpt_neo", {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}),
        ("deepseek_v3", {**SMALL, **MLA, **EXPERTS, "num_key_value_heads": 4, "intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_configuration_has_as_many_parameters_as_the_model_that_it_makes(kind, fields):
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of_config(json.loads(config.to_json_string(use_diff=False)))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    norms = (2 * shape.num_layers + 1) * shape.hidden
    assert shape.num_parameters - norms == matrices
    assert shape.is_tied == (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: missing; the configuration must have one of"),
        ({"hidden_size": "64"}, "hidden_size: must be an integer, got '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads: must be from 1 to 1073741824, got 0"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 heads must divide the hidden size 64"),
        ({"num_key_value_heads": 3}, "num_kv_heads: 3 must divide the 4 heads"),
        ({"model_type": "novel"}, "model_type: 'novel' is unknown; known are .* add num_matrices"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: must be true or false"),
        ({"num_local_experts": 4}, "num_experts_per_tok: missing"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_names_its_key(change, message):
    config = {"model_type": "llama", **SMALL, "intermediate_size": 128, **change}
    with pytest.raises(PlannerError, match=f"^{message}"):
        shape_of_config(config)


def test_a_configuration_is_read_from_its_file_or_folder(tmp_path):
    config = {"model_type": "llama", **SMALL, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(tmp_path) == find_model(tmp_path / "config.json")
    assert find_model(tmp_path).name == tmp_path.name
    with pytest.raises(
        PlannerError, match=r"^model: 'llama-33b' is unknown; .* Did you mean llama-32b\?"
    ):
        find_model("llama-33b")
    with pytest.raises(PlannerError, match=r"^model: cannot read the model's configuration"):
        find_model(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 0}, "batch: must be from 1"),
        ({"batch": 1.5}, "batch: must be an integer"),
        ({"context": -4}, "context: must be from 1"),
        ({"precision": "int8"}, "precision: must be one of bf16, bfloat16, fp16"),
        ({"optimizer": "lion"}, "optimizer: must be one of adamw, adam, sgd, sgd_momentum, got 'lion'"),
        ({"zero": 2}, "zero: must be from 0 to 1, got 2"),
        ({"recompute": True}, "recompute: must be one of none, full, got True"),
        ({"schedule": "ring"}, "schedule: must be one of 1F1B, GPipe"),
    ],
)  # fmt: skip
def test_a_wrong_workload_names_its_field(fields, message):
    with pytest.raises(PlannerError, match=f"^{message}"):
        Workload(**{"batch": 64, "context": 4096, **fields})


def test_a_workload_takes_short_and_unlike_spellings():
    workload = Workload(batch=8, context=16, precision="BF16", schedule="gpipe", optimizer="Adam")
    assert (workload.precision, workload.schedule, workload.optimizer) == (
        "bfloat16",
        "GPipe",
        "adam",
    )


def test_own_names_come_before_the_library():
    own = {"H20": DEVICES["CPU"]}
    assert find_device("h20", own) is DEVICES["CPU"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 80}, r"devices.mine.memory: 80 has no unit and would be 80 B. Write its unit, such as '80 GB'"),
        ({"memory": "80"}, r"such as '80 GB', or '80 B' if that is meant"),
        ({"flops": 989}, r"devices.mine.flops: 989 has no unit .* '989 TFLOPS'"),
        ({"flops": {"float32": 67.5}}, r"devices.mine.flops.float32: 67.5 has no unit"),
        ({"memory_bandwidth": 3350}, r"devices.mine.memory_bandwidth: 3350 has no unit .* '3350 GB/s'"),
        ({"network": 50}, r"devices.mine.network: 50 has no unit"),
    ],
)  # fmt: skip
def test_a_device_whose_number_lacks_its_unit_is_refused(change, message):
    fields = {"devices": {"mine": {"like": "H20", **change}}, "cluster": "2x mine"}
    with pytest.raises(
        PlannerError, match=f"^devices.mine.*{message.removeprefix('devices.mine')}"
    ):
        cluster_of_fields(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"network": 50}, "^network: 50 has no unit and would be 50 B/s"),
        ({"network": {"bandwidth": "50 GB/s", "latency": 5}}, "^network.latency: 5 has no unit .* '5 us'"),
        ({"nodes": [{"device": "H20", "inside": 900}]}, r"^nodes\[0\].inside: 900 has no unit"),
        ({"nodes": [{"device": "H20", "uplink": 1}]}, r"^nodes\[0\].uplink: 1 has no unit"),
    ],
)  # fmt: skip
def test_a_link_whose_number_lacks_its_unit_is_refused(fields, message):
    whole = fields if "nodes" in fields else {"cluster": "16x H20", **fields}
    with pytest.raises(PlannerError, match=message):
        cluster_of_fields(whole)


def test_plain_numbers_in_the_base_unit_and_small_ones_with_a_unit_stay_allowed():
    mine = {"like": "H20", "memory": 80e9, "flops": "5 FLOPS", "network": "10 kB/s"}
    cluster = cluster_of_fields(
        {"devices": {"mine": {**mine, "memory_bandwidth": 2e12}}, "nodes": ["16x mine"],
         "network": {"bandwidth": "1 kB/s", "latency": "3 s"}}
    )  # fmt: skip
    device = cluster.nodes[0].device
    assert (device.memory_bytes, device.flops_of("float32")) == (80_000_000_000, 5.0)
    assert (cluster.between.bandwidth, cluster.between.latency) == (1000.0, 3.0)
    written = json.loads(json.dumps(cluster_to_fields(cluster)))
    assert cluster_of_fields(written) == cluster
    small = cluster_of_fields(
        {"devices": {"mine": {**mine, "memory": "0.5 MB"}}, "cluster": "2x mine"}
    )
    assert cluster_of_fields(cluster_to_fields(small)).nodes[0].device.memory_bytes == 500_000
