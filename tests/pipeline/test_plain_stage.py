"""A rank that has its stage alone runs it on plain tensors, where that computes the same."""

import pytest
import torch

import hdtensor as hd
from hdtensor.pipeline import Runner
from hdtensor.pipeline.runtime.passage import running
from tests.pipeline import tiny
from tests.support.world import run_world


def _unlike_plan():
    """Return a plan: rank 0 alone, then ranks 1 and 2 by tensor parallelism, then rank 3 alone."""
    stages = [tiny.stage([0], 0, 0), tiny.stage([1, 2], 1, 1), tiny.stage([3], 2, 2)]
    return tiny.plan((stages, 4, 2))


class _Spy(torch.nn.Module):
    """Passes a tensor on, and notes whether the call runs on plain tensors."""

    def __init__(self, seen, look=lambda x: None):
        super().__init__()
        self.note, self.look = seen.append, look  # a list of its own would be state of the model

    def forward(self, x):
        passage = running()
        if passage is not None and passage.stage is not None:
            self.look(x)
            if not passage.is_rehearsal:
                self.note(passage.is_plain)
        return torch.nn.functional.silu(x)


def _spied(seen, look=lambda x: None):
    model = tiny.llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = _Spy(seen, look)
    return model


def _check_step(runner, reference, whole):
    expected = tiny.one_device(reference, whole)
    torch.testing.assert_close(runner.step(whole), expected, rtol=1e-5, atol=1e-6)
    tiny.assert_same_gradients(runner.model, reference)


def _check_training(rank):
    seen, reference = [], tiny.llama()
    runner = Runner(_spied(seen), _unlike_plan())
    ours = torch.optim.AdamW(runner.optimizer_parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(4):
        seen.clear()
        if step == 2:  # from here on the first stage has nothing to do in backward
            for model in (runner.model, reference):
                model.model.embed_tokens.requires_grad_(False)
                model.model.layers[0].requires_grad_(False)
        whole = tiny.batch(seed=step)
        expected = tiny.one_device(reference, whole)
        torch.testing.assert_close(runner.step(whole), expected, rtol=1e-4, atol=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(runner.model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(hd.full_tensor(p), q, rtol=1e-3, atol=1e-5)
        num_layers = 1 if rank in (0, 3) else 0
        assert sum(seen) == num_layers * (3 if step == 0 else 4)


@pytest.mark.dist(4)
def test_stages_of_one_rank_train_on_plain_tensors():
    run_world(_check_training, 4)


def _check_lengths(rank):
    seen, reference = [], tiny.llama()
    runner = Runner(_spied(seen), _unlike_plan())
    for step, length in enumerate((6, 4, 6, 5, 6)):
        seen.clear()
        runner.model.zero_grad()
        reference.zero_grad()
        _check_step(runner, reference, tiny.batch(length=length, seed=step))
        if rank in (0, 3):  # of each length the first micro-batch shows the way
            assert seen.count(True) == (4 if length == 6 and step > 0 else 3)


@pytest.mark.dist(4)
def test_each_new_length_is_shown_once():
    run_world(_check_lengths, 4)


def _check_without(rank):
    whole, reference = tiny.batch(), tiny.llama()

    def look(x):
        assert x.spec.num_subgroups == 1  # plain tensors have no spec

    watched = []

    def hook(module, args, output):
        watched.append(type(output))

    for name in ("as it is", "op by op", "hooked", "looked at"):
        seen = []
        model = _spied(seen, look if name == "looked at" else lambda x: None)
        runner = Runner(model, tiny.pairs(), use_regions=name != "op by op")
        if name == "hooked":
            model.model.layers[0].mlp.register_forward_hook(hook)
        for _ in range(2):
            runner.model.zero_grad()
            reference.zero_grad()
            _check_step(runner, reference, whole)
        assert any(seen) == (name == "as it is"), name
    assert set(watched) == {hd.HDTensor}


@pytest.mark.dist(4)
def test_what_asks_for_hdtensors_gets_them():
    run_world(_check_without, 4)
