"""The KV pool takes what is left, and says so when nothing is."""

from __future__ import annotations

import pytest
import torch

from sluice_engine.compute.pool import MARGIN_BYTES, NO_RESERVE, Reserve, num_blocks, num_host_blocks
from sluice_engine.compute.profile import LEAST_PREFILL_TOKENS, largest_that_fits
from sluice_engine.config import CacheConfig
from sluice_engine.errors import InvalidConfig

GIB = 1 << 30
BLOCK = 1 << 20
LARGE = Reserve(step_bytes=8 * GIB, first_graph_bytes=GIB, next_graph_bytes=GIB // 32, num_graphs=33)


@pytest.mark.parametrize(
    ("reserve", "total"),
    [
        pytest.param(NO_RESERVE, 0, id="nothing measured, nothing kept"),
        pytest.param(Reserve(step_bytes=BLOCK), BLOCK + MARGIN_BYTES, id="a small step and the least margin"),
        pytest.param(LARGE, 10 * GIB + 10 * GIB * 5 // 100, id="all recordings and a margin in percent"),
    ],
)
def test_what_is_kept_for_steps(reserve: Reserve, total: int) -> None:
    assert reserve.total_bytes == total
    assert reserve.free_bytes == total - reserve.graph_bytes


@pytest.mark.parametrize(
    ("cache", "reserve", "blocks"),
    [
        pytest.param(CacheConfig(memory_percent=90), NO_RESERVE, 92_160 // 10 - 1, id="a share of what is free"),
        pytest.param(
            CacheConfig(memory_percent=95),
            Reserve(step_bytes=5 * GIB),
            (10 * GIB - 5 * GIB - MARGIN_BYTES) // BLOCK - 1,
            id="what steps leave, where that is less",
        ),
        pytest.param(CacheConfig(capacity_bytes=GIB), LARGE, None, id="a capacity that steps do not leave"),
        pytest.param(CacheConfig(memory_percent=90), LARGE, None, id="nothing left"),
        pytest.param(CacheConfig(capacity_bytes=GIB), NO_RESERVE, 1023, id="the capacity that is set"),
    ],
)
def test_blocks_of_the_pool(cache: CacheConfig, reserve: Reserve, blocks: int | None) -> None:
    if blocks is not None:
        assert num_blocks(cache, BLOCK, 10 * GIB, reserve) == blocks
        return
    with pytest.raises(InvalidConfig, match=r"beside the weights and the \d+ that the largest step, recorded decode"):
        num_blocks(cache, BLOCK, 10 * GIB, reserve)


def test_host_blocks() -> None:
    assert num_host_blocks(None, BLOCK, 0) == 0
    assert num_host_blocks(5 * BLOCK + 1, BLOCK, GIB) == 5
    for wanted in (BLOCK - 1, 2 * GIB):
        with pytest.raises(InvalidConfig, match="host_swap_bytes"):
            num_host_blocks(wanted, BLOCK, GIB)


@pytest.mark.parametrize(("fits", "found"), [(1 << 20, 16_384), (5000, 4096), (LEAST_PREFILL_TOKENS, 256), (200, None)])
def test_the_largest_step_is_halved_until_it_fits(fits: int, found: int | None) -> None:
    def run(tokens: int) -> None:
        if tokens > fits:
            raise torch.OutOfMemoryError

    if found is not None:
        assert largest_that_fits(run, 16_384) == found
        return
    with pytest.raises(torch.OutOfMemoryError):
        largest_that_fits(run, 16_384)
