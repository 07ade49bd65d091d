"""Profiles: units have the sizes that the model says; runs go on where they stopped; transfers really run."""

import dataclasses
import time

import pytest
import torch

from hdtensor.errors import PlannerError
from hdtensor.planner.models import shape_of_config
from hdtensor.planner.profile import ProfileOptions, missing_points, profile
from hdtensor.planner.profile_transfers import (
    measure_in_world,
    transfer_points,
)
from hdtensor.planner.profile_units import UnitPoint, make_unit, measure_unit, unit_points, work_of
from hdtensor.planner.profiles import Profile, TransferTime, UnitTime
from tests.planner.test_inputs import EXPERTS, MLA, SMALL
from tests.support.world import run_world


LLAMA = shape_of_config(
    {"model_type": "llama", **SMALL, "intermediate_size": 128, "num_key_value_heads": 2},
    name="tiny",
)
SHAPES = [
    LLAMA,
    shape_of_config({"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 96}),
    shape_of_config({"model_type": "deepseek_v3", **SMALL, **MLA, **EXPERTS, "n_shared_experts": 1}),
    shape_of_config({"model_type": "mixtral", **SMALL, "intermediate_size": 128, "num_local_experts": 4,
                     "num_experts_per_tok": 2, "num_key_value_heads": 2}),
]  # fmt: skip
FEW = ProfileOptions(
    tps=(1, 2), batch_sizes=(1,), contexts=(8, 16), precision="float32", num_ranks=()
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_units_have_the_parameters_that_the_model_says(shape):
    norm = shape.hidden
    for unit, expected in (
        ("attention", shape.attention_parameters + norm),
        ("mlp", shape.mlp_parameters + norm),
        ("layer", shape.layer_parameters),
        ("embedding", shape.vocab * shape.hidden),
        ("head", shape.head_parameters),
    ):
        module = make_unit(unit, shape, 1)
        assert sum(p.numel() for p in module.parameters()) == expected, unit


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("unit", ["attention", "mlp"])
def test_a_unit_cut_in_two_has_half_of_what_is_cut(shape, unit):
    whole, half = (
        {name: p.numel() for name, p in make_unit(unit, shape, tp).named_parameters()}
        for tp in (1, 2)
    )
    assert list(whole) == list(half)
    for name, num in whole.items():
        is_whole = any(word in name for word in ("norm", "gate", "down"))
        assert half[name] == (num if is_whole else num // 2), name


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_units_are_causal_and_work_on_tokens_one_by_one_otherwise(shape):
    x = torch.randn(2, 6, shape.hidden)
    for unit in ("attention", "mlp"):
        module = make_unit(unit, shape, 1)
        y = module(x)
        assert y.shape == x.shape
        if shape.num_experts and unit == "mlp":
            continue  # tokens are dealt by their place
        changed = x.clone()
        changed[:, 4:] += 1.0
        z = module(changed)
        torch.testing.assert_close(z[:, :4], y[:, :4])
        assert not torch.allclose(z[:, 4:], y[:, 4:])


def test_a_measurement_has_all_its_seconds():
    for unit in ("attention", "mlp", "layer", "embedding", "head"):
        point = UnitPoint(unit, 2, 2, 8)
        time = measure_unit(
            LLAMA, point, device=torch.device("cpu"), dtype=torch.float32, num_repeats=1
        )
        assert time[:4] == point
        assert min(time.forward, time.backward, time.update) > 0


def test_work_is_twice_the_parameters_for_each_token_beside_attention():
    matrices = LLAMA.mlp_parameters
    assert work_of(LLAMA, UnitPoint("mlp", 1, 2, 8)) == 2 * 16 * matrices
    assert work_of(LLAMA, UnitPoint("mlp", 2, 2, 8)) == 16 * matrices
    head = work_of(LLAMA, UnitPoint("head", 1, 1, 1))
    assert head == 2 * LLAMA.hidden * LLAMA.vocab
    both = work_of(LLAMA, UnitPoint("attention", 1, 1, 4)) + work_of(
        LLAMA, UnitPoint("mlp", 1, 1, 4)
    )
    assert work_of(LLAMA, UnitPoint("layer", 1, 1, 4)) == both


def test_degrees_that_do_not_divide_are_left_out():
    points = unit_points(LLAMA, tps=(1, 3, 4), batch_sizes=(1,), contexts=(8,))
    assert {point.tp for point in points} == {1, 4}
    with pytest.raises(PlannerError, match=r"^tp: none of 3, 5 divides the 4 heads"):
        unit_points(LLAMA, tps=(3, 5), batch_sizes=(1,), contexts=(8,))


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "profile.json"

    def interrupt(done, total, text):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(LLAMA, FEW, path=path, progress=interrupt)
    begun = Profile.load(path)
    assert len(begun.units) == 5
    seen = []
    found = profile(LLAMA, FEW, path=path, progress=lambda *values: seen.append(values))
    assert seen[0][:2] == (0, 11)
    assert found.units[:5] == begun.units
    assert missing_points(found, FEW) == ([], [])
    assert Profile.load(path) == found
    assert found.machine["torch"] == torch.__version__
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_no_time_measures_nothing_and_a_short_one_leaves_out_what_would_take_too_long():
    none = profile(LLAMA, dataclasses.replace(FEW, max_seconds=0.0))
    assert none.units == none.transfers == ()
    long = dataclasses.replace(FEW, contexts=(8, 1 << 20), max_seconds=1.0)
    found = profile(LLAMA, long)
    assert {time.context for time in found.units if time.unit != "embedding"} == {8}


def test_a_file_of_something_else_is_not_touched(tmp_path):
    path = tmp_path / "profile.json"
    profile(LLAMA, dataclasses.replace(FEW, contexts=(8,)), path=path)
    before = path.read_bytes()
    other = dataclasses.replace(LLAMA, name="other", num_layers=9)
    for model, options, field in (
        (other, FEW, "model"),
        (LLAMA, dataclasses.replace(FEW, precision="bfloat16"), "precision"),
    ):
        with pytest.raises(PlannerError, match=f"^{field}: the profile .* is of .*, not of"):
            profile(model, options, path=path)
    assert path.read_bytes() == before


def _measure(rank):
    points = transfer_points((2,), (64, 4096))
    times = measure_in_world(points, torch.device("cpu"))
    assert [time[:3] for time in times] == points
    assert {time.link for time in times} == {"inside"}
    assert all(time.seconds > 0 for time in times)
    # All ranks say the slowest one's time.
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, times)
    assert everyone[0] == everyone[1]


@pytest.mark.dist(2)
def test_transfers_in_a_world_that_exists():
    run_world(_measure, 2)


def _valid():
    return Profile(
        device="CPU",
        model=LLAMA,
        precision="float32",
        units=(UnitTime("mlp", 1, 1, 8, 0.5, 1.0), UnitTime("head", 2, 1, 8, 0.5, 1.0, 0.1)),
        transfers=(TransferTime("send", 2, 1024, 1e-4, "between"),),
        machine={"host": "a"},
    )


def test_a_profile_is_what_its_file_says(tmp_path):
    _valid().save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == _valid()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: must be from 1 to 1, got 2"),
        ({"units": 3}, "units: must be a list of measurements, got 3"),
        ({"units": [{"unit": "mlp"}]}, r"units\[0\]: the key 'backward' is missing"),
        ({"units": [{**UnitTime("mlp", 1, 1, 8, 0.5, 1.0)._asdict(), "forward": -1}]}, r"units\[0\].forward: must be from 0"),
        ({"units": [{**UnitTime("norm", 1, 1, 8, 0.5, 1.0)._asdict()}]}, r"units\[0\].unit: must be one of attention, mlp"),
        ({"transfers": [{**TransferTime("send", 1, 8, 1.0)._asdict()}]}, r"transfers\[0\].num_ranks: must be from 2"),
        ({"model": {"name": "x"}}, "model: .* it must have the fields of a ModelShape"),
        ({"speed": 1}, "profile: the key 'speed' is unknown"),
        ({"machine": {"host": 1}}, "machine.host: must be a text"),
    ],
)  # fmt: skip
def test_a_wrong_profile_names_its_field(change, message):
    with pytest.raises(PlannerError, match=f"^{message}"):
        Profile.from_dict({**_valid().to_dict(), **change})


def test_units_and_transfers_share_a_short_time(monkeypatch):
    """Processes take longer to start than there is time; units come first, with half of it."""
    given = []

    def measured(points, *, is_cuda, max_seconds):
        given.append((len(timed), max_seconds))
        return [TransferTime(*point, seconds=1e-3) for point in points[:3]]

    timed = []

    def unit(model, point, **others):
        timed.append(point)
        time.sleep(0.05)
        return UnitTime(*point, forward=0.01, backward=0.02)

    monkeypatch.setattr("hdtensor.planner.profile.measure_transfers", measured)
    monkeypatch.setattr("hdtensor.planner.profile.measure_unit", unit)
    many = dataclasses.replace(FEW, contexts=tuple(range(8, 40)), num_ranks=(2, 3), max_seconds=1.0)
    found = profile(LLAMA, many)
    assert 1 <= given[0][0] < len(timed) < 256
    assert 0.1 < given[0][1] <= 0.25 + 0.1
    assert len(found.transfers) == 3 * len(given)
    units, transfers = missing_points(found, many)
    assert len(units) == 256 - len(found.units)
    assert transfers


def test_transfers_are_measured_though_units_took_all_of_the_time(monkeypatch):
    def measured(points, *, is_cuda, max_seconds):
        assert max_seconds > 0
        return [TransferTime(*point, seconds=1e-3) for point in points]

    monkeypatch.setattr("hdtensor.planner.profile.measure_transfers", measured)
    tiny = dataclasses.replace(FEW, contexts=(8,), num_ranks=(2,), max_seconds=1e-3)
    found = profile(LLAMA, tiny)
    assert found.transfers
    assert len(found.units) <= 1


def test_more_processes_than_a_machine_can_start_are_refused():
    with pytest.raises(
        PlannerError, match=r"^num_ranks: 1000 processes are too many .* allowed: up to "
    ):
        ProfileOptions(num_ranks=(2, 1000))


def test_a_unit_beyond_the_machines_memory_is_refused_before_it_is_made():
    wide = dataclasses.replace(LLAMA, ffn=1 << 30, hidden=1 << 20)
    with pytest.raises(
        PlannerError, match=r"^memory: mlp with tp 1 .* GB of parameters and states"
    ):
        measure_unit(
            wide, UnitPoint("mlp", 1, 1, 8), device=torch.device("cpu"), dtype=torch.float32
        )
