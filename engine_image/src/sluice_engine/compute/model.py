"""The forward pass over a mixed step: linear layers once over all rows, attention by kind of row.

Everything a step needs comes as `StepInputs` and `KVCache`; the model holds weights and the rotary table, never a
request's state. Start with `forward`. Letters: T rows, S sampling rows, H query heads, G KV heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from sluice_engine.compute.adapters import StepAdapters
from sluice_engine.compute.attention import KVCache, attend_chunk, attend_singles
from sluice_engine.compute.group import Group
from sluice_engine.compute.linear import Linear
from sluice_engine.compute.paged import PagedAttention
from sluice_engine.compute.step_inputs import StepInputs
from sluice_engine.kernels.layers import LayerParts, LayerStack
from sluice_engine.kernels.library import Blocks, Kernels
from sluice_engine.model_files.outline import KEEP_ROWS_UP_TO_BYTES
from sluice_engine.model_files.weights import LayerWeights, Weights


class Layer:
    """One decoder layer's products."""

    def __init__(
        self, weights: LayerWeights, *, keep_rows: bool, kernels: Kernels | None, window: int | None = None
    ) -> None:
        """`window`: tokens that a token attends to, its own included; None for all."""

        def linear(weight: Tensor, blocks: Blocks | None, bias: Tensor | None, folded: Tensor | None = None) -> Linear:
            return Linear(weight, keep_rows=keep_rows, bias=bias, blocks=blocks, folded=folded, kernels=kernels)

        blocks = weights.blocks
        self.qkv = linear(weights.qkv, blocks.qkv, weights.qkv_bias, weights.qkv_norm)
        self.attention_out = linear(weights.attention_out, blocks.attention_out, weights.attention_out_bias)
        self.gate_up = linear(weights.gate_up, blocks.gate_up, weights.gate_up_bias, weights.gate_up_norm)
        self.down = linear(weights.down, blocks.down, weights.down_bias)
        self.qk_norm = weights.qk_norm
        self.qkv_norm, self.gate_up_norm = weights.qkv_norm, weights.gate_up_norm
        self.window = window

    def integer_form(self) -> LayerParts | None:
        """The layer for one call of its own kernels, where all its products have integers."""
        products = [linear.integer_form for linear in (self.qkv, self.attention_out, self.gate_up, self.down)]
        qkv, attention_out, gate_up, down = products
        if qkv is None or attention_out is None or gate_up is None or down is None:
            return None
        return LayerParts(
            qkv, attention_out, gate_up, down, self.qkv_norm, self.gate_up_norm, self.qk_norm, self.window
        )  # fmt: skip


