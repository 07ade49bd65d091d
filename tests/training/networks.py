"""A small network with column and row cuts, its plans, and one training step on both sides."""

import torch
import torch.nn.functional as F
from torch import nn

import hdtensor
from hdtensor import HDSpec
from hdtensor.plan import ExpandedPlan


WORLD_SIZE = 4
VOCABULARY = 11

#: (batch, column cut, row cut, whole): TP 2 beside TP 1 with a rank outside; TP 3 beside TP 1; a batch cut inside.
PLANS = {
    "rank outside": ("S0[5:3] / 0,1:R 2:R", "R / 0,1:S0 2:R", "R / 0,1:S1 2:R", "R / 0,1:R 2:R"),
    "tp 3 beside 1": ("S0[3:1] / 0-2:R 3:R", "R / 0-2:S0 3:R", "R / 0-2:S1 3:R", "R / 0-2:R 3:R"),
    "batch inside": (
        "S0[2:1] / 0,1:S0 3:R",
        "R / 0,1:R 3:R",
        "R / 0,1:R 3:R",
        "R / 0,1:R 3:R",
    ),
}


class Net(nn.Module):
    """Embedding, a feed-forward block with dropout, a head; optionally the block is a checkpoint."""

    def __init__(self, dropout=0.0, repeat=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.repeat = repeat

    def block(self, x):
        return self.drop(self.down(F.gelu(self.up(self.norm(x)))))

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + (self.block(x) if self.repeat is None else self.repeat(self.block, x)))


def plan_of(name, net=None):
    """The plan of a net; parametrized weights are cut as the weight is."""
    batch, column, row, whole = map(HDSpec.from_text, PLANS[name])
    tensors = {}
    for parameter, _ in (net or Net()).named_parameters():
        is_column = parameter.startswith(("up.", "head.", "embed."))
        is_row = parameter.startswith("down.") and "bias" not in parameter
        tensors[parameter] = column if is_column else row if is_row else whole
    return ExpandedPlan(tensors=tensors, inputs=batch, labels=batch)


def pair(name="rank outside", prepare=lambda net: None, dtype=torch.float64, **options):
    """The same net under a plan, and on one device."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        net = Net(**options).to(dtype)
        prepare(net)
        nets.append(net)
    net, reference = nets
    hdtensor.parallelize(net, plan_of(name, reference))
    return net, reference


def batch_of(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (8, 5), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0] = -100
    labels[5:, 2:] = -100
    return {"ids": ids, "labels": labels}


def loss_of(net, batch):
    logits = net(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def both_losses(net, reference, seed=0, loss=loss_of):
    """Losses with a graph: under the plan, and on one device."""
    batch = batch_of(seed)
    return loss(net, hdtensor.distribute_batch(net, batch)), loss(reference, batch)


def both_backward(net, reference, seed=0, loss=loss_of, rel=1e-11):
    """Backward on both sides; the losses must be alike."""
    ours, want = both_losses(net, reference, seed, loss)
    ours.backward()
    want.backward()
    torch.testing.assert_close(
        torch.tensor(hdtensor.item(ours), dtype=torch.float64),
        want.detach().double(),
        rtol=rel,
        atol=0,
    )


def assert_same_gradients(net, reference, **tolerance):
    """Gradients are home, of the parameter's dtype, and those of one device."""
    theirs = reference.named_parameters()
    for (name, p), (_, q) in zip(net.named_parameters(), theirs, strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert p.grad.spec is p.spec, name
            torch.testing.assert_close(
                p.grad.full_tensor(), q.grad, msg=lambda text, name=name: name + text, **tolerance
            )


def assert_same_parameters(net, reference, **tolerance):
    theirs = reference.named_parameters()
    for (name, p), (_, q) in zip(net.named_parameters(), theirs, strict=True):
        torch.testing.assert_close(
            p.detach().full_tensor(),
            q.detach(),
            msg=lambda text, name=name: name + text,
            **tolerance,
        )
