"""A tiny Llama, batches, plans on four ranks, and the same training on one device."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hdtensor as hd
from hdtensor.pipeline import Runner


VOCABULARY = 53


def llama(num_layers=3, **config):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "num_hidden_layers": num_layers,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **config}))


def batch(num_rows=8, length=6, seed=1):
    """Return ids and labels; rows count unlike numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (num_rows, length), generator=generator)
    labels = ids.clone()
    labels[0, : length - 1] = -100
    labels[num_rows // 2, 2:] = -100
    return {"input_ids": ids, "labels": labels}


def stage(ranks, first, last):
    return {"ranks": ranks, "layers": [first, last]}


def plan(*pipelines):
    return hd.AnnotationPlan.from_dict(
        {
            "pipelines": [
                {"stages": stages, "microbatches": num, "mbs": size}
                for stages, num, size in pipelines
            ]
        }
    )


def unlike():
    """Return a plan: two ranks to one, 3 micro-batches of 2 rows, beside one rank, 2 of 1 row."""
    return plan(([stage([0, 1], 0, 1), stage([2], 2, 2)], 3, 2), ([stage([3], 0, 2)], 2, 1))


def pairs():
    """Return a plan: two lanes of two stages, 2 micro-batches of 2 rows beside 4 of 1 row."""
    return plan(
        ([stage([0], 0, 1), stage([1], 2, 2)], 2, 2), ([stage([2], 0, 0), stage([3], 1, 2)], 4, 1)
    )


def one_device(model, *batches):
    """Return the mean loss over all tokens of all batches, after its backward."""
    sums = [model(**b, num_items_in_batch=1).loss for b in batches]
    count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    loss = sum(sums) / count
    loss.backward()
    return loss.detach()


def assert_same_gradients(model, reference, **tolerance):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(
            hd.full_tensor(p.grad),
            q.grad,
            msg=lambda t, n=name: f"{n}: {t}",
            **({"rtol": 1e-4, "atol": 1e-6} | tolerance),
        )


def runner_and_reference(the_plan, *args, **options):
    return Runner(llama(), the_plan, *args, **options), llama()
