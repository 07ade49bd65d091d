"""``ModelShape``: the sizes of a decoder, of which costs are made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model of equal decoder layers between an embedding and a head.

    Attributes:
        name: For reports.
        num_layers: Decoder layers.
        hidden: Width of hidden states.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        ffn: Width inside of the MLP; of one expert, where there are some.
        vocab: Rows of the embedding.
        num_matrices: Matrices of the MLP: 3 if it is gated, else 2.
        is_tied: Whether the head is the embedding.
        num_experts: Of each layer; 0: a dense MLP.
        experts_per_token: How many of them see a token.
        num_shared_experts: Experts that see every token.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    num_matrices: int = 3
    is_tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0
