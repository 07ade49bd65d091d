"""What programs on disk are kept by, and what comes back of them."""

import io
import pickle
import shutil

import torch

import hdtensor as hd
from hdtensor.ops import tangents
from hdtensor.ops.inner import keep_extents
from hdtensor.ops.tangents import sources_hash


def _cut():
    with hd.as_rank(0):
        whole = torch.arange(12.0).view(6, 2)
        return hd.distribute_tensor(whole, "S0 / 0:R 1:R", top_sizes=(4, 2), src_data_rank=None)


def test_sources_are_told_apart(tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    (first / "inner").mkdir(parents=True)
    (first / "inner" / "a.py").write_text("x = 1\n")
    shutil.copytree(first, second)
    shutil.copytree(first, third)
    (third / "inner" / "a.py").write_text("x = 2\n")
    assert sources_hash(first) == sources_hash(second) != sources_hash(third)


def test_programs_of_other_sources_are_others(monkeypatch):
    x = _cut()
    kept = x._stable_hash_for_caching()
    assert _cut()._stable_hash_for_caching() == kept
    monkeypatch.setattr(tangents, "sources_hash", lambda package: f"other than {package.name}")
    assert x._stable_hash_for_caching() != kept


def test_programs_with_other_inputs_are_others():
    x, y = _cut(), _cut()
    keep_extents(y, False)
    assert x.__tensor_flatten__()[0] != y.__tensor_flatten__()[0]
    assert x._stable_hash_for_caching() != y._stable_hash_for_caching()


def test_a_copy_that_looks_like_a_view_is_one_still_in_a_kept_program():
    with hd.as_rank(0):
        x = hd.distribute_tensor(torch.ones(4, 2) * 1j, "S0 / 0:R 1:R", src_data_rank=None)
        view = x.conj()
        assert view._spec.is_copy
        assert pickle.loads(pickle.dumps(view._spec)) is view._spec
        assert pickle.loads(pickle.dumps(x._spec)) is x._spec
        file = io.BytesIO()
        torch.save(view, file)
        file.seek(0)
        loaded = torch.load(file)
        assert loaded.add_(1).to_local().tolist() == [[1 - 1j] * 2] * 2, "it stands for itself"
