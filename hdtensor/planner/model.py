"""``ModelShape``: the sizes of a decoder, of which costs are made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hdtensor.errors import PlannerError
from hdtensor.plan.fields import MAX_LAYERS
from hdtensor.planner.quantities import whole_number


_MOST = 1 << 30
#: Sizes that may be 0.
_OPTIONAL = (
    "num_experts",
    "experts_per_token",
    "num_shared_experts",
    "num_dense_layers",
    "dense_ffn",
    "q_rank",
    "kv_rank",
    "rope_dim",
    "value_dim",
    "num_positions",
    "max_context",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model of equal decoder layers between an embedding and a head.

    Attributes:
        name: For reports.
        num_layers: Decoder layers.
        hidden: Width of hidden states.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values.
        head_dim: Width of a head of queries and keys.
        ffn: Width inside of the MLP; of one expert, where there are some.
        vocab: Rows of the embedding.
        num_matrices: Matrices of the MLP: 3 if it is gated, else 2.
        is_tied: Whether the head is the embedding.
        num_experts: Of each layer; 0: a dense MLP.
        experts_per_token: How many of them see a token.
        num_shared_experts: Experts that see every token.
        num_dense_layers: First layers that have a dense MLP although the others have experts.
        dense_ffn: Width inside of their MLP.
        q_rank: Width of the latent vector of queries (multi-head latent attention); 0: none.
        kv_rank: Width of the latent vector of keys and values; 0: plain attention.
        rope_dim: Width of the part of ``head_dim`` that carries the position and that all heads share, where
            keys are latent.
        value_dim: Width of a head of values; 0: ``head_dim``.
        num_positions: Rows of a learned embedding of positions; 0: none.
        max_context: Tokens of a sample that its positions are made for; 0: nobody says it.
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
    num_dense_layers: int = 0
    dense_ffn: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    num_positions: int = 0
    max_context: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "int":
                most = MAX_LAYERS if field.name == "num_layers" else _MOST
                least = 0 if field.name in _OPTIONAL else 1
                whole_number(field.name, getattr(self, field.name), least, most)
        whole_number("num_matrices", self.num_matrices, 2, 3)
        if self.num_heads % self.num_kv_heads:
            raise PlannerError(
                f"num_kv_heads: {self.num_kv_heads} must divide the {self.num_heads} heads of queries."
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise PlannerError(
                f"experts_per_token: must be from 1 to the {self.num_experts} experts, got "
                f"{self.experts_per_token}."
            )
        if self.num_dense_layers > self.num_layers:
            raise PlannerError(
                f"num_dense_layers: must be at most the {self.num_layers} layers, got {self.num_dense_layers}."
            )
        if self.kv_rank and self.rope_dim >= self.head_dim:
            raise PlannerError(
                f"rope_dim: must be below head_dim, {self.head_dim}, got {self.rope_dim}."
            )

    @property
    def attention_parameters(self) -> int:
        """Elements of a layer's attention projections.

        With latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) keys and values are expanded from
        ``kv_rank`` numbers, and queries from ``q_rank`` where that is not 0.
        """
        values = self.value_dim or self.head_dim
        output = self.num_heads * values * self.hidden
        if not self.kv_rank:
            keys_and_values = self.num_kv_heads * (self.head_dim + values)
            return self.hidden * (self.num_heads * self.head_dim + keys_and_values) + output
        queries = self.num_heads * self.head_dim
        q = self.q_rank * (self.hidden + queries) if self.q_rank else self.hidden * queries
        down = self.hidden * (self.kv_rank + self.rope_dim)
        up = self.kv_rank * self.num_heads * (self.head_dim - self.rope_dim + values)
        return q + down + up + output

    @property
    def mlp_parameters(self) -> int:
        """Elements of a layer's MLP; with experts, of all of them and of their gate."""
        one = self.num_matrices * self.hidden * self.ffn
        if not self.num_experts:
            return one
        return one * (self.num_experts + self.num_shared_experts) + self.hidden * self.num_experts

    @property
    def layer_parameters(self) -> int:
        """Elements of a layer's matrices and two norms; biases are left out."""
        return self.attention_parameters + self.mlp_parameters + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Elements of what stands before the layers."""
        return (self.vocab + self.num_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Elements of the head and the last norm, as a stage holds them: a tied head counts too."""
        return self.vocab * self.hidden + self.hidden

    @property
    def num_parameters(self) -> int:
        """Elements of the whole model, a tied embedding once, dense first layers as they are."""
        dense = self.num_dense_layers * (
            self.mlp_parameters - self.num_matrices * self.hidden * (self.dense_ffn or self.ffn)
        )
        layers = self.num_layers * self.layer_parameters - (dense if self.num_experts else 0)
        head = self.hidden if self.is_tied else self.head_parameters
        return self.embedding_parameters + layers + head

    def is_cut_evenly(self, tp: int) -> bool:
        """Return whether heads, MLP and vocabulary can be cut over ``tp`` ranks without rest.

        Heads of keys and values are copied where there are fewer of them than ranks.
        """
        kv_fits = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        return self.num_heads % tp == 0 and kv_fits and self.ffn % tp == 0
