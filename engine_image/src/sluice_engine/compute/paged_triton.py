"""Attention over the paged cache as a Triton kernel: mixed batches, GQA, sliding windows, split contexts.

One program computes some consecutive rows of one request for all heads that share a KV head, over one share of its
tokens. Which request a program serves is searched on the device, so a captured launch serves any batch of its size.
Contexts of single rows are split where rows alone would leave most of the GPU idle; the shares are merged by torch.
Source: the online softmax of Dao et al., FlashAttention-2 (2023); splitting as in Flash-Decoding (2023).
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]  # it has no stubs
import triton.language as tl  # type: ignore[import-untyped]  # likewise
from torch import Tensor

from sluice_engine.compute.paged_rows import PagedRows

# Queries that a program of chunks computes together: of 64 or more the tensor cores are busy.
_CHUNK_QUERIES = 64
# What the hardware multiplies at least.
_LEAST = 16
_KEYS = 64
# Below this many tokens a share of a context is not worth a program.
SHARE_TOKENS = 256
MAX_SHARES = 16


def num_shares(num_programs: int, num_processors: int, max_tokens: int) -> int:
    """In how many shares contexts of up to `max_tokens` are split, so that every processor has two programs."""
    wanted = 2 * num_processors // max(1, num_programs)
    return max(1, min(wanted, max_tokens // SHARE_TOKENS, MAX_SHARES))


class TritonAttention:
    """The kernel, as a backend."""

    name = "triton"

    def __init__(self, block_tokens: int, kv_heads: int, num_processors: int | None = None) -> None:
        """`num_processors`: that programs are spread over; None: the GPU's own."""
        self._block_tokens = block_tokens
        self._kv_heads = kv_heads
        if num_processors is None:
            num_processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._num_processors = num_processors

    def attend(self, q: Tensor, rows: PagedRows, layer: Tensor, out: Tensor, window: int | None) -> None:
        """See `PagedAttention`."""
        num_rows, num_heads, head_dim = q.shape
        group = num_heads // self._kv_heads
        singles = rows.max_rows == 1
        tile_rows = 1 if singles else max(1, _CHUNK_QUERIES // group)
        queries = max(_LEAST, triton.next_power_of_2(tile_rows * group))
        # One tile more for each request than its rows alone would need: where one begins is found by a formula.
        tiles = rows.num_requests if singles else num_rows // tile_rows + rows.num_requests
        shares = 1
        if singles:
            max_tokens = rows.tables.shape[1] * self._block_tokens
            shares = num_shares(
                tiles * self._kv_heads, self._num_processors, max_tokens if window is None else min(window, max_tokens)
            )
        # [shares, T, H, D] and [shares, T, H] of highest score and sum of weights; unused by a single share.
        parts = q.new_empty((shares if shares > 1 else 0, num_rows, num_heads, head_dim), dtype=torch.float32)
        marks = q.new_empty((2, *parts.shape[:3]), dtype=torch.float32)
        _attend[(tiles, self._kv_heads, shares)](
            q, layer, out, parts, marks[0], marks[1], rows.tables, rows.lengths, rows.starts,
            rows.num_requests, num_rows, head_dim**-0.5, window or 0,
            q.stride(0), q.stride(1), layer.shape[1], rows.tables.stride(0),
            BLOCK_TOKENS=self._block_tokens, GROUP=group, HEAD_DIM=head_dim,
            DIM=max(_LEAST, triton.next_power_of_2(head_dim)),
            SINGLES=singles, TILE_ROWS=tile_rows, QUERIES=queries, KEYS=_KEYS, SPLIT=shares > 1,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        if shares > 1:
            out.copy_(merged(parts, marks[0], marks[1]))


def merged(parts: Tensor, highest: Tensor, sums: Tensor) -> Tensor:
    """[T, H, D] of the shares [N, T, H, D], their highest scores and sums of weights [N, T, H]."""
    weights = torch.exp(highest - highest.amax(0))
    total = (weights * sums).sum(0)
    return (parts * weights[..., None]).sum(0) / total[..., None]


# Numbers that change from step to step are not specialised on: each would be compiled again in mid-stream.
@triton.jit(do_not_specialize=["num_requests", "num_rows", "window", "table_width"])  # type: ignore[untyped-decorator]  # triton has no stubs
def _attend(  # type: ignore[no-untyped-def]  # a kernel's arguments are pointers and numbers, which have no Python type
    q, layer, out, parts, highest, sums, tables, lengths, starts,
    num_requests, num_rows, scale, window,
    q_row, q_head, token_width, table_width,
    BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SINGLES: tl.constexpr, TILE_ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    share = tl.program_id(2)
    if SINGLES:
        request = tile
        at = 0
        first = tile
        count = 1
    else:
        # The last request whose first tile is not beyond this one: its tiles begin at starts // TILE_ROWS + its number.
        low = 0
        high = num_requests
        while low < high:
            middle = (low + high) // 2
            if tl.load(starts + middle) // TILE_ROWS + middle <= tile:
                low = middle + 1
            else:
                high = middle
        request = low - 1
        first = tl.load(starts + request)
        count = tl.load(starts + request + 1) - first
        at = (tile - first // TILE_ROWS - request) * TILE_ROWS
    if at < count:
        length = tl.load(lengths + request)
        before = length - count
        query = tl.arange(0, QUERIES)
        row = at + query // GROUP
        head = kv_head * GROUP + query % GROUP
        asked = (query < TILE_ROWS * GROUP) & (row < count)
        position = before + row
        dim = tl.arange(0, DIM)
        whole = dim < HEAD_DIM
        where_q = (first + row).to(tl.int64)[:, None] * q_row + head[:, None] * q_head + dim[None, :]
        wanted = tl.load(q + where_q, mask=asked[:, None] & whole[None, :], other=0.0)

        end = tl.minimum(length, before + at + TILE_ROWS)
        begin = tl.where(window > 0, tl.maximum(0, before + at + 1 - window), 0)
        if SPLIT:
            each = tl.cdiv(tl.cdiv(end - begin, KEYS), tl.num_programs(2)) * KEYS
            begin = begin + share * each
            end = tl.minimum(end, begin + each)

        best = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sum_of = tl.zeros([QUERIES, DIM], tl.float32)
        for key_first in range(begin, end, KEYS):
            key = key_first + tl.arange(0, KEYS)
            there = key < end
            block = tl.load(tables + request * table_width + key // BLOCK_TOKENS, mask=there, other=0)
            token = (block.to(tl.int64) * BLOCK_TOKENS + key % BLOCK_TOKENS) * token_width + kv_head * HEAD_DIM
            read = there[:, None] & whole[None, :]
            keys = tl.load(layer + token[:, None] + dim[None, :], mask=read, other=0.0)
            values = tl.load(layer + token[:, None] + token_width // 2 + dim[None, :], mask=read, other=0.0)
            scores = tl.dot(wanted, tl.trans(keys), input_precision="ieee") * scale
            seen = there[None, :] & (key[None, :] <= position[:, None])
            seen = seen & ((window <= 0) | (key[None, :] > position[:, None] - window))
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            # A row that has seen nothing yet has no highest score, and no weights either.
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - level[:, None])
            shrink = tl.exp(best - level)
            total = total * shrink + tl.sum(weights, 1)
            sum_of = sum_of * shrink[:, None]
            sum_of = sum_of + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            best = higher

        flat = (first + row).to(tl.int64) * (GROUP * tl.num_programs(1)) + head
        put = asked[:, None] & whole[None, :]
        if SPLIT:
            flat = flat + share.to(tl.int64) * num_rows * (GROUP * tl.num_programs(1))
            tl.store(parts + flat[:, None] * HEAD_DIM + dim[None, :], sum_of, mask=put)
            tl.store(highest + flat, best, mask=asked)
            tl.store(sums + flat, total, mask=asked)
        else:
            answer = sum_of / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(out + flat[:, None] * HEAD_DIM + dim[None, :], answer.to(out.dtype.element_ty), mask=put)
