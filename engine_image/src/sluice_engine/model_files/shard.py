"""Which part of each tensor a rank holds when several compute one model together, each a share of its heads.

Owns the split alone: q, k, v, gate and up by rows (whole heads), what follows attention and the MLP by columns, the
head by rows of the vocabulary; the embedding and the norms are whole everywhere. No torch. Start with `Shard`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sluice_engine.errors import InvalidConfig
from sluice_engine.model_files.architecture import Architecture

_BY_ROWS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_BY_COLUMNS = ("self_attn.o_proj", "mlp.down_proj")
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Cut:
    """The part [first, end) of one dimension of a tensor."""

    dimension: int
    """0: rows; 1: columns."""
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of so many."""

    rank: int = 0
    size: int = 1

    def check(self, architecture: Architecture) -> None:
        """Whether a model can be split over so many ranks.

        Raises:
            InvalidConfig: its heads or its MLP do not divide.
        """
        for name, count in (
            ("KV heads", architecture.num_kv_heads),
            ("attention heads", architecture.num_heads),
            ("intermediate dimensions", architecture.intermediate_size),
        ):
            if count % self.size:
                raise InvalidConfig(
                    "tensor_parallel",
                    f"is {self.size}, but the model has {count} {name}, which do not divide among {self.size} ranks: "
                    f"set accelerator.count to a number that divides {count}",
                )

    def of(self, architecture: Architecture) -> Architecture:
        """What this rank computes of a model: its share of heads and MLP at the model's own width."""
        return dataclasses.replace(
            architecture,
            num_heads=architecture.num_heads // self.size,
            num_kv_heads=architecture.num_kv_heads // self.size,
            intermediate_size=architecture.intermediate_size // self.size,
        )

    def least_weight_values(self, architecture: Architecture) -> int:
        """Numbers that this rank holds at least: its matrices, the embedding, and its rows of a head of its own."""
        embedding = architecture.vocab_size * architecture.hidden_size
        head = 0 if architecture.tied_head else self.vocabulary_rows(architecture.vocab_size) * architecture.hidden_size
        return architecture.layer_values // self.size + embedding + head

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """What this rank reads of a tensor by its Hugging Face name; None: all of it."""
        if self.size == 1:
            return None
        owner, _, part = name.rpartition(".")
        if owner.endswith(_BY_ROWS):
            return self._even(0, shape[0])
        if owner.endswith(_BY_COLUMNS) and part == "weight":
            return self._even(1, shape[1])
        return self.vocabulary(shape[0]) if owner == _HEAD else None

    def vocabulary(self, vocab_size: int) -> Cut:
        """This rank's rows of the head; the last ranks' may be fewer, or none."""
        rows = self.vocabulary_rows(vocab_size)
        return Cut(0, min(self.rank * rows, vocab_size), min((self.rank + 1) * rows, vocab_size))

    def vocabulary_rows(self, vocab_size: int) -> int:
        """Rows of the head that every rank answers for."""
        return -(-vocab_size // self.size)

    def adds_bias(self, name: str) -> bool:
        """Whether this rank adds a bias: of a product that is summed over ranks, one alone may."""
        return self.rank == 0 or not name.rpartition(".")[0].endswith(_BY_COLUMNS)

    def _even(self, dimension: int, length: int) -> Cut:
        share = length // self.size
        return Cut(dimension, self.rank * share, (self.rank + 1) * share)


WHOLE = Shard()