class Model:
    """A decoder-only model on one device."""

    def __init__(
        self,
        weights: Weights,
        max_length_tokens: int,
        kernels: Kernels | None,
        group: Group | None = None,
        paged: PagedAttention | None = None,
    ) -> None:
        """`kernels`: own kernels for what is not a matrix product; torch's operators where there are none.

        `group`: the ranks that hold the other shards of these weights. `paged`: attention that reads the cache in
        place, for inputs that come so.
        """
        self._paged = paged
        self.group = group if group is not None else Group()
        self._kernels = kernels
        shape = weights.architecture
        self.architecture = shape
        self._embedding = weights.embedding
        keep_rows = shape.layer_values * weights.embedding.itemsize <= KEEP_ROWS_UP_TO_BYTES
        self._layers = [
            Layer(layer, keep_rows=keep_rows, kernels=kernels, window=window)
            for layer, window in zip(weights.layers, shape.windows(max_length_tokens), strict=True)
        ]
        self._final_norm = weights.final_norm
        # The rows of a tied head are there anyway: they are the embedding.
        self._head = Linear(
            weights.head,
            keep_rows=keep_rows or weights.head is weights.embedding,
            blocks=weights.head_blocks,
            kernels=kernels,
        )
        self._epsilon = shape.norm_epsilon
        self._stack = self._stacked()
        self._epsilon_row = torch.full((1, 1), shape.norm_epsilon)
        self._q_size = shape.num_heads * shape.head_dim
        self._kv_start = self._q_size
        # Angles in double precision: position × frequency in single loses a thousandth of a turn at 8,000 tokens.
        angles = torch.outer(
            torch.arange(max_length_tokens, dtype=torch.float64),
            torch.tensor(shape.inverse_frequencies(), dtype=torch.float64),
        )
        turns = torch.polar(torch.full_like(angles, shape.rope_magnitude), angles).to(torch.complex64)
        self._turns = turns[:, None].to(weights.embedding.device)
        """[max_length, 1, D/2] complex numbers of one magnitude"""

    @property
    def reads_in_place(self) -> bool:
        """Whether steps come as `paged` rows."""
        return self._paged is not None

    @property
    def has_integer_products(self) -> bool:
        """Whether any rows' activations are quantised."""
        return self._head.integer_form is not None or any(layer.integer_form() for layer in self._layers)

    @property
    def has_kernels(self) -> bool:
        """Whether steps come as tiles."""
        return self._kernels is not None

    def forward(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Logits [S, V] in float32 of the sampling rows; their and all other rows' KV is in the cache afterwards.

        Of several ranks the first alone has all logits.
        """
        x = embedding(inputs.token_ids, self._embedding)
        turns = self._turns if self._kernels else self._turns[inputs.positions]
        done = self._run_stack(x, turns, inputs, cache)
        if done == len(self._layers):
            return self._logits(x[inputs.sample_rows])
        *layers, last = self._layers
        for index, layer in enumerate(layers[done:], done):
            qkv = self._qkv(layer, x, turns, inputs, cache, index)
            attended = self._attend(layer, qkv, inputs, cache, index)
            x = self._after_attention(layer, x, attended, inputs.adapters, index)
        index = len(layers)
        qkv = self._qkv(last, x, turns, inputs, cache, index)
        if not inputs.sample_rows.numel():
            return x.new_empty(0, self.architecture.vocab_size, dtype=torch.float32)
        # Nothing after the last layer's keys and values is needed of a row that does not sample.
        x, q = x[inputs.sample_rows], self._queries(qkv[inputs.sample_rows])
        if self._kernels is not None and inputs.sample_tiles is not None:
            attended = torch.empty_like(q)
            self._kernels.attend(
                q,
                inputs.sample_tiles,
                cache.layer(index),
                cache.block_tokens,
                cache.num_kv_heads,
                attended,
                last.window,
            )
        elif self._paged is not None and inputs.sample_paged is not None:
            attended = q.new_empty(q.shape)
            self._paged.attend(q, inputs.sample_paged, cache.layer(index), attended, last.window)
        else:
            attended = torch.cat([
                attend_singles(q[bucket.first : bucket.first + bucket.num_rows], bucket, cache, index, last.window)
                for bucket in inputs.sample_buckets
            ])  # fmt: skip
        x = self._after_attention(last, x, attended.view(len(x), -1), inputs.sample_adapters, index)
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self._head(self._norm(x, self._final_norm)).float()
        return self.group.beside_each_other(logits, self.architecture.vocab_size)

    def _stacked(self) -> LayerStack | None:
        """All layers for one call, where they have integers."""
        parts = [layer.integer_form() for layer in self._layers]
        found = [part for part in parts if part is not None]
        if self._kernels is None or self.group.shard.size > 1 or len(found) < len(parts):
            return None
        shape = self.architecture
        return LayerStack(self._kernels, found, shape.num_heads, shape.num_kv_heads, shape.norm_epsilon)

    def _run_stack(self, x: Tensor, turns: Tensor, inputs: StepInputs, cache: KVCache) -> int:
        """Compute layers in one call if this step allows it, in place; how many that were.

        All where all rows sample; else all but the last, of which a part is enough.
        """
        stack = self._stack
        if stack is None or len(x) > stack.max_rows or inputs.adapters is not None or inputs.tiles is None:
            return 0
        num_layers = len(stack) - (len(inputs.sample_rows) < len(x))
        caches = [cache.layer(index) for index in range(num_layers)]
        stack.run(x, turns, inputs.positions, inputs.kv_rows, inputs.tiles, caches, cache.block_tokens)
        return num_layers

    def _qkv(self, layer: Layer, x: Tensor, turns: Tensor, inputs: StepInputs, cache: KVCache, index: int) -> Tensor:
        """Queries, keys, values [T, (H + 2 G) D], q and k turned to their positions; keys and values are cached."""
        left_out = layer.qkv.left_out(len(x))
        normed = self._norm(x, left_out)
        qkv = layer.qkv(normed)
        if inputs.adapters is not None:
            inputs.adapters.add(index, "qkv", normed, qkv, layer.qkv_norm if left_out is None else None)
        shape = self.architecture
        if self._kernels is not None:
            self._kernels.turn_and_store(
                qkv, turns, inputs.positions, cache.layer(index), inputs.kv_rows, shape.num_heads, shape.num_kv_heads,
                None if layer.qk_norm is None else (layer.qk_norm, self._epsilon),
            )  # fmt: skip
            return qkv
        num_turned = shape.num_heads + shape.num_kv_heads
        turned = qkv[:, : num_turned * shape.head_dim]
        if layer.qk_norm is not None:
            heads = turned.view(len(x), num_turned, shape.head_dim)
            q_norm, k_norm = layer.qk_norm
            heads[:, : shape.num_heads].copy_(self._norm(heads[:, : shape.num_heads], q_norm))
            heads[:, shape.num_heads :].copy_(self._norm(heads[:, shape.num_heads :], k_norm))
        pairs = turned.view(len(x), num_turned, -1, 2)
        if qkv.dtype is torch.float32:
            torch.view_as_complex(pairs).mul_(turns)
        else:  # complex numbers come in single precision only
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns))
        cache.write(index, inputs.kv_rows, qkv[:, self._kv_start :])
        return qkv

    def _queries(self, qkv: Tensor) -> Tensor:
        return qkv[:, : self._q_size].view(len(qkv), -1, self.architecture.head_dim)

    def _attend(self, layer: Layer, qkv: Tensor, inputs: StepInputs, cache: KVCache, index: int) -> Tensor:
        """What each row's heads attended to: [T, H D]."""
        q = self._queries(qkv)
        if self._kernels is not None and inputs.tiles is not None:
            out = qkv.new_empty(len(qkv), self._q_size)
            self._kernels.attend(
                q,
                inputs.tiles,
                cache.layer(index),
                cache.block_tokens,
                cache.num_kv_heads,
                out.view(q.shape),
                layer.window,
            )
            return out
        if self._paged is not None and inputs.paged:
            out = qkv.new_empty(q.shape)
            for part in inputs.paged:
                rows = slice(part.first, part.first + part.num_rows)
                self._paged.attend(q[rows], part, cache.layer(index), out[rows], layer.window)
            return out.view(len(qkv), self._q_size)
        keys_values = qkv[:, self._kv_start :].view(len(qkv), 2, cache.num_kv_heads, cache.head_dim)
        parts = []
        for bucket in inputs.singles:
            rows = slice(bucket.first, bucket.first + bucket.num_rows)
            parts.append(attend_singles(q[rows], bucket, cache, index, layer.window))
        for chunk in inputs.chunks:
            rows = slice(chunk.first, chunk.first + chunk.num_rows)
            parts.append(attend_chunk(q[rows], keys_values[rows], chunk, cache, index, layer.window))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.view(len(qkv), self._q_size)

    def _after_attention(
        self, layer: Layer, x: Tensor, attended: Tensor, adapters: StepAdapters | None, index: int
    ) -> Tensor:
        x = self._plus(x, layer.attention_out, attended)
        if adapters is not None:
            adapters.add(index, "attention_out", attended, x)
        left_out = layer.gate_up.left_out(len(x))
        normed = self._norm(x, left_out)
        gate_up = layer.gate_up(normed)
        if adapters is not None:
            adapters.add(index, "gate_up", normed, gate_up, layer.gate_up_norm if left_out is None else None)
        if self._kernels is not None:
            inner = self._kernels.silu_mul(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            inner = silu(gate).mul_(up)
        x = self._plus(x, layer.down, inner)
        if adapters is not None:
            adapters.add(index, "down", inner, x)
        return x

    def _plus(self, x: Tensor, linear: Linear, inner: Tensor) -> Tensor:
        """The residual plus a product, which is summed over the ranks that hold its columns."""
        return linear.add_to(x, inner) if self.group.shard.size == 1 else x + self.group.total(linear(inner))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Rows divided by their root mean square; no weight where it is in the matrix that follows."""
        if self._kernels is not None:
            return self._kernels.norm(x, weight, self._epsilon)
        if weight is not None:
            return self._norm(x, None) * weight
        if x.device.type != "cpu":
            return torch.rms_norm(x, (x.shape[-1],), None, self._epsilon)
        # torch takes a CPU's norm apart into eight calls; these four cost half, which a decode step feels.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._epsilon_row, length, length, value=1 / x.shape[-1]).rsqrt_()
        return x.mul(scale.to(x.dtype))
