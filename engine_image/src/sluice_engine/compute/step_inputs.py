"""What the forward pass reads of a step: tensors over its rows, frozen before the device sees them.

There are three ways to attend, and inputs for one of them: buckets of single rows and chunks, for torch's operators;
tiles, for own kernels on a CPU; paged rows, for attention that reads the cache in place on a GPU. `inputs` and
`paged_inputs` build them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sluice_engine.compute.adapters import StepAdapters
from sluice_engine.compute.paged_rows import PagedRows
from sluice_engine.core.plan import Ints
from sluice_engine.kernels.library import Tiles


@dataclass(frozen=True, slots=True)
class SingleBucket:
    """Single rows [first, first + num_rows) of like length, attended to in one call."""

    first: int
    num_rows: int
    blocks: Tensor
    """[num_rows × M] block ids, row after row; padding repeats a valid id."""
    num_tokens: int
    """Tokens attended to: of the longest row."""
    mask: Tensor | None
    """[num_rows, 1, 1, M × block_tokens]: 0 or −inf in the model's type; None when no row is padded."""
    window_mask: Tensor | None
    """The same for layers with a sliding window; None as well when no row is longer than it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [first, first + num_rows): consecutive tokens of one request, the first at position `start`."""

    first: int
    num_rows: int
    start: int
    blocks: Tensor
    """Block ids of [0, start + num_rows); empty when nothing precedes the chunk."""
    mask: Tensor | None
    """[num_rows, start + num_rows]: 0 or −inf; None for a chunk that starts at 0, which is plainly causal."""
    window_mask: Tensor | None
    """The same for layers with a sliding window."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything the forward pass reads of a step. T rows, S of which sample."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    kv_rows: Tensor
    """[T]: where each token's KV is written: block × block_tokens + offset."""
    singles: tuple[SingleBucket, ...]
    chunks: tuple[Chunk, ...]
    sample_rows: Tensor
    """[S]: the batch's rows after which a token is sampled."""
    sample_buckets: tuple[SingleBucket, ...]
    """The sampling rows as single rows, in the order of `sample_rows`: the last layer computes only them."""
    sampled: Ints
    """[S]: which of the plan's sampling rows each is."""
    tiles: Tiles | None
    """All rows, for kernels; there are no buckets and no chunks then."""
    sample_tiles: Tiles | None
    """The sampling rows, in the order of `sample_rows`."""
    adapters: StepAdapters | None
    """Which rows run with an adapter; None where none does."""
    sample_adapters: StepAdapters | None
    """The same of the sampling rows."""
    paged: tuple[PagedRows, ...] = ()
    """All rows, for attention that reads the cache in place: decodes, then chunks; no buckets and no tiles then."""
    sample_paged: PagedRows | None = None
    """The sampling rows, in the order of `sample_rows`."""
    sampled_slots: Tensor | None = None
    """[S]: slots of the sampling rows, where tokens stay on the device."""
