"""What people have: devices, models, clusters and workloads, each by its own words."""

import json

import pytest
import torch
import transformers

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Link
from hdtensor.planner.cluster_fields import cluster_of_fields, cluster_to_fields
from hdtensor.planner.cluster_files import parse_cluster, read_cluster
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.library import DEVICES, find_device, recognize_device
from hdtensor.planner.machine import cluster_of_slurm, this_machine
from hdtensor.planner.models import MODELS, find_model, shape_of_config
from hdtensor.planner.workload import Workload


TOPO = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-7
GPU1\tNV4\t X \tSYS\tSYS\t0-7
GPU2\tSYS\tSYS\t X \tNV4\t8-15
GPU3\tSYS\tSYS\tNV4\t X \t8-15
"""

MINE = """
# two halls
devices:
  fast: {like: CPU, speed: 2.0}
  own: {memory: 80 GiB, flops: {bfloat16: 500 TFLOPS}, memory_bandwidth: 2 TB/s, link_bandwidth: 200 GB/s}
nodes:
  - 2x 2x fast @ east
  - {device: own, count: 3, name: b, zone: west, inside: {bandwidth: 100 GB/s, latency: 3 us}, uplink: 25 GB/s}
  - {device: H20, repeat: 2}
network: {bandwidth: 400 Gb/s, latency: 20 us}
links:
  - {between: [east, west], bandwidth: 10 Gb/s, latency: 1 ms}
