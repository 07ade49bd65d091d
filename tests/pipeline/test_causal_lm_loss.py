"""``causal_lm_loss`` beside batches without labels."""

import pytest
import torch

from hdtensor.errors import PlanError
from hdtensor.pipeline import causal_lm_loss


def test_a_batch_without_labels_is_told():
    with pytest.raises(
        PlanError, match=r"^causal_lm_loss needs a batch with 'labels', .*, got dict"
    ):
        causal_lm_loss(torch.zeros(1, 2, 3), {})
