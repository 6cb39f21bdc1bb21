"""What steps and recordings take of a GPU's memory, measured on the model before its KV pool takes the rest.

All that is device-only in sizing the pool is here; the arithmetic over what it finds is `pool`'s.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from itertools import pairwise

import torch

from sluice_engine.compute.device import free_memory_bytes
from sluice_engine.compute.pool import Reserve

log = logging.getLogger(__name__)

LEAST_PREFILL_TOKENS = 256


def largest_that_fits(run: Callable[[int], None], tokens: int) -> int:
    """The most prefill tokens, halved as often as a step over them does not fit into memory.

    Raises:
        torch.OutOfMemoryError: the least does not fit either.
    """
    while True:
        try:
            run(tokens)
        except torch.OutOfMemoryError:
            if tokens // 2 < LEAST_PREFILL_TOKENS:
                raise
            log.info("a step of %s prefill tokens does not fit into memory", tokens)
            tokens //= 2
        else:
            return tokens


def step_bytes(run: Callable[[], None], device: torch.device) -> int:
    """The most that a step holds at once beside what is held already."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def reserve(
    run: Callable[[], None], record: Callable[[int], object], buckets: tuple[int, ...], device: torch.device
) -> Reserve:
    """What `run`, the largest step, and a recording of each bucket take; `record` returns what holds one.

    The two largest are recorded, for the memory of all: the smaller ones find theirs in the same pool.
    """
    largest = step_bytes(run, device)
    if not buckets:
        return Reserve(step_bytes=largest)
    free = [free_memory_bytes(device)]
    held = []
    for size in sorted(buckets, reverse=True)[:2]:
        held.append(record(size))
        free.append(free_memory_bytes(device))
    taken = [max(0, before - after) for before, after in pairwise(free)]
    held.clear()
    gc.collect()  # a recording holds its memory until it is collected
    return Reserve(largest, taken[0], taken[-1] if len(taken) > 1 else 0, len(buckets))