"""


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


def test_a_cluster_of_one_line():
    cluster = cluster_of_text("16x H800 + 2x 12x H20 + 5x V100/4 @ b")
    assert [(node.device.name, node.num_devices) for node in cluster.nodes] == [
        ("H800", 8), ("H800", 8), ("H20", 12), ("H20", 12), ("V100-16", 4), ("V100-16", 1)
    ]  # fmt: skip
    assert cluster.nodes[-1].zone == "b"
    # A link is as fast as its slower end.
    assert cluster.link(0, 20).bandwidth == DEVICES["H20"].network_bandwidth
    assert cluster.link(0, 44).bandwidth == DEVICES["V100-16"].network_bandwidth
    assert cluster.link(0, 1).bandwidth == DEVICES["H800"].link_bandwidth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cluster: '' is no group of devices; allowed: 16x H800"),
        ("H800", "cluster: 'H800' is no group"),
        ("8x H800 +", "cluster: '' is no group"),
        ("0x H20", "cluster: '0x H20' is no device at all"),
        ("2x 8x H20/4", "cluster: '2x 8x H20/4' says the size of a node twice"),
        ("999999x H20", "cluster: more than 65536 devices"),
        ("8x H20 @ a b", "cluster: '8x H20 @ a b' is no group"),
    ],
)
def test_a_wrong_line_is_refused(text, message):
    with pytest.raises(PlannerError, match=f"^{message}"):
        cluster_of_text(text)


def test_a_file_has_devices_of_its_own_nodes_and_links():
    cluster = parse_cluster(MINE)
    assert cluster.num_ranks == 2 + 2 + 3 + 8 + 8
    fast, own = cluster.nodes[0].device, cluster.nodes[2].device
    assert fast.flops["float32"] == 2 * DEVICES["CPU"].flops["float32"]
    assert fast.memory_bytes == DEVICES["CPU"].memory_bytes
    assert (own.memory_bytes, own.flops) == (80 << 30, {"bfloat16": 5e14})
    assert cluster.link(4, 5) == Link(1e11, pytest.approx(3e-6))
    assert cluster.link(0, 4) == Link(1.25e9, 1e-3)  # east to west
    assert cluster.link(0, 2) == cluster.link(4, 8) == Link(5e10, pytest.approx(2e-5))
    assert cluster.nodes[2].uplink == 25e9
    assert cluster.nodes[0].uplink is None  # the file says what network each device has
    assert cluster.nodes[3].uplink is None
    shared = parse_cluster(
        "devices: {fast: {like: CPU}, far: {like: H20}}\nnodes: [2x fast, 2x far]"
    )
    assert [node.uplink for node in shared.nodes] == [1.25e9, None]
    assert shared.link(0, 2).bandwidth == 1.25e9


def test_a_cluster_is_what_its_fields_say():
    for cluster in (parse_cluster(MINE), cluster_of_text("16x A100-80 + 96x V100/4")):
        fields = json.loads(json.dumps(cluster_to_fields(cluster)))
        assert cluster_of_fields(fields) == cluster
    assert len(cluster_to_fields(cluster_of_text("512x H20 + 512x H800"))["nodes"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nods: [8x H20]", r"nods: unknown key; did you mean 'nodes'\? allowed:"),
        ("cluster: 8x H20\nnodes: [8x H20]", "nodes: give either nodes"),
        ("nodes: []", "nodes: must hold at least one node"),
        ("nodes: [{count: 8}]", r"nodes\[0\].device: missing"),
        ("nodes: [{device: H20, count: 0}]", r"nodes\[0\].count: must be from 1 to 65536, got 0"),
        ("nodes: [{device: H20, cuont: 1}]", r"nodes\[0\].cuont: unknown key; did you mean 'count'"),
        ("nodes: [{device: H20, inside: fast}]", r"nodes\[0\].inside: must be a number with one of"),
        ("cluster: 8x H20\nnetwork: 5 GB", "network: must be a number with one of the units B/s"),
        ("cluster: 8x a\ndevices: {a: {like: H20, speed: fast}}", "devices.a.speed: must be a number, got 'fast'"),
        ("cluster: 8x H20\nnetwork: 0", "network: must be from 1 to"),
        ("cluster: 8x H20\nnetwork: -1", "network: must be from 1 to"),
        ("cluster: 8x H20\nlinks: [{between: [a, b], bandwidth: 1 GB/s}]", r"links\[0\].between: must be two of the zones and devices H20"),
        ("devices: {a: {like: b}}\ncluster: 8x a", r"devices.a.like: 'b' is unknown"),
        ("devices: {a: {memory: 1 GB}}\ncluster: 8x a", r"devices.a.flops: missing"),
        ("devices: {a: {flops: 1 TFLOPS}}\ncluster: 8x a", r"devices.a.memory: missing"),
        ("devices: {a: {like: H20, speed: fast}}\ncluster: 8x a", r"devices.a.speed: must be a number"),
        ("a: b: c", "cluster: the description of the cluster is not YAML: .* at line 1"),
        ("a: &x 1", "cluster: the description of the cluster: an anchor at line 1 is not read"),
        ("a: 1\na: 2", "cluster: the description of the cluster: the key 'a' stands twice"),
        ("{\"a\": NaN}", "cluster: NaN is not JSON"),
        ("[" * 5000, "cluster: the description of the cluster is nested deeper"),
        ("- " * 5000, "cluster: the description of the cluster is nested deeper"),
        ("", "cluster: must be an object"),
    ],
)  # fmt: skip
def test_a_wrong_description_names_its_field(text, message):
    with pytest.raises(PlannerError, match=f"^{message}"):
        parse_cluster(text)


def test_nvidia_smi_gives_the_links_and_the_user_the_kind(tmp_path):
    path = tmp_path / "topo.txt"
    path.write_text(TOPO)
    cluster = read_cluster(str(path), device="A100-80", num_nodes=2)
    assert [node.num_devices for node in cluster.nodes] == [4, 4]
    assert cluster.nodes[0].inside.bandwidth == 10e9  # SYS, the slowest inside
    with pytest.raises(
        PlannerError, match=r"^device: .* prints links but no kind of device; give one"
    ):
        read_cluster(str(path))
    path.write_text(TOPO.replace("SYS", "SUS"))
    with pytest.raises(
        PlannerError, match=r"^cluster: the link between GPU0 and GPU2 is 'SUS'; allowed"
    ):
        read_cluster(str(path), device="A100")


def test_slurm_that_is_too_large_is_refused_before_anything_is_made():
    for tasks in ("1(x1048576)", "65537", "32768(x2),1"):
        with pytest.raises(
            PlannerError, match=r"^SLURM_TASKS_PER_NODE: .* is more than 65536 ranks"
        ):
            cluster_of_slurm({"SLURM_TASKS_PER_NODE": tasks}, "H20")
        with pytest.raises(
            PlannerError, match=r"^SLURM_TASKS_PER_NODE: .* is more than 65536 ranks"
        ):
            cluster_of_slurm({"SLURM_TASKS_PER_NODE": tasks, "SLURM_GPUS_PER_NODE": "1"}, "H20")
    # A node of very many and very many nodes of one: cyclic order takes no longer than their ranks.
    cyclic = {"SLURM_TASKS_PER_NODE": "30000,1(x30000)", "SLURM_DISTRIBUTION": "cyclic"}
    with pytest.raises(PlannerError, match=r"^SLURM_DISTRIBUTION: cyclic deals"):
        cluster_of_slurm(cyclic, "H20")


def test_slurm_says_nodes_and_perhaps_devices():
    job = {"SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_PER_NODE": "h100:4"}
    assert [(n.device.name, n.num_devices) for n in cluster_of_slurm(job).nodes] == [
        ("H100", 4)
    ] * 3
    tasks = {"SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_NTASKS": "20"}
    assert [n.num_devices for n in cluster_of_slurm(tasks, "H20").nodes] == [8, 8, 4]
    for environ, message in (
        ({}, "the environment says nothing about nodes"),
        (tasks, "device: SLURM does not say the kind"),
        ({**job, "SLURM_GPUS_PER_NODE": "h100"}, "SLURM_GPUS_PER_NODE: must be a number such as 8"),
        ({**job, "SLURM_JOB_NUM_NODES": "-1"}, "SLURM_JOB_NUM_NODES: must be from 1"),
        ({**tasks, "SLURM_DISTRIBUTION": "cyclic"}, "SLURM_DISTRIBUTION: cyclic deals"),
        ({**tasks, "SLURM_NTASKS": "21"}, "SLURM_TASKS_PER_NODE: .* is 20 ranks"),
        ({"SLURM_GPUS_PER_NODE": "8"}, "SLURM_JOB_NUM_NODES: missing"),
    ):
        with pytest.raises(PlannerError, match=f"^{message}"):
            read_cluster("slurm", environ=environ)


def test_words_that_do_not_fit_a_source_are_refused(tmp_path):
    with pytest.raises(PlannerError, match=r"^nodes: 2 is for what `nvidia-smi topo -m` printed"):
        read_cluster("8x H20", num_nodes=2)
    with pytest.raises(PlannerError, match=r"^device: 'H20' is for SLURM"):
        read_cluster("8x H20", device="H20")
    with pytest.raises(PlannerError, match=r"^cluster: there is no file"):
        read_cluster(str(tmp_path / "none.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlannerError, match=r"^cluster: .* is no UTF-8 text"):
        read_cluster(str(tmp_path / "bytes.yaml"))


def test_this_machine_has_its_cores():
    cluster = this_machine()
    assert cluster.num_ranks >= 1
    assert all(node.device.memory_bytes > 1 << 20 for node in cluster.nodes)
    assert cluster_of_fields(cluster_to_fields(cluster)) == cluster


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
