"""Damaged and unfitting checkpoints: one error, the same on every rank, that names files and tensors."""

import json
import re
import shutil

import pytest
import torch

import hdtensor as hd
from tests.checkpoint.training import start, train
from tests.models.hf import build
from tests.support.world import run_world


def _save(rank, folder):
    model, optimizer = start("unlike")
    train(model, optimizer, range(1))
    hd.save_checkpoint(folder, model, optimizer, extra={"step": 1})
    hd.save_hf(model, folder + "_hf", max_shard_bytes=50_000)


def _load(rank, paths, plan, hugging_face, changes):
    """Return the error's text; nothing may have changed."""
    model, optimizer = start(plan, seed=9, **changes)
    before = [p.to_local().clone() for p in model.parameters()]
    path = paths[rank]
    with pytest.raises(hd.CheckpointError) as raised:
        hd.load_hf(model, path) if hugging_face else hd.load_checkpoint(path, model, optimizer)
    unchanged = all(
        torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before, strict=True)
    )
    return str(raised.value), unchanged


def load(paths, plan="unlike", *, hugging_face=False, atomic=True, **changes):
    """Load on four ranks, from one path or one for each; return what all of them say."""
    paths = [str(path) for path in (paths if isinstance(paths, list) else [paths] * 4)]
    results = run_world(_load, 4, paths, plan, hugging_face, changes)
    texts = {text for text, _ in results}
    assert len(texts) == 1, f"ranks say different things: {texts}"
    assert all(unchanged for _, unchanged in results) or not atomic
    return texts.pop()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "checkpoint"
    run_world(_save, 4, str(folder))
    return folder


@pytest.fixture
def bad(good, tmp_path):
    return shutil.copytree(good, tmp_path / "bad")


@pytest.fixture
def bad_hf(good, tmp_path):
    return shutil.copytree(f"{good}_hf", tmp_path / "bad_hf")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.dist(4)
@pytest.mark.parametrize("on", ["every rank", "one rank"])
def test_a_file_that_is_cut_off(good, bad, on):
    cut(bad / "__0_0.distcp")
    text = load(bad if on == "every rank" else [good, good, bad, good])
    assert re.search(r"bad/__0_0\.distcp is cut off after \d+ bytes; \w+\.\S+ is at bytes \d+ to", text)  # fmt: skip
    assert ("(rank 2)" in text) == (on == "one rank")


@pytest.mark.dist(4)
def test_a_file_that_is_missing(good, bad):
    (bad / "__2_0.distcp").unlink()
    assert re.search(r"bad/__2_0\.distcp is missing; \w+\.\S+ is at", load([good, bad, good, good]))


@pytest.mark.dist(4)
def test_a_file_that_is_damaged_inside(good, bad):
    path = bad / "__2_0.distcp"
    content = bytearray(path.read_bytes())
    content[100:2000] = bytes(1900)
    path.write_bytes(content)
    text = load([good, good, bad, good], atomic=False)
    assert re.search(r"bad/__2_0\.distcp is damaged where \w+\.\S+ is .*\(rank 2\)", text)


@pytest.mark.dist(4)
@pytest.mark.parametrize("content", [None, b"", b"no pickle", b"cos\nsystem\n"], ids=str)
def test_a_table_of_contents_that_is_missing_or_damaged(good, bad, content):
    path = bad / ".metadata"
    path.unlink() if content is None else path.write_bytes(content)
    what = "missing: the folder is no checkpoint" if content is None else "damaged"
    assert f"bad/.metadata is {what}" in load([good, bad, good, good])


