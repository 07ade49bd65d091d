"""Small training runs on ranks, for tests that save and resume them."""

import torch

import hdtensor as hd
from tests.models.hf import batch, build, strategy


PIPELINES = {
    "unlike": [([0, 1], 5), ([2], 3)],
    "three": [([3], 1), ([0, 2], 2), ([1], 1)],
    "four": [([0, 1, 2, 3], 1)],
    "dp": [([0], 1), ([1], 1), ([2], 1), ([3], 1)],
    "dp2": [([0], 1), ([3], 1)],
    "pair": [([2], 1), ([1], 1)],
}
PLANS = {name: strategy(*pipelines) for name, pipelines in PIPELINES.items()}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3, amsgrad=True, fused=True),
}


def start(plan, optimizer="adamw", seed=0, **changes):
    """Return a parallelized model and its optimizer."""
    expanded = PLANS[plan].to_dict()
    for pipeline in expanded["pipelines"]:
        pipeline["stages"][0]["layers"] = [0, changes.get("num_hidden_layers", 2) - 1]
    plan = hd.AnnotationPlan.from_dict(expanded)
    model = hd.parallelize(build("llama", seed, **changes), plan)
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(model, optimizer, steps):
    """Make the given steps; return their losses."""
    losses = []
    for step in steps:
        loss = model(**hd.distribute_batch(model, batch(step))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(hd.item(loss))
    return losses


def weights(model):
    """Return whole parameters by name."""
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}
