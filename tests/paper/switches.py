"""Switches between the paper's plans: its Llama 32B, its Tables 11 and 12, as moves of parameters."""

import json
from pathlib import Path

from hdtensor.plan import AnnotationPlan, ModelDescription, Pattern
from hdtensor.redistribute.fuse import Move
from hdtensor.redistribute.steps import (
    Layout,
)


DATA = json.loads((Path(__file__).parent / "data" / "plans.json").read_text())
DOCUMENTS = {
    document["label"].partition(":")[0]: document
    for document in DATA["plans"]
    if document["source_table"] in (11, 12)
}

#: The numbers of Table 4 need this vocabulary, which Table 6 does not state (it says 50,304).
VOCAB_SIZE = 30592

#: The paper cuts the logits by TP, and keeps the embedding whole.
PATTERNS = (Pattern("lm_head.weight", "column", "last"),)


def llama_32b(**changes):
    sizes = {
        "num_layers": 60,
        "hidden_size": 6656,
        "intermediate_size": 17920,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": VOCAB_SIZE,
    }
    return ModelDescription.llama(**{**sizes, **changes})


def moves_between(src, dst, model=None, itemsize=6):
    """Moves of all parameters in registration order, from a plan's label to another's."""
    model = llama_32b() if model is None else model
    before, after = (
        AnnotationPlan.from_dict(DOCUMENTS[label]).expand(model, PATTERNS).tensors
        for label in (src, dst)
    )
    return [
        Move(Layout(before[name], shape, None), Layout(after[name], shape, None), itemsize, name)
        for name, shape in model.shapes.items()
    ]