@pytest.mark.dist(4)
def test_no_folder_and_a_file_for_a_folder(good, tmp_path):
    assert "nothing/.metadata is missing" in load(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    assert "file is a file; a checkpoint is a folder" in load([good, good, tmp_path / "file", good])


@pytest.mark.dist(4)
def test_all_names_that_do_not_fit_are_listed(good):
    text = load(good, "three", num_hidden_layers=3)
    assert "the checkpoint lacks" in text
    assert "model.model.layers.2.input_layernorm.weight" in text
    assert re.search(r"and \d+ more", text), "36 names are too many for one message"
    text = load(good, "three", tie_word_embeddings=True)
    assert "names that nobody asks for: optimizer.param_groups.lm_head.weight.lr" in text or (
        "optimizer.state.lm_head.weight.exp_avg" in text
    )


@pytest.mark.dist(4)
def test_shapes_that_do_not_fit_are_listed(good):
    text = load(good, "three", vocab_size=66)
    assert "model.lm_head.weight (shape (64, 32), (66, 32))" in text
    assert "optimizer.state.model.embed_tokens.weight.exp_avg (shape (64, 32), (66, 32))" in text


def _other_dtype(rank, folder):
    model, _ = start("unlike")
    with pytest.raises(hd.CheckpointError) as raised:
        hd.load_checkpoint(folder, model.float())
    return str(raised.value)


@pytest.mark.dist(4)
def test_dtypes_that_do_not_fit_are_listed(good):
    for text in run_world(_other_dtype, 4, str(good)):
        assert "model.lm_head.weight (torch.float64, torch.float32)" in text


def _partly(rank, folder):
    model, optimizer = start("three", seed=9, num_hidden_layers=3)
    before = model.model.layers[2].mlp.up_proj.weight.to_local().clone()
    assert hd.load_checkpoint(folder, model, optimizer, strict=False) == {"step": 1}
    assert torch.equal(model.model.layers[2].mlp.up_proj.weight.to_local(), before)
    found = hd.load_hf(model, folder + "_hf", strict=False)
    assert len(found.missing_keys) == 9
    assert not found.unexpected_keys
    return model.model.layers[0].mlp.up_proj.weight.detach().full_tensor().sum().item()


@pytest.mark.dist(4)
def test_parts_can_be_loaded(good):
    loaded = run_world(_partly, 4, str(good))[0]
    fresh = build("llama", 9, num_hidden_layers=3).model.layers[0].mlp.up_proj.weight
    assert loaded != fresh.sum().item()


@pytest.mark.dist(4)
@pytest.mark.parametrize("on", ["every rank", "one rank"])
def test_hf_files_that_are_cut_off(good, bad_hf, on):
    cut(bad_hf / "model-00002-of-00004.safetensors")
    good_hf = f"{good}_hf"
    paths = bad_hf if on == "every rank" else [good_hf, good_hf, good_hf, bad_hf]
    text = load(paths, hugging_face=True)
    assert re.search(r"model-00002-of-00004\.safetensors cannot be read: it has \d+ bytes, its header says \d+", text)  # fmt: skip


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "its 0 bytes are no header"),
        (b"\xff" * 40, "no header, or the file is cut off"),
        ((8).to_bytes(8, "little") + b"no json!", "Expecting value"),
        ((2).to_bytes(8, "little") + b"[]", "pop"),
        (
            (65).to_bytes(8, "little")
            + b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,8]}}'.ljust(65)
            + b"x" * 8,
            "a has 8 bytes, which is not (2, 2) of F32",
        ),
        (
            (65).to_bytes(8, "little")
            + b'{"a":{"dtype":"F4","shape":[2,2],"data_offsets":[0,8]}}'.ljust(65)
            + b"x" * 8,
            "F4",
        ),
    ],
    ids=["missing", "empty", "length", "no json", "no object", "size", "dtype"],
)
def test_hf_files_with_broken_headers(good, bad_hf, content, message):
    path = bad_hf / "model-00001-of-00004.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    text = load([f"{good}_hf", bad_hf, f"{good}_hf", f"{good}_hf"], hugging_face=True)
    assert "model-00001-of-00004.safetensors cannot be read" in text
    assert message in text


@pytest.mark.dist(4)
def test_hf_index_that_is_damaged_or_lies(good, bad_hf):
    path = bad_hf / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"]["no.such.weight"] = index["weight_map"][name]
    path.write_text(json.dumps(index))
    assert "no.such.weight" in load(bad_hf, hugging_face=True)
    path.write_text("{")
    assert "model.safetensors.index.json is damaged" in load(bad_hf, hugging_face=True)
    path.unlink()
    assert "holds neither model.safetensors nor" in load(bad_hf, hugging_face=True)


@pytest.mark.dist(4)
def test_hf_names_and_shapes_that_do_not_fit_are_listed(good):
    text = load(f"{good}_hf", hugging_face=True, num_hidden_layers=3)
    assert "lacks model.layers.2.input_layernorm.weight, " in text
    text = load(f"{good}_hf", hugging_face=True, num_hidden_layers=1, vocab_size=66)
    assert "names that the model has no place for: model.layers.1.input_layernorm.weight, " in text
    assert "lm_head.weight (shape (64, 32), (66, 32))" in text


def _cannot_write(rank, folder):
    model, optimizer = start("unlike")
    texts = []
    for save in (hd.save_checkpoint, hd.save_hf):
        with pytest.raises(hd.CheckpointError) as raised:
            save(model, folder) if save is hd.save_hf else save(folder, model, optimizer)
        texts.append(str(raised.value))
    return texts


@pytest.mark.dist(4)
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    results = run_world(_cannot_write, 4, str(tmp_path / "file"))
    assert all(texts == results[0] for texts in results)
    assert all("file is a file; a checkpoint is a folder" in text for text in results[0])


def _fails_while_writing(rank, folder):
    model, _ = start("unlike")
    if rank == 1:

        class Full(hd.checkpoint.hugging_face.TensorWriter):
            def write(self, name, tensor):
                raise OSError(28, "No space left on device")

        hd.checkpoint.hugging_face.TensorWriter, kept = (
            Full,
            hd.checkpoint.hugging_face.TensorWriter,
        )
    try:
        with pytest.raises(hd.CheckpointError, match=r"No space left on device \(rank 1\)"):
            hd.save_hf(model, folder, max_shard_bytes=30_000)
    finally:
        if rank == 1:
            hd.checkpoint.hugging_face.TensorWriter = kept


@pytest.mark.dist(4)
def test_a_full_disk_on_one_rank_ends_on_all(tmp_path):
    run_world(_fails_while_writing, 4, str(tmp_path))
    assert not list(tmp_path.iterdir()), "no file may look whole"


def _refused(rank, folder):
    model, optimizer = start("unlike")
    for extra in ({"f": lambda: 0}, {"f": re.compile}):
        with pytest.raises(hd.CheckpointError, match="extra takes plain values"):
            hd.save_checkpoint(folder, model, optimizer, extra=extra)


@pytest.mark.dist(4)
def test_extras_are_plain_values(tmp_path):
    run_world(_refused, 4, str(tmp_path))
