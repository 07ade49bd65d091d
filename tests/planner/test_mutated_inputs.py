"""Ten thousand mutated inputs: each is an error of ours that names something, or a valid value."""

import json
import random

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.cluster_fields import cluster_of_fields, cluster_to_fields
from hdtensor.planner.cluster_files import parse_cluster
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.machine import cluster_of_slurm, cluster_of_topo
from hdtensor.planner.model import ModelShape
from hdtensor.planner.models import find_model, shape_of_config
from hdtensor.planner.workload import Workload
from tests.planner.test_cluster_inputs import MINE, TOPO
from tests.planner.test_inputs import EXPERTS, MLA, SMALL


ODD = (
    None,
    True,
    -1,
    0,
    1 << 70,
    1e300,
    float("nan"),
    "",
    "x" * 2000,
    "8",
    [],
    {},
    [[]],
    "é\x00\n",
)
CONFIGS = (
    {"model_type": "llama", **SMALL, "intermediate_size": 128, "num_key_value_heads": 2},
    {"model_type": "deepseek_v3", **SMALL, **MLA, **EXPERTS, "intermediate_size": 128},
    {
        "text_config": {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "vocab_size": 96,
        }
    },
)
JOB = {
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_GPUS_PER_NODE": "h100:4",
    "SLURM_TASKS_PER_NODE": "8(x2),4",
    "SLURM_NTASKS": "20",
    "SLURM_JOB_NODELIST": "gpu[01-03]",
}
WORK = {"batch": 64, "context": 4096, "precision": "bf16", "optimizer": "adam", "zero": 1}


def mutated_text(random, text, alphabet="0189xX+/@ .,:-[]{}()\"'&*!#\n\t%eé\x00ABz"):
    """Return a text with some characters removed, doubled, changed or moved."""
    letters = list(text)
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(letters) + 1)
        kind = random.randrange(5)
        if kind == 0:
            letters[at : at + random.randint(1, 8)] = []
        elif kind == 1:
            letters[at:at] = random.choices(alphabet, k=random.randint(1, 4))
        elif kind == 2:
            letters[at : at + 1] = random.choice(alphabet)
        elif kind == 3:
            part = letters[at : at + random.randint(1, 20)]
            letters[at:at] = part * random.randint(1, 3)
        else:
            letters = letters[at:] + letters[:at]
    return "".join(letters)


def mutated_value(random, value):
    """Return a JSON value with one part replaced, removed, or renamed."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        kind = random.randrange(5)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return {(mutated_text(random, k) if k == key else k): v for k, v in value.items()}
        return {**value, key: mutated_value(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        return [mutated_value(random, item) if i == at else item for i, item in enumerate(value)]
    if isinstance(value, str) and random.random() < 0.5:
        return mutated_text(random, value)
    if isinstance(value, int | float) and random.random() < 0.5:
        return random.choice((value * -1, value * 1000, value / 3, value + 1, str(value)))
    return random.choice(ODD)


def _cluster(make):
    found = make()
    assert isinstance(found, Cluster)
    assert found.num_ranks == sum(1 for _ in found.devices()) >= 1
    assert found.node_of(found.num_ranks - 1) == len(found.nodes) - 1
    assert found.link(0, found.num_ranks - 1).bandwidth > 0


def _file(random):
    text = mutated_text(random, MINE)
    _cluster(lambda: parse_cluster(text))


def _json(random):
    fields = cluster_to_fields(parse_cluster(MINE)) if random.random() < 0.1 else FIELDS
    value = mutated_value(random, mutated_value(random, fields))
    _cluster(lambda: cluster_of_fields(value))


FIELDS = json.loads(json.dumps(cluster_to_fields(parse_cluster(MINE))))


def _json_text(random):
    text = mutated_text(random, json.dumps(FIELDS))
    _cluster(lambda: parse_cluster(text))


def _line(random):
    line = random.choice(("16x H800 + 32x H20", "2x 8xA100/4 @ east + 3x 910B", "32x V100-16/4"))
    text = mutated_text(random, line)
    _cluster(lambda: cluster_of_text(text))


def _topo(random):
    text = mutated_text(random, TOPO)
    _cluster(
        lambda: cluster_of_topo(
            text, random.choice(("H20", "A100", None)), random.choice((1, 3, 0))
        )
    )


def _slurm(random):
    job = dict(JOB)
    for name in random.sample(list(job), k=random.randint(1, 3)):
        if random.random() < 0.3:
            del job[name]
        else:
            job[name] = mutated_text(random, job[name])
    _cluster(lambda: cluster_of_slurm(job, random.choice((None, "H20"))))


def _config(random):
    found = shape_of_config(mutated_value(random, random.choice(CONFIGS)))
    assert isinstance(found, ModelShape)
    assert found.num_parameters > 0


def _model(random):
    assert find_model(mutated_text(random, random.choice(("llama-32B", "mixtral")))).num_layers > 0


def _workload(random):
    key = random.choice(list(WORK))
    found = Workload(**{**WORK, key: mutated_value(random, WORK[key])})
    assert found.batch * found.context > 0


@pytest.mark.parametrize(
    ("kind", "num_inputs"),
    [
        (_file, 1600),
        (_json, 2000),
        (_json_text, 1400),
        (_line, 2000),
        (_topo, 1000),
        (_slurm, 1000),
        (_config, 1400),
        (_model, 200),
        (_workload, 400),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mutated_input_is_our_error_or_a_valid_value(kind, num_inputs):
    valid = 0
    for seed in range(num_inputs):
        try:
            kind(random.Random(seed))
        except PlannerError as error:
            message = str(error)
            assert len(message) > 20
            assert len(message) < 2000
        else:
            valid += 1
    assert 0 < valid < num_inputs
