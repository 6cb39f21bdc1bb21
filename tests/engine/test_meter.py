"""What running requests use, charged by the block and not by the step."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ordering import waiter
from sluice_engine.core.order.meter import BLOCKS_A_CHARGE, Meter
from sluice_engine.core.request import Request


class Bill:
    """Adds up what it is told."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.calls = 0

    def charge(self, request: Request, *, tokens: int = 0, device_us: int = 0, block_us: int = 0) -> None:
        self.calls += 1
        self.sums[request.id].update(tokens=tokens, device_us=device_us, block_us=block_us)


def running(name: str, meter: Meter, *, blocks: int = 2, now_us: int = 0, decodes: bool = False) -> Request:
    request = waiter(name)
    request.blocks = list(range(blocks))
    meter.entered(request, now_us)
    if decodes:
        meter.ran(0, 0, 0.0, [(request, 1, True)])
    return request


def test_a_step_of_decodes_is_shared_evenly() -> None:
    bill = Bill()
    meter = Meter(bill)
    requests = [running(name, meter, decodes=True) for name in "ab"]

    meter.ran(10_000, 2, 1.0, [])
    for request in requests:
        meter.left(request, 0)

    assert [bill.sums[name]["device_us"] for name in "ab"] == [5000, 5000]


def test_a_mixed_step_is_split_as_it_was_predicted_and_chunks_share_by_tokens() -> None:
    bill = Bill()
    meter = Meter(bill)
    decoding = running("d", meter, decodes=True)
    long, short = running("long", meter), running("short", meter)

    meter.ran(100_000, 1, 0.3, [(long, 600, False), (short, 100, True)])
    for request in (decoding, long, short):
        meter.left(request, 0)

    assert {name: bill.sums[name]["device_us"] for name in ("d", "long", "short")} == {
        "d": 30_000,
        "long": 60_000,
        "short": 10_000,
    }


def test_a_request_that_prefills_owes_nothing_for_the_decodes_of_others() -> None:
    bill = Bill()
    meter = Meter(bill)
    running("d", meter, decodes=True)
    waits = running("waits", meter)

    meter.ran(100_000, 1, 1.0, [])
    meter.left(waits, 0)

    assert bill.sums["waits"]["device_us"] == 0


def test_kv_over_time_counts_the_blocks_held_in_each_span() -> None:
    bill = Bill()
    meter = Meter(bill)
    request = running("a", meter, blocks=2)

    request.blocks.append(9)
    meter.grew(request, 1000)
    meter.left(request, 1500)

    assert bill.sums["a"]["block_us"] == 2 * 1000 + 3 * 500


def test_tokens_are_those_computed_since_it_entered() -> None:
    bill = Bill()
    meter = Meter(bill)
    request = waiter("a", prompt=10)
    request.num_prefilled = 4  # found in the prefix cache
    meter.entered(request, 0)

    request.num_prefilled = 10
    meter.left(request, 0)

    assert bill.sums["a"]["tokens"] == 6


def test_growing_is_charged_by_the_few_blocks_and_not_by_each() -> None:
    bill = Bill()
    meter = Meter(bill)
    request = running("a", meter, blocks=0)

    for number in range(3 * BLOCKS_A_CHARGE + 1):
        request.blocks.append(number)
        meter.grew(request, 0)

    assert bill.calls == 3


def test_what_is_not_running_is_not_charged() -> None:
    bill = Bill()
    meter = Meter(bill)

    meter.left(waiter("a"), 5)

    assert bill.calls == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 5)), min_size=1, max_size=50),
    st.sets(st.integers(0, 50)),
)
def test_the_bills_of_all_make_up_the_time_of_all_steps(steps: list[tuple[int, int]], charged: set[int]) -> None:
    """Whenever they are charged: all that decoded in every step owe the whole, to within a µs a request and step."""
    bill = Bill()
    meter = Meter(bill)
    requests = [running(str(i), meter, decodes=True) for i in range(5)]
    for index, (real_us, _) in enumerate(steps):
        meter.ran(real_us, len(requests), 1.0, [])
        if index in charged:
            requests[index % 5].blocks += [0] * BLOCKS_A_CHARGE
            meter.grew(requests[index % 5], 0)
    for request in requests:
        meter.left(request, 0)

    total = sum(each["device_us"] for each in bill.sums.values())
    assert 0 <= sum(real for real, _ in steps) - total <= 5
    assert bill.calls <= 2 * 5 + len(charged)
