"""Folders as they are found: tied weights in every form, links, other dtypes, other groups of options, disks that are full."""

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import hdtensor as hd
from tests.checkpoint.training import start, train, weights
from tests.models.hf import batch, build
from tests.support.world import run_world


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _write(folder, tensors, *, num_files=1):
    """Write tensors as one file, or as several with an index."""
    folder.mkdir(parents=True)
    names = sorted(tensors)
    if num_files == 1:
        save_file({n: tensors[n].contiguous() for n in names}, folder / "model.safetensors")
        return
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = names[number::num_files]
        save_file({n: tensors[n].contiguous() for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _read(rank, folders, changes):
    """Load each folder into a fresh model; return whole weights, or the error's text."""
    found = []
    for folder in folders:
        model, _ = start("unlike", seed=9, **changes)
        try:
            hd.load_hf(model, folder)
            found.append(weights(model))
        except hd.CheckpointError as error:
            found.append(str(error))
    return found


def read(folders, **changes):
    results = run_world(_read, 4, [str(folder) for folder in folders], changes)
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            assert type(ours) is type(theirs)
            assert ours == theirs if isinstance(ours, str) else True
    return results[0]


@pytest.mark.dist(4)
def test_tied_weights_in_every_form(tmp_path):
    tied = build("llama", 0, tie_word_embeddings=True).state_dict()
    once = {n: t.clone() for n, t in tied.items() if n != HEAD}
    forms = {
        "once": once,
        "twice": {n: t.clone() for n, t in tied.items()},
        "head": {n: t.clone() for n, t in tied.items() if n != EMBED},
        "none": {n: t for n, t in once.items() if n != EMBED},
    }
    folders = []
    for form, tensors in forms.items():
        for num_files in (1, 3):
            folders.append(tmp_path / f"{form}{num_files}")
            _write(folders[-1], tensors, num_files=num_files)
    found = read(folders, tie_word_embeddings=True)
    for weights_ in found[:6]:
        torch.testing.assert_close(weights_, once, rtol=0, atol=0)
    assert all(f"lacks {EMBED}" in text for text in found[6:])
    # A model of two tensors is not given one for both in silence.
    assert f"lacks {HEAD}" in read(folders[:1])[0]


@pytest.mark.dist(4)
def test_dtypes_are_converted_and_integers_are_not(tmp_path):
    plain = build("llama", 0).state_dict()
    folders = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32):
        folders.append(tmp_path / str(dtype))
        _write(folders[-1], {n: t.to(dtype) for n, t in plain.items()}, num_files=2)
    *found, text = read(folders)
    for weights_, dtype in zip(found, (torch.bfloat16, torch.float16, torch.float32), strict=True):
        wanted = {n: plain[n].to(dtype).to(t.dtype) for n, t in weights_.items()}
        torch.testing.assert_close(weights_, wanted, rtol=0, atol=0)
    assert f"{HEAD} (torch.int32, torch.float64)" in text


@pytest.mark.dist(4)
def test_links_and_what_is_no_folder_of_safetensors(tmp_path):
    plain = build("llama", 0).state_dict()
    _write(tmp_path / "blobs", plain, num_files=2)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in (tmp_path / "blobs").iterdir():  # as the hub's cache does
        (linked / path.name).symlink_to(os.path.relpath(path, linked))
    (tmp_path / "link").symlink_to(linked, target_is_directory=True)
    (tmp_path / "bin").mkdir()
    torch.save(plain, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "model.safetensors").symlink_to(tmp_path / "nowhere")
    _write(tmp_path / "partial", plain, num_files=3)
    (tmp_path / "partial" / "model-00002-of-00003.safetensors").unlink()
    _write(tmp_path / "outside", plain, num_files=2)
    index = tmp_path / "outside" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../blobs/model-00001"))
    names = ("linked", "link", "bin", "dangling", "partial", "nowhere", "outside")
    first, second, *texts = read([tmp_path / name for name in names])
    torch.testing.assert_close(first, plain, rtol=0, atol=0)
    torch.testing.assert_close(second, plain, rtol=0, atol=0)
    assert "pytorch_model.bin" in texts[0]
    assert "from_pretrained" in texts[0]
    assert "holds neither model.safetensors nor" in texts[1]
    assert "model-00002-of-00003.safetensors cannot be read" in texts[2]
    assert "nowhere is no folder" in texts[3]
    assert "../blobs/model-00001-of-00002.safetensors is no name of a file in it" in texts[4]


def _save_through_links(rank, folder):
    model, _ = start("unlike")
    hd.save_hf(model, folder, max_shard_bytes=50_000)
    hd.save_hf(model, folder)


@pytest.mark.dist(4)
def test_saving_over_links_leaves_what_they_show(tmp_path):
    plain = build("llama", 1).state_dict()
    _write(tmp_path / "blobs", plain)
    blob, linked = tmp_path / "blobs" / "model.safetensors", tmp_path / "linked"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(blob)
    (tmp_path / "link").symlink_to(linked, target_is_directory=True)
    run_world(_save_through_links, 4, str(tmp_path / "link"))
    torch.testing.assert_close(load_file(blob), plain, rtol=0, atol=0)
    assert not (linked / "model.safetensors").is_symlink()
    torch.testing.assert_close(load_file(linked / "model.safetensors"), build("llama").state_dict(), rtol=0, atol=0)  # fmt: skip


def _full_disk(rank, folder, where):
    """One rank's write fails, at one place after another: all ranks say so, and nothing looks whole."""
    model, optimizer = start("unlike")
    home, name = {
        "data": (dcp.FileSystemWriter, "write_data"),
        "metadata": (dcp.FileSystemWriter, "finish"),
        "file": (hd.checkpoint.hugging_face.TensorWriter, "write"),
        "close": (hd.checkpoint.hugging_face.TensorWriter, "close"),
        "header": (hd.checkpoint.hugging_face.TensorWriter, "__init__"),
        "config": (hd.checkpoint.hugging_face, "_write_config"),
    }[where]
    kept = getattr(home, name)

    def save():
        if home is dcp.FileSystemWriter:
            hd.save_checkpoint(folder, model, optimizer)
        else:
            hd.save_hf(model, folder, max_shard_bytes=30_000)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    bad = 0 if where in ("metadata", "config") else 1
    if rank == bad:
        setattr(home, name, fail)
    try:
        with pytest.raises(hd.CheckpointError, match=rf"No space left on device.*\(rank {bad}\)") as raised:  # fmt: skip
            save()
    finally:
        setattr(home, name, kept)
    return str(raised.value)


@pytest.mark.dist(4)
@pytest.mark.parametrize("where", ["data", "metadata", "file", "close", "header", "config"])
def test_a_disk_that_is_full_on_one_rank(tmp_path, where):
    texts = set(run_world(_full_disk, 4, str(tmp_path), where))
    assert len(texts) == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert ".metadata" not in left
    if where != "config":
        assert not any("safetensors" in name for name in left)


def _cannot_write(rank, folders):
    model, optimizer = start("unlike")
    texts = []
    for folder in folders:
        with pytest.raises(hd.CheckpointError) as raised:
            hd.save_checkpoint(folder, model, optimizer)
        texts.append(str(raised.value))
        with pytest.raises(hd.CheckpointError) as raised:
            hd.save_hf(model, folder)
        texts.append(str(raised.value))
    return texts


@pytest.mark.dist(4)
def test_folders_that_nobody_can_write_to(tmp_path):
    (tmp_path / "file").write_text("")
    folders = [str(tmp_path / "file" / "inside"), "/proc/nowhere"]
    results = run_world(_cannot_write, 4, folders)
    assert all(texts == results[0] for texts in results)
    assert all("Not a directory" in text for text in results[0][:2])
    assert all("No such file" in text for text in results[0][2:])


def _groups(model, *names):
    """A group for each list of parts of names, and one for the rest; norms do not decay."""
    groups = [[] for _ in range(len(names) + 1)]
    for name, p in model.named_parameters():
        groups[next((i for i, parts in enumerate(names) if any(x in name for x in parts)), -1)].append(p)  # fmt: skip
    groups = [{"params": g, "lr": 2e-2} for g in groups]
    groups[0] |= {"weight_decay": 0.0, "lr": 1e-2} if names else {}
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def _save_groups(rank, folder):
    model, _ = start("pair")
    optimizer = _groups(model, ["norm"])
    train(model, optimizer, range(2))
    hd.save_checkpoint(folder, model, optimizer)
    return train(model, optimizer, range(2, 4)), weights(model)


def _load_groups(rank, folder):
    """The same groups, more of them in another order; and such as mix what has unlike options. Gradients may be there."""
    runs = []
    for names in ([["norm"]], [["norm"], ["lm_head", "q_proj"], ["mlp"]]):
        model, _ = start("unlike", seed=9)
        model(**hd.distribute_batch(model, batch(7))).loss.backward()
        optimizer = _groups(model, *names)
        hd.load_checkpoint(folder, model, optimizer)
        optimizer.zero_grad()
        runs.append((train(model, optimizer, range(2, 4)), weights(model)))
    texts = []
    for names in ([["norm", "lm_head"]], []):
        model, _ = start("three", seed=9)
        before = weights(model)
        with pytest.raises(hd.CheckpointError) as raised:
            hd.load_checkpoint(folder, model, _groups(model, *names))
        texts.append(str(raised.value))
        torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    return runs, texts


@pytest.mark.dist(4)
def test_groups_of_options_and_other_numbers_of_ranks(tmp_path):
    expected, wanted = run_world(_save_groups, 3, str(tmp_path))[0]
    results = run_world(_load_groups, 4, str(tmp_path))
    for runs, texts in results:
        for losses, after in runs:
            torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(after, wanted, rtol=1e-5, atol=1e-7)
        assert texts == results[0][1]
        assert all("unlike options" in text and "weight_decay 0.0" in text for text in texts), texts
