"""Small Llamas and the plans that train them, for tests of pipelines."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hdtensor as hd


def pipeline(microbatches, *stages, mbs=1):
    return {
        "stages": [{"ranks": ranks, "layers": layers} for ranks, layers in stages],
        "microbatches": microbatches,
        "mbs": mbs,
    }


PIPELINES = {
    # tp 2 beside tp 1, and unlike layer cuts
    "unlike": [
        pipeline(5, ([0, 1], [0, 2]), ([2], [3, 3])),
        pipeline(3, ([3], [0, 0]), ([4], [1, 3])),
    ],
    "four": [pipeline(3, ([0, 1], [0, 3])), pipeline(5, ([2], [0, 1]), ([3], [2, 3]))],
    "one stage": [pipeline(2, ([0, 1], [0, 3]), mbs=3), pipeline(2, ([2], [0, 3]))],
    "one lane": [pipeline(4, ([0, 1], [0, 1]), ([2], [2, 3]), mbs=2)],
    # several stages on a rank, tp 2 beside tp 1
    "v": [
        pipeline(3, ([0, 1], [0, 0]), ([2], [1, 1]), ([2], [2, 2]), ([0, 1], [3, 3])),
        pipeline(5, ([3], [0, 3])),
    ],
    "interleaved": [
        pipeline(4, ([0], [0, 0]), ([1], [1, 1]), ([0], [2, 2]), ([1], [3, 3])),
        pipeline(4, ([2], [0, 3])),
    ],
    "whole": [pipeline(2, ([0], [0, 3]), mbs=4)],
}


def plan(name, zero=0):
    return hd.AnnotationPlan.from_dict({"pipelines": PIPELINES[name], "zero": zero})


def llama(tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).to(dtype)


def gpt2():
    """Return a GPT-2: tied embeddings, and fused weights with biases that tp cuts in pieces."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=96, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batch(step=0, num=8, length=10):
    """Return token ids and labels, of which some do not count."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 96, (num, length), generator=generator)
    labels = ids.clone()
    labels[0, :6] = labels[3, 2:] = -100
    return {"input_ids": ids, "labels": labels}
