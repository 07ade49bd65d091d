"""What is beside a compiled model takes it in place of the model: batches, checkpoints, another plan, generation."""

import pytest
import torch

import hdtensor as hd
from tests.models.hf import backward_as, batch, build, compare_gradients, strategy
from tests.support.world import run_world


UNLIKE = strategy(([0, 1], 5), ([2], 3))
OTHER = strategy(([0], 1), ([1, 2], 1))


def _train(compiled, reference, optimizers, step):
    data = batch(step)
    with hd.no_sync(compiled):
        compiled(**hd.distribute_batch(compiled, data)).loss.backward()
    loss = compiled(**hd.distribute_batch(compiled, data)).loss
    loss.backward()
    for _ in range(2):
        expected = reference(**data).loss
        expected.backward()
    torch.testing.assert_close(hd.item(loss), expected.item(), rtol=1e-6, atol=0)
    compare_gradients(compiled, reference, 1e-6)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _wrapped(rank, folder):
    torch._dynamo.reset()
    reference = build("llama")
    model = hd.parallelize(build("llama"), UNLIKE)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (reference, model)]
    _train(compiled, reference, optimizers, 0)
    hd.switch(compiled, OTHER, optimizers[1])
    _train(compiled, reference, optimizers, 1)
    hd.save_checkpoint(f"{folder}/own", compiled, optimizers[1])
    hd.save_hf(compiled, f"{folder}/hf")
    kept = [p.detach().full_tensor() for p in model.parameters()]
    for load in (
        lambda: hd.load_checkpoint(f"{folder}/own", compiled, optimizers[1]),
        lambda: hd.load_hf(compiled, f"{folder}/hf"),
        lambda: hd.load_hf(model, f"{folder}/hf"),
    ):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        load()
        for p, was in zip(model.parameters(), kept, strict=True):
            torch.testing.assert_close(p.detach().full_tensor(), was, rtol=0, atol=0)


@pytest.mark.dist(4)
def test_the_wrapper_stands_for_the_model(tmp_path):
    run_world(_wrapped, 4, str(tmp_path), timeout=120)


def _generate(rank):
    torch._dynamo.reset()
    ids = batch(0)["input_ids"][:, :5]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = build("llama").eval().generate(ids, **options)
    model = hd.parallelize(build("llama").eval(), UNLIKE)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled.generate(ids, **options), expected)
    model.compile(backend="aot_eager")
    assert torch.equal(model.generate(ids, **options), expected)
    assert model._compiled_call_impl is not None


@pytest.mark.dist(4)
def test_generating_is_that_of_the_model():
    run_world(_generate, 4, timeout=120)


def _checkpointed_layers(rank):
    torch._dynamo.reset()
    reference = build("gpt2")
    model = hd.parallelize(build("gpt2"), UNLIKE)
    model.activation_checkpointing_enable()
    model.train()
    for layer in model.transformer.h:
        layer.compile(fullgraph=True, backend="aot_eager")
    data = batch(0)
    backward_as(reference, model, data)
    compare_gradients(model, reference, 1e-6)


@pytest.mark.dist(4)
def test_layers_with_one_projection_for_q_k_and_v_that_checkpoint():
    run_world(_checkpointed_layers, 4, timeout=120)
