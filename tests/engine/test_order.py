"""Who goes first under each policy, and what each promises to those who wait."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.ordering import SERVICE, ids, step_us, waiter
from sluice_engine.config import Policy
from sluice_engine.core.order.keyed import KeyedOrder, first_come, priority
from sluice_engine.core.order.policy import Policies, order_for
from sluice_engine.core.order.service import Service
from sluice_engine.core.order.waiting import Waiting
from sluice_engine.core.request import Request, RequestStatus

SECOND = 1_000_000
POLICIES: Sequence[Policy] = (
    "FirstComeFirstServed",
    "ShortestJobFirst",
    "Priority",
    "EarliestDeadline",
    "WeightedFair",
)


def pushed(waiting: Waiting, *requests: Request) -> Waiting:
    for request in requests:
        waiting.push(request)
    return waiting


@pytest.mark.parametrize(
    ("policy", "requests", "now_s", "order"),
    [
        pytest.param(
            "FirstComeFirstServed", [waiter("late", arrival_s=2), waiter("early", arrival_s=1)], 9, "early late",
            id="first-come-first-served-goes-by-arrival-not-by-order-of-entry",
        ),
        pytest.param(
            "FirstComeFirstServed", [waiter("a"), waiter("b"), waiter("c")], 9, "a b c",
            id="requests-that-arrived-together-keep-the-order-of-entry",
        ),
        pytest.param(
            "FirstComeFirstServed", [waiter("long", prompt=4000), waiter("short", arrival_s=1, prompt=4)], 9,
            "long short", id="first-come-first-served-does-not-look-at-length",
        ),
        pytest.param(
            "ShortestJobFirst", [waiter("long", prompt=4000), waiter("short", arrival_s=5, prompt=4)], 9, "short long",
            id="the-shortest-job-overtakes-a-long-prompt-that-came-before",
        ),
        pytest.param(
            "ShortestJobFirst", [waiter("talker", output=500), waiter("brief", arrival_s=5, prompt=900, output=5)], 9,
            "brief talker", id="a-long-output-is-longer-work-than-a-long-prompt",
        ),
        pytest.param(
            "ShortestJobFirst", [waiter("bound", output=500), waiter("predicted", arrival_s=1, output=500, expected=5)],
            9, "predicted bound", id="a-predicted-output-counts-instead-of-max-tokens",
        ),
        pytest.param(
            "ShortestJobFirst", [waiter("long", prompt=4000), waiter("short", arrival_s=59, prompt=4)], 60,
            "long short", id="whoever-has-waited-for-the-guard-goes-before-every-shorter-job",
        ),
        pytest.param(
            "ShortestJobFirst",
            [waiter("longer", prompt=8000, arrival_s=1), waiter("long", prompt=4000), waiter("x", arrival_s=99)], 99,
            "long longer x", id="those-past-the-guard-go-by-arrival-among-themselves",
        ),
        pytest.param(
            "Priority", [waiter("background", priority=8), waiter("critical", arrival_s=1, priority=0)], 1,
            "critical background", id="the-lower-number-goes-first",
        ),
        pytest.param(
            "Priority", [waiter("aged", priority=6), waiter("fresh", arrival_s=60, priority=5)], 60, "aged fresh",
            id="base-six-after-sixty-seconds-is-ahead-of-a-fresh-five",
        ),
        pytest.param(
            "Priority", [waiter("aged", priority=6), waiter("fresh", arrival_s=19.9, priority=5)], 60, "fresh aged",
            id="one-level-is-not-made-up-for-before-twenty-seconds",
        ),
        pytest.param(
            "Priority", [waiter("aged", priority=6), waiter("fresh", arrival_s=20, priority=5)], 60, "aged fresh",
            id="after-exactly-twenty-seconds-the-first-to-come-goes-first",
        ),
        pytest.param(
            "EarliestDeadline", [waiter("loose", finish_s=90), waiter("tight", arrival_s=1, finish_s=30)], 2,
            "tight loose", id="the-earlier-deadline-goes-first",
        ),
        pytest.param(
            "EarliestDeadline",
            [waiter("short", finish_s=30, expected=5), waiter("long", finish_s=31, expected=99)],
            2, "long short", id="of-two-like-deadlines-the-longer-work-must-start-first",
        ),
        pytest.param(
            "EarliestDeadline", [waiter("whole", finish_s=20), waiter("first", first_s=5)], 2, "first whole",
            id="a-first-token-and-an-end-are-compared-by-the-last-moment-to-start",
        ),
        pytest.param(
            "EarliestDeadline", [waiter("none"), waiter("far", arrival_s=5, finish_s=9999)], 9, "far none",
            id="a-request-without-a-deadline-comes-after-those-with-one",
        ),
        pytest.param(
            "EarliestDeadline", [waiter("none"), waiter("soon", arrival_s=5, finish_s=90)], 60, "none soon",
            id="a-request-without-a-deadline-is-not-starved-past-the-guard",
        ),
        pytest.param(
            "EarliestDeadline", [waiter("b", arrival_s=2), waiter("a", arrival_s=1)], 9, "a b",
            id="without-deadlines-it-is-first-come-first-served",
        ),
        pytest.param(
            "WeightedFair", [*(waiter(f"a{i}", tenant="a") for i in range(3)), waiter("b", arrival_s=1, tenant="b")], 9,
            "a0 b a1 a2", id="a-tenant-with-many-requests-does-not-shut-out-one-with-few",
        ),
        pytest.param(
            "WeightedFair", [waiter("batch", tenant="a", priority=6), waiter("urgent", tenant="a", priority=0)], 0,
            "urgent batch", id="inside-a-share-classes-keep-their-order",
        ),
    ],
)  # fmt: skip
def test_order(policy: Policy, requests: list[Request], now_s: int, order: str) -> None:
    waiting = pushed(order_for(Policies(order=policy), SERVICE), *requests)

    assert ids(waiting.candidates(now_s * SECOND)) == order.split()


@pytest.mark.parametrize(
    ("fresh_level", "first"),
    [
        pytest.param(5, "old", id="ahead-of-a-fresh-5"),
        pytest.param(4, "old", id="ahead-of-a-fresh-4"),
        pytest.param(2, "fresh", id="behind-a-fresh-2"),
    ],
)
def test_a_6_that_waited_a_minute_at_20_s_a_level_stands_at_3(fresh_level: int, first: str) -> None:
    waiting = pushed(
        order_for(Policies(order="Priority", aging_interval_us=20 * SECOND), SERVICE),
        waiter("old", priority=6),
        waiter("fresh", arrival_s=60, priority=fresh_level),
    )

    assert ids(waiting.candidates(60 * SECOND))[0] == first


def test_without_aging_a_lower_class_waits_as_long_as_there_is_a_higher_one() -> None:
    waiting = pushed(
        order_for(Policies(order="Priority", aging_interval_us=0), SERVICE),
        waiter("background", priority=8),
        waiter("critical", arrival_s=999_999, priority=0),
    )

    assert ids(waiting.candidates(999_999 * SECOND)) == ["critical", "background"]


@given(
    st.lists(st.tuples(st.integers(0, 200_000_000), st.integers(0, 9)), min_size=2, max_size=20),
    st.integers(1, 40_000_000),
)
def test_a_request_is_overtaken_only_by_those_within_its_aging(jobs: list[tuple[int, int]], interval: int) -> None:
    requests = [waiter(str(i), arrival_us=arrival, priority=level) for i, (arrival, level) in enumerate(jobs)]
    order = KeyedOrder(priority(interval))
    for request in requests:
        request.place = int(request.id)
        order.push(request)

    for ahead, behind in itertools.combinations(order.candidates(0), 2):
        head_start = (behind.priority - ahead.priority) * interval
        assert ahead.arrival_us - behind.arrival_us <= head_start


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 5000), st.integers(1, 500)), min_size=2, max_size=20),
    st.integers(0, 400),
)
def test_past_the_guard_only_earlier_requests_are_ahead(jobs: list[tuple[int, int, int]], now_s: int) -> None:
    waiting = order_for(Policies(order="ShortestJobFirst"), SERVICE)
    for index, (arrival, prompt, output) in enumerate(jobs):
        if arrival <= now_s:
            waiting.push(waiter(str(index), arrival_s=arrival, prompt=prompt, output=output))

    for ahead, behind in itertools.combinations(waiting.candidates(now_s * SECOND), 2):
        if behind.arrival_us + 60 * SECOND <= now_s * SECOND:
            assert ahead.arrival_us <= behind.arrival_us


@pytest.mark.parametrize("policy", POLICIES)
def test_a_preempted_request_returns_to_its_place_among_those_that_arrived_with_it(policy: Policy) -> None:
    first, second, third = (waiter(name) for name in "abc")
    waiting = pushed(order_for(Policies(order=policy), SERVICE), first, second, third)
    for request in (first, second):
        waiting.remove(request)
        waiting.charge(request, starts=1)

    pushed(waiting, second, first)

    assert ids(waiting.candidates(0)) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pass_that_skips_and_takes_leaves_the_rest_in_order(policy: Policy) -> None:
    requests = [waiter(name) for name in "abcde"]
    waiting = pushed(order_for(Policies(order=policy), SERVICE), *requests)

    for request in waiting.candidates(0):
        if request.id in {"b", "d"}:
            waiting.remove(request)
        if request.id == "d":
            break

    assert ids(waiting.candidates(0)) == ["a", "c", "e"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_new_pass_ends_one_that_was_left_open(policy: Policy) -> None:
    waiting = pushed(order_for(Policies(order=policy), SERVICE), *(waiter(name) for name in "abc"))
    left_open = waiting.candidates(0)
    next(left_open)

    assert ids(waiting.candidates(0)) == ["a", "b", "c"]
    assert list(left_open) == []
    assert ids(waiting.candidates(0)) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", POLICIES)
def test_leaving_costs_no_memory_in_the_end(policy: Policy) -> None:
    waiting = order_for(Policies(order=policy), SERVICE)
    stays = waiter("stays")
    waiting.push(stays)
    for index in range(1000):
        request = waiter(str(index), arrival_s=1, finish_s=1e6, tenant=str(index % 7))
        waiting.push(request)
        waiting.remove(request)

    assert len(waiting) == 1
    assert _held(waiting) < 1000


def _held(waiting: Waiting) -> int:
    """Requests that anything inside still refers to, however deep."""
    seen: set[int] = set()
    todo: list[object] = [waiting]
    found = 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, Request):
            found += 1
        elif isinstance(thing, dict):
            todo.extend([*thing.keys(), *thing.values()])
        elif isinstance(thing, (list, tuple, set)):
            todo.extend(thing)
        else:
            todo.extend(getattr(thing, "__dict__", {}).values())
            todo.extend(getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ()))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pass_is_paid_by_what_it_yields_not_by_what_waits(policy: Policy) -> None:
    waiting = order_for(Policies(order=policy), SERVICE)
    calls = 0
    requests = [waiter(str(i), arrival_us=i, tenant=str(i % 50)) for i in range(5000)]
    for request in requests:
        waiting.push(request)
    original = Request.__hash__

    class Counting(Request):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal calls
            calls += 1
            return original(self)

    for request in requests:
        request.__class__ = Counting
    for _ in range(10):
        list(itertools.islice(waiting.candidates(10**12), 4))

    assert calls <= 10 * 4 * 6, "each yielded request is looked up a few times, no other at all"


class Expiries(RuleBasedStateMachine):
    """Under every policy each request is yielded while it waits and only then, and expires exactly once, in time."""

    def __init__(self) -> None:
        super().__init__()
        self.orders = {policy: order_for(Policies(order=policy), SERVICE) for policy in POLICIES}
        self.waits: dict[str, dict[Policy, Request]] = {}
        self.running: dict[str, dict[Policy, Request]] = {}
        self.now_us = 0
        self.count = itertools.count()

    def _push(self, twins: dict[Policy, Request]) -> None:
        for policy, request in twins.items():
            request.status = RequestStatus.WAITING
            self.orders[policy].push(request)

    @rule(
        tenant=st.sampled_from("abc"),
        level=st.integers(0, 9),
        prompt=st.integers(1, 3000),
        first_s=st.none() | st.floats(0.01, 20),
        finish_s=st.none() | st.floats(0.01, 90),
    )
    def arrive(self, tenant: str, level: int, prompt: int, first_s: float | None, finish_s: float | None) -> None:
        name, now = str(next(self.count)), self.now_us / SECOND
        twins = {
            policy: waiter(
                name,
                arrival_us=self.now_us,
                tenant=tenant,
                priority=level,
                prompt=prompt,
                first_s=None if first_s is None else now + first_s,
                finish_s=None if finish_s is None else now + finish_s,
            )
            for policy in POLICIES
        }
        self._push(twins)
        self.waits[name] = twins

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now_us += round(seconds * SECOND)
        for policy, waiting in self.orders.items():
            expired = waiting.expired(self.now_us)
            for request in expired:
                latest = SERVICE.latest_start_us(request)
                assert latest is not None
                assert latest < self.now_us
                assert request in waiting
                waiting.remove(request)
                del self.waits[request.id][policy]
            assert waiting.expired(self.now_us) == []

    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        for policy, waiting in self.orders.items():
            skip = data.draw(st.integers(0, 3))
            for request in itertools.islice(waiting.candidates(self.now_us), skip, skip + 2):
                waiting.remove(request)
                waiting.charge(request, starts=1)
                self.running.setdefault(request.id, {})[policy] = self.waits[request.id].pop(policy)

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data(), ends=st.booleans())
    def leave(self, data: st.DataObject, ends: bool) -> None:  # noqa: FBT001
        name = data.draw(st.sampled_from([name for name, twins in self.running.items() if twins]))
        twins = self.running.pop(name)
        for policy, request in twins.items():
            self.orders[policy].charge(request, tokens=9, device_us=99, block_us=999)
            if ends:
                self.orders[policy].remove(request)
            else:
                self.orders[policy].push(request)
                self.waits[name][policy] = request

    @invariant()
    def each_waiting_request_is_yielded_once(self) -> None:
        for policy, waiting in self.orders.items():
            expected = sorted(name for name, twins in self.waits.items() if policy in twins)
            assert sorted(ids(waiting.candidates(self.now_us))) == expected
            assert sorted(ids(waiting)) == expected
            assert len(waiting) == len(expected)
            assert waiting.waiting_tokens == sum(request.num_tokens - request.num_computed for request in waiting)


TestExpiries = Expiries.TestCase
TestExpiries.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("request_", "last_start_s"),
    [
        pytest.param(waiter("a", prompt=1000, first_s=5), 4.945, id="a-first-token-needs-its-prompt-computed"),
        pytest.param(waiter("a", prompt=20_000, first_s=5), 4.24, id="a-prompt-longer-than-a-step-needs-several"),
        pytest.param(
            waiter("a", prompt=1000, finish_s=5, output=90), 4.945, id="without-a-prediction-one-token-will-do"
        ),
        pytest.param(
            waiter("a", prompt=1000, finish_s=5, output=90, expected=11), 4.645, id="a-predicted-output-must-fit-in"
        ),
        pytest.param(waiter("a", prompt=1000, first_s=9, finish_s=5), 4.945, id="the-tighter-of-the-two-decides"),
        pytest.param(waiter("a"), None, id="no-deadline-no-last-moment"),
    ],
)
def test_last_moment_to_start(request_: Request, last_start_s: float | None) -> None:
    latest = SERVICE.latest_start_us(request_)

    assert latest == (None if last_start_s is None else round(last_start_s * SECOND))


def test_a_deadline_in_the_past_expires_at_once_and_is_not_the_most_urgent() -> None:
    late, fresh = waiter("late", finish_s=-1), waiter("fresh", finish_s=60)
    waiting = pushed(order_for(Policies(order="EarliestDeadline"), SERVICE), late, fresh)

    assert ids(waiting.expired(0)) == ["late"]
    waiting.remove(late)
    assert ids(waiting.candidates(0)) == ["fresh"]


def test_a_prefix_that_was_computed_meanwhile_gives_a_request_more_time() -> None:
    cached = 0
    service = Service(step_us, 8192, cached_tokens=lambda _request: cached)
    waiting = pushed(order_for(Policies(), service), waiter("a", prompt=1000, first_s=5))
    assert waiting.expired(4_940_000) == []

    cached = 992

    assert waiting.expired(4_960_000) == [], "only eight tokens are left to compute: 20 ms"
    assert ids(waiting.expired(4_980_000)) == ["a"]


def test_expiry_needs_no_free_slot_and_fires_at_the_last_moment() -> None:
    request = waiter("a", prompt=1000, first_s=5)
    waiting = pushed(order_for(Policies(), SERVICE), request)

    assert waiting.expired(4_945_000) == []
    assert ids(waiting.expired(4_945_001)) == ["a"]


def test_a_first_token_that_came_before_a_preemption_has_kept_its_deadline() -> None:
    request = waiter("a", prompt=1000, first_s=5)
    request.tokens.append(7)
    waiting = pushed(order_for(Policies(), SERVICE), request)

    assert waiting.expired(99 * SECOND) == []


def test_first_come_is_never_overtaken() -> None:
    assert first_come(waiter("a", arrival_s=3)) == 3 * SECOND
