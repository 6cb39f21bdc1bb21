"""Recompute or swap: both prices, the choice, and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.config import Resume
from sluice_engine.core.price import (
    PLANNING_LINK_BYTES_PER_S,
    PLANNING_TOKEN_BYTES,
    HostRoom,
    PreemptionPrice,
    price,
    recompute_us,
)
from sluice_engine.core.steptime import PLANNING_RECOMPUTE_US_PER_TOKEN, PlanningProfile

BLOCK_TOKENS = 16
WIDE = HostRoom(free_blocks=16_384, total_blocks=16_384)  # 80 GiB of the planning example's blocks


@dataclass(frozen=True)
class EvenLink:
    """As fast one way as the other."""

    bytes_per_s: int = PLANNING_LINK_BYTES_PER_S
    block_bytes: int = BLOCK_TOKENS * PLANNING_TOKEN_BYTES

    def out_us(self, num_blocks: int) -> int:
        return num_blocks * self.block_bytes * 1_000_000 // self.bytes_per_s

    in_us = out_us


def priced(
    *,
    tokens: int = 4000,
    recompute: int = 4000 * PLANNING_RECOMPUTE_US_PER_TOKEN,
    resume: Resume = "Auto",
    link: EvenLink | None = EvenLink(),
    host: HostRoom | None = WIDE,
    queued_us: int = 0,
    suspension_us: int = 0,
) -> PreemptionPrice:
    return price(
        tokens,
        BLOCK_TOKENS,
        recompute,
        resume=resume,
        link=link,
        host=host,
        queued_us=queued_us,
        suspension_us=suspension_us,
    )


def test_the_planning_figures_are_the_texts() -> None:
    """4,000 tokens of 320 KiB: 240 ms to compute again, 50 ms out and back at 52.4 GB/s each way."""
    figures = priced()

    assert (figures.recompute_us, figures.swap_us) == (240_000, 50_000)
    assert (figures.choice, figures.reason) == ("swap", "cheaper")


@pytest.mark.parametrize(
    ("figures", "choice", "reason"),
    [
        pytest.param(priced(recompute=49_999), "recompute", "cheaper", id="a-short-state-is-computed-again"),
        pytest.param(priced(recompute=50_000), "recompute", "cheaper", id="of-equal-prices-the-one-that-holds-nothing"),
        pytest.param(priced(recompute=50_001), "swap", "cheaper", id="a-long-state-is-moved"),
        pytest.param(
            priced(link=EvenLink(10_000_000_000)), "recompute", "cheaper", id="a-slow-link-is-dearer-than-computing"
        ),
        pytest.param(priced(queued_us=200_000), "recompute", "cheaper", id="a-queue-on-the-link-is-waited-for"),
        pytest.param(priced(suspension_us=1_000_000), "swap", "cheaper", id="a-second-away-is-little-in-a-wide-pool"),
        pytest.param(
            priced(host=HostRoom(free_blocks=300, total_blocks=500), suspension_us=1_000_000),
            "recompute", "cheaper", id="a-second-away-is-too-long-in-a-pool-that-it-nearly-fills",
        ),
        pytest.param(
            priced(host=HostRoom(free_blocks=300, total_blocks=500), suspension_us=100_000),
            "swap", "cheaper", id="a-short-time-away-is-not",
        ),
        pytest.param(priced(host=None), "recompute", "no_host_pool", id="without-a-host-pool-there-is-one-way"),
        pytest.param(priced(link=None), "recompute", "no_host_pool", id="without-a-link-there-is-one-way"),
        pytest.param(
            priced(host=HostRoom(free_blocks=0, total_blocks=0)),
            "recompute", "no_host_pool", id="a-pool-of-no-blocks-is-none",
        ),
        pytest.param(
            priced(host=HostRoom(free_blocks=249, total_blocks=5000)),
            "recompute", "host_pool_full", id="one-block-too-few-on-the-host",
        ),
        pytest.param(
            priced(host=HostRoom(free_blocks=250, total_blocks=5000)), "swap", "cheaper", id="just-enough-on-the-host"
        ),
        pytest.param(priced(resume="Recompute"), "recompute", "set", id="recompute-when-the-user-says-so"),
        pytest.param(priced(resume="Swap", recompute=1), "swap", "set", id="swap-when-the-user-says-so"),
        pytest.param(
            priced(resume="Swap", host=HostRoom(free_blocks=9, total_blocks=5000)),
            "recompute", "host_pool_full", id="swap-needs-room-whatever-the-user-says",
        ),
        pytest.param(priced(tokens=0, recompute=0), "recompute", "nothing_computed", id="no-state-costs-nothing"),
    ],
)  # fmt: skip
def test_choice(figures: PreemptionPrice, choice: str, reason: str) -> None:
    assert (figures.choice, figures.reason) == (choice, reason)


def test_both_prices_are_told_also_when_one_is_set() -> None:
    figures = priced(resume="Recompute", queued_us=7, suspension_us=16_384)

    assert (figures.recompute_us, figures.swap_us) == (240_000, 50_000 + 7 + 3)
    assert (figures.copy_us, figures.queued_us, figures.holding_us) == (50_000, 7, 3)
    assert figures.us == 240_000


@given(st.integers(1, 50_000), st.integers(0, 10**6), st.integers(0, 10**8), st.integers(1, 10**5), st.data())
def test_the_choice_is_never_dearer_than_the_other_way(
    tokens: int, queued: int, suspension: int, total: int, data: st.DataObject
) -> None:
    host = HostRoom(free_blocks=data.draw(st.integers(0, total)), total_blocks=total)

    figures = priced(tokens=tokens, recompute=tokens * 60, host=host, queued_us=queued, suspension_us=suspension)

    assert figures.us == min(figures.recompute_us, figures.us if figures.swap_us is None else figures.swap_us)


@pytest.mark.parametrize(
    ("tokens", "chunk", "decodes", "expected"),
    [
        pytest.param(4000, 4000, 1, 140_000, id="beside-other-work-only-the-prefill-itself-is-paid"),
        pytest.param(4000, 1000, 1, 140_000, id="in-chunks-it-is-the-same-where-depth-costs-nothing"),
        pytest.param(0, 1000, 1, 0, id="nothing-computed-costs-nothing"),
    ],
)
def test_recompute_beside_other_work(tokens: int, chunk: int, decodes: int, expected: int) -> None:
    price_us = recompute_us(tokens, PlanningProfile(), chunk_tokens=chunk, decode_requests=decodes, context_tokens=0)

    assert price_us == expected


def test_a_deep_state_costs_more_to_compute_again_than_a_shallow_one() -> None:
    class Deep(PlanningProfile):
        def predict_us(
            self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0
        ) -> int:
            return super().predict_us(decode_requests, prefill_tokens, context_tokens) + prior_pairs // 1000

    price_us = recompute_us(3000, Deep(), chunk_tokens=1000, decode_requests=1, context_tokens=0)

    assert price_us == 3000 * 35 + (0 + 1000 * 1000 + 1000 * 2000) // 1000
