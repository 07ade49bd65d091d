"""Models of other families in lanes of unlike stages: loss and gradients of one device."""

import pytest
import torch
import transformers
from torch.nn import functional

from hdtensor.pipeline import Runner
from tests.pipeline import tiny
from tests.pipeline.tiny import stage
from tests.support.world import run_world


_SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 48}
_BERT = {
    "intermediate_size": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
_OPT = {"ffn_dim": 24, "dropout": 0.0, "word_embed_proj_dim": 16, "max_position_embeddings": 32}


def _build(family):
    torch.manual_seed(0)
    if family == "Bert":  # its configuration ties embeddings, though there is no head of words
        config = transformers.BertConfig(**_SIZES, **_BERT)
        return transformers.BertForSequenceClassification(config)
    # The last norm is registered before the layers.
    return transformers.OPTForCausalLM(transformers.OPTConfig(**_SIZES, **_OPT))


def _cross_entropy(output, target):
    logits = output.logits.flatten(0, -2)
    return functional.cross_entropy(logits, target.flatten(), reduction="sum"), target.numel()


def _check_family(rank, family):
    plan = tiny.plan(
        ([stage([0, 1], 0, 0), stage([2], 1, 3)], 2, 2),
        ([stage([3], 0, 2), stage([4], 3, 3)], 2, 1),
    )
    model, reference = _build(family), _build(family)
    runner = Runner(model, plan, _cross_entropy)
    for length in (6, 9):
        ids = torch.randint(3, 48, (6, length))
        labels = torch.randint(0, 3, (6,)) if family == "Bert" else ids
        mask = torch.ones_like(ids)
        mask[1, length - 2 :] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        loss = runner.step({**inputs, "labels": labels})
        total, count = _cross_entropy(reference(**inputs), labels)
        (total / count).backward()
        torch.testing.assert_close(loss, (total / count).detach(), rtol=1e-4, atol=1e-6)
        tiny.assert_same_gradients(model, reference, rtol=1e-3, atol=1e-5)


@pytest.mark.dist(5)
@pytest.mark.parametrize("family", ["Bert", "OPT"])
def test_families_train_in_stages(family):
    run_world(_check_family, 5, family)
