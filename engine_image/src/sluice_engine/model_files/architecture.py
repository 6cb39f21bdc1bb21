"""What a model is, as far as the runner computes it: sizes, and the parts in which families differ.

Owns the shape alone. `hf_config` and `gguf_metadata` read it from a model's own files and refuse, by the field's name,
whatever this cannot express: a model that runs slightly wrong is worse than one that does not run. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.errors import InvalidConfig
from sluice_engine.model_files.rope import RopeScaling, inverse_frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a decoder-only model with RMS norms, rotary embedding and a gated MLP: Llama and its relatives."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length_tokens: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    """Whether the output head is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the projection that follows attention."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's query and key are normed before they are turned."""
    sliding_window: int | None = None
    """Tokens, its own included, that a token attends to in the layers of `sliding_layers`."""
    sliding_layers: tuple[int, ...] = ()

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    @property
    def layer_values(self) -> int:
        """Numbers in all layers' matrices."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    def request_length_tokens(self, wanted: int | None) -> int:
        """The longest that a request may be, prompt and output together; None wants as long as the model takes.

        Raises:
            InvalidConfig: longer than that.
        """
        own = self.max_length_tokens
        if wanted is not None and wanted > own:
            raise InvalidConfig("model.max_length_tokens", f"is {wanted}; the model's own length is {own}")
        return wanted or own

    def inverse_frequencies(self) -> list[float]:
        """Rotation per position of each pair of a head's dimensions, scaling applied."""
        return inverse_frequencies(self.rope_theta, self.head_dim, self.rope_scaling)

    @property
    def rope_magnitude(self) -> float:
        """What turned queries and keys are multiplied by."""
        return self.rope_scaling.attention_factor if self.rope_scaling is not None else 1.0

    def windows(self, max_length_tokens: int) -> list[int | None]:
        """Each layer's window; none where every token of a request that long is within it."""
        window = self.sliding_window if (self.sliding_window or 0) < max_length_tokens else None
        return [window if layer in self.sliding_layers else None for layer in range(self.num_layers)]
