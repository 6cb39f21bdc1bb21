"""Draws tokens from logits: temperature, min_p, top_k, top_p (over what the others left), then a race.

Owns the randomness. A draw is two exponential races, among groups of tokens by their shares, then among the tokens of
the group: share over exponential variate, the highest wins. The variates are keyed by (seed, choice, position) and the
racer, so a token depends on its request's history alone: not on the batch, on chunks, or on having been preempted. A
race is decided by its two best, which rounding swaps once in a hundred thousand draws; the inverse of a distribution
function has a border at each of its tokens, which rounding crosses hundreds of times as often.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from sluice_engine.compute.transfer import sent
from sluice_engine.core.plan import ScheduledRequest

# About the root of a large vocabulary: so many groups race as tokens after them.
_GROUP_TOKENS = 256
# Sorted prefix in which top_p almost always finds its end; sorting a whole vocabulary costs milliseconds a row.
_NUCLEUS_TOKENS = 256


def keys_of(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Two whole numbers of 32 bits, signed, that belong to this token of this choice of this seed, everywhere."""
    key = struct.pack("<QQQ", seed & (2**64 - 1), choice, position)
    return struct.unpack("<ii", hashlib.blake2b(key, digest_size=8).digest())


def exponentials(keys: Sequence[tuple[int, int]], racers: Tensor) -> Tensor:
    """Exponential variates [R, N] from the keys of each row, for its racers [R, N] or [N]: their numbers, int32.

    A hash of racer and keys (the finalizer of MurmurHash3, whose avalanche is full) gives 31 bits; small variates,
    which win races, are the most finely graded.
    """
    halves = zip(*keys, strict=True)
    first, second = (sent(torch.tensor(half, dtype=torch.int32), racers.device)[:, None] for half in halves)
    # By an odd number: neighbours differ in all bits before they are mixed.
    bits = _mixed(_mixed((racers * (0x9E3779B1 - 2**32)) ^ first) ^ second)
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    # Rounded to float32 the largest would be 1, and its variate infinite.
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _mixed(bits: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, of a fresh tensor, in place. Source: Austin Appleby, public domain."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x85EBCA6B - 2**32
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= 0xC2B2AE35 - 2**32
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def draw(logits: Tensor, entries: Sequence[ScheduledRequest]) -> Tensor:
    """[R] token ids drawn from logits [R, V]; no entry takes the likeliest."""
    params = [entry.request.sampling for entry in entries]
    device = logits.device
    temperature = sent(torch.tensor([p.temperature for p in params]), device)
    # The highest is taken off first: a tiny temperature then cannot overflow what decides the draw.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    if any(p.min_p > 0 for p in params):
        # min_p × the highest probability, as logits below the highest, which is 0.
        floor = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        scaled.masked_fill_(scaled < sent(torch.tensor(floor), device)[:, None], -math.inf)
    vocab_size = logits.shape[-1]
    if any(0 < p.top_k < vocab_size for p in params):
        kept = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        _keep_top_k(scaled, kept)
    probabilities = scaled.softmax(-1)
    if any(p.top_p < 1 for p in params):
        keep = keep_top_p if device.type == "cpu" else keep_top_p_unseen
        keep(probabilities, [p.top_p for p in params])
    keys = [
        keys_of(entry.request.sampling.seed, entry.request.sampling.choice, entry.start + entry.num_tokens)
        for entry in entries
    ]
    return _race(probabilities, keys)


def _race(probabilities: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    """[R]: the winners among tokens with these probabilities [R, V]."""
    rows, vocab_size = probabilities.shape
    num_groups = -(-vocab_size // _GROUP_TOKENS)
    if missing := num_groups * _GROUP_TOKENS - vocab_size:
        probabilities = pad(probabilities, (0, missing))
    grouped = probabilities.view(rows, num_groups, _GROUP_TOKENS)
    device = probabilities.device
    # Below zero: no token has such a number.
    groups = torch.arange(-num_groups, 0, dtype=torch.int32, device=device)
    group = (grouped.sum(-1) / exponentials(keys, groups)).argmax(-1)
    first = (group * _GROUP_TOKENS).to(torch.int32)[:, None]
    tokens = first + torch.arange(_GROUP_TOKENS, dtype=torch.int32, device=device)
    within = grouped[torch.arange(rows, device=device), group]
    return group * _GROUP_TOKENS + (within / exponentials(keys, tokens)).argmax(-1)


def _keep_top_k(scaled: Tensor, kept: list[int]) -> None:
    """Drop, in place, what is below a row's k-th highest; ties with it stay."""
    vocab_size = scaled.shape[-1]
    rows = [i for i, k in enumerate(kept) if k < vocab_size]
    at = sent(torch.tensor(rows), scaled.device)
    some = scaled.index_select(0, at)
    highest = some.topk(max(kept[i] for i in rows), dim=-1).values
    column = sent(torch.tensor([kept[i] - 1 for i in rows]), scaled.device)
    least = highest.gather(1, column[:, None])
    scaled.index_copy_(0, at, some.masked_fill(some < least, -math.inf))


def keep_top_p(probabilities: Tensor, shares: list[float]) -> None:
    """Drop, in place, all but the smallest set of likeliest tokens with that share; ties with its last stay."""
    for row, share in enumerate(shares):
        if share >= 1:
            continue
        size = min(_NUCLEUS_TOKENS, probabilities.shape[-1])
        while True:
            highest = probabilities[row].topk(size).values
            before = highest.cumsum(-1, dtype=torch.float64) - highest
            num_kept = int((before < share).sum())
            if num_kept < size or size == probabilities.shape[-1]:
                break
            size = min(8 * size, probabilities.shape[-1])
        least = highest[max(num_kept, 1) - 1]
        probabilities[row].masked_fill_(probabilities[row] < least, 0.0)


def keep_top_p_unseen(probabilities: Tensor, shares: list[float]) -> None:
    """The same without waiting for the device: whole rows are sorted, which a GPU does in passing."""
    share = sent(torch.tensor(shares, dtype=torch.float64), probabilities.device)[:, None]
    highest = probabilities.sort(dim=-1, descending=True).values
    before = highest.cumsum(-1, dtype=torch.float64) - highest
    last = ((before < share).sum(-1, keepdim=True) - 1).clamp_(min=0)
    dropped = (probabilities < highest.gather(1, last)) & (share < 1)
    probabilities.masked_fill_(dropped, 0.0)
