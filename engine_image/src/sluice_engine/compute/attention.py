"""Attention over the paged KV cache.

Owns the cache's layout and nothing else of a step: what to attend to comes as `StepInputs`. One layer's cache is
[num_blocks, block_tokens, 2, G, D]: a token's key and value lie together as they leave the projection, so a step writes
them with one copy and a block is read with one. `plain` is the reference: obvious, slow, and what tests compare with.

Letters: T rows, H query heads, G KV heads, D head dimension, R rows of a bucket, M blocks of a table.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sluice_engine.compute.host_blocks import HostBlocks
from sluice_engine.compute.step_inputs import Chunk, SingleBucket
from sluice_engine.model_files.architecture import Architecture


class KVCache:
    """The blocks of all layers. Block `num_blocks` is a scratch block beyond those that are handed out."""

    def __init__(
        self, shape: Architecture, num_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.dtype = dtype
        self.device = device
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.token_width = 2 * shape.num_kv_heads * shape.head_dim
        rows = (num_blocks + 1) * block_tokens
        # Filled, not merely reserved: memory that is not there must be missed at the start, not in mid-stream.
        self._layers = [
            torch.empty(rows, self.token_width, dtype=dtype, device=device).zero_() for _ in range(shape.num_layers)
        ]
        # The same memory serves every gather of every layer: fresh memory would be cleared page by page each time.
        self._gathered = torch.empty(0, dtype=dtype, device=device)

    @property
    def scratch_block(self) -> int:
        """A block that no request owns: synthetic steps write to it."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        return sum(layer.numel() * layer.itemsize for layer in self._layers)

    def write(self, layer: int, kv_rows: Tensor, keys_values: Tensor) -> None:
        """Store tokens' keys and values [T, 2 G D] at the given rows."""
        self._layers[layer].index_copy_(0, kv_rows, keys_values)

    def layer(self, layer: int) -> Tensor:
        """One layer's memory, [blocks × block_tokens, 2 G D], for kernels that read it where it lies."""
        return self._layers[layer]

    def host_blocks(self, num_blocks: int) -> HostBlocks:
        """Memory on the host for so many blocks, and the copies between both."""
        return HostBlocks(self._layers, num_blocks, self.block_tokens)

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """[len(blocks) × block_tokens, 2, G, D]: a copy that the next gather overwrites."""
        width = self.block_tokens * self.token_width
        num_values = len(blocks) * width
        if self._gathered.numel() < num_values:
            self._gathered = torch.empty(num_values, dtype=self._gathered.dtype, device=self._gathered.device)
        out = self._gathered[:num_values].view(len(blocks), width)
        torch.index_select(self._layers[layer].view(-1, width), 0, blocks, out=out)
        return out.view(-1, 2, self.num_kv_heads, self.head_dim)


def attend_singles(q: Tensor, bucket: SingleBucket, cache: KVCache, layer: int, window: int | None = None) -> Tensor:
    """One query a request: q [R, H, D] → [R, H, D]; with a `window`, to its last so many tokens.

    The heads that share a KV head are given to the kernel as its queries, so that no key is copied for them.
    """
    num_rows, num_heads, head_dim = q.shape
    gathered = cache.gather(layer, bucket.blocks).view(num_rows, -1, 2, cache.num_kv_heads, head_dim)
    mask = bucket.mask if window is None else bucket.window_mask
    if mask is None:
        gathered = gathered[:, : bucket.num_tokens]
    keys, values = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
    grouped = q.view(num_rows, cache.num_kv_heads, -1, head_dim)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return attended.reshape(num_rows, num_heads, head_dim)


def attend_chunk(
    q: Tensor, keys_values: Tensor, chunk: Chunk, cache: KVCache, layer: int, window: int | None = None
) -> Tensor:
    """Consecutive queries of one request: q [T, H, D], its own keys and values [T, 2, G, D] → [T, H, D].

    A chunk at the start attends to itself alone and reads nothing back. Heads that share a KV head become a batch
    dimension over which keys are broadcast, not copied.
    """
    num_rows, num_heads, head_dim = q.shape
    if chunk.start:
        keys_values = cache.gather(layer, chunk.blocks)[: chunk.start + chunk.num_rows]
    group = num_heads // cache.num_kv_heads
    keys = keys_values[:, 0].transpose(0, 1).expand(group, -1, -1, -1)
    values = keys_values[:, 1].transpose(0, 1).expand(group, -1, -1, -1)
    queries = q.view(num_rows, cache.num_kv_heads, group, head_dim).permute(2, 1, 0, 3)
    mask = chunk.mask if window is None else chunk.window_mask
    attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
    return attended.permute(2, 1, 0, 3).reshape(num_rows, num_heads, head_dim)


def plain(q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None = None) -> Tensor:
    """Causal attention of queries at positions start, start + 1, … to all keys up to their own, in float32.

    With a `window`, to the last so many of them.

    Shapes: q [T, H, D], keys and values [start + T, G, D] → [T, H, D].
    """
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,shd->hts", q.float(), keys) / head_dim**0.5
    future = torch.ones(num_rows, keys.shape[0], dtype=torch.bool, device=q.device).triu(start + 1)
    if window is not None:
        future |= ~torch.ones_like(future).triu(start + 1 - window)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, values).to(q.dtype)
