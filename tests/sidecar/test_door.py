"""Who stands at the door: tenants, quotas and sizes, as a whole admission decides."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.state import DerivedLimits, PoolState
from sluice_engine.core.terms import Terms
from sluice_engine.live_config import LiveConfig, TenantConfig
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.waiting.sizes import SizeGuard

S = 1_000_000
COST = Cost((ChoiceCost(100, 50),))


class Pod:
    """Four slots and a hundred blocks before a hand-turned clock; each request stays until it is told to end."""

    def __init__(self, live: LiveConfig | None = None, *, slots: int = 4, blocks: int = 100) -> None:
        self.now_us = 100 * S
        self.admission = Admission(
            live or live_config(max_wait_us=S), stale_after_us=S, blind_after_us=600 * S, draw=lambda lo, _: lo
        )
        derived = DerivedLimits(
            feasible=True, chunk_ceiling_tokens=256, token_budget=512, max_sequences=slots,
            kv_capacity_tokens=16 * blocks,
        )  # fmt: skip
        self.state = ready_state(
            derived=derived, pool=PoolState(block_tokens=16, total_blocks=blocks, free_blocks=blocks)
        )
        self.observe()
        self.admission.set_unavailable(None, self.now_us)
        self.made = 0
        self.verdicts: dict[str, Permit | Refusal] = {}

    def observe(self) -> None:
        self.state = replace(self.state, seq=self.state.seq + 1)
        self.admission.observe(self.state, self.now_us, self.now_us)

    def ask(self, tenant: str = "", cost: Cost = COST, **terms: Any) -> Permit | Refusal | Ticket:
        self.made += 1
        name = f"{tenant}{self.made}"
        verdict = self.admission.enter(
            name,
            cost,
            self.now_us,
            lambda verdict: self.verdicts.__setitem__(name, verdict),
            terms=Terms(service_class="critical", tenant=tenant, **terms),
        )
        if isinstance(verdict, Ticket):
            return verdict
        self.verdicts[name] = verdict
        return verdict

    def admit(self, tenant: str = "", cost: Cost = COST) -> Permit:
        permit = self.ask(tenant, cost)
        assert isinstance(permit, Permit), permit
        return permit

    def complete(self, permit: Permit) -> None:
        permit.completed = True
        for choice in permit.entry.choices:
            choice.computed_tokens, choice.output_tokens = choice.prompt_tokens, choice.max_tokens
        permit.close(self.now_us)


def refusal(verdict: object) -> Refusal:
    assert isinstance(verdict, Refusal), verdict
    return verdict


def waits(verdict: object) -> Ticket:
    assert isinstance(verdict, Ticket), verdict
    return verdict


def with_tenants(*tenants: TenantConfig, max_wait_us: int = S) -> LiveConfig:
    live = live_config(max_wait_us=max_wait_us)
    return replace(live, admission=replace(live.admission, tenants=tenants))


def test_a_tenant_that_floods_is_passed_by_one_that_asks_now_and_then() -> None:
    pod = Pod()
    inside = [pod.admit("flood") for _ in range(4)]
    flood = [waits(pod.ask("flood")) for _ in range(3)]
    rare = waits(pod.ask("rare"))

    pod.complete(inside[0])

    assert isinstance(rare.verdict, Permit)
    assert [ticket.verdict for ticket in flood] == [None] * 3


def test_a_tenant_that_floods_cannot_fill_the_door_and_is_told_its_share() -> None:
    pod = Pod()
    inside = [pod.admit("flood") for _ in range(4)]
    flood = [waits(pod.ask("flood")) for _ in range(4)]

    rare = waits(pod.ask("rare"))

    assert rare.verdict is None
    found = refusal(flood[-1].verdict)
    assert (found.reason, found.status, found.should_retry) == (Reason.TENANT_SHARE, 429, True)
    assert "has 100 % of what runs, its share is 50 %" in found.message
    assert refusal(pod.ask("flood")).reason is Reason.TENANT_SHARE
    assert len(inside) == 4


def test_alone_a_tenant_may_use_it_all_and_is_refused_for_what_is_full() -> None:
    pod = Pod()
    for _ in range(4):
        pod.admit("only")
    for _ in range(4):
        waits(pod.ask("only"))

    assert refusal(pod.ask("only")).reason is Reason.SLOTS


def test_weights_decide_who_takes_what_falls_free() -> None:
    pod = Pod(with_tenants(TenantConfig(name="big", weight=3)))
    inside = deque(pod.admit(name) for name in ("big", "small", "big", "big"))
    served: Counter[str] = Counter()
    waiting = {name: deque(waits(pod.ask(name)) for _ in range(2)) for name in ("big", "small")}
    for _ in range(40):
        pod.now_us += S // 10
        pod.observe()
        pod.complete(inside.popleft())
        for name, line in waiting.items():
            if isinstance(line[0].verdict, Permit):
                inside.append(line[0].verdict)
                line.popleft()
                served[name] += 1
                line.append(waits(pod.ask(name)))

    assert 28 <= served["big"] <= 32


def test_what_a_tenant_leaves_unused_is_there_for_others_at_once() -> None:
    pod = Pod()
    first = [pod.admit("a"), pod.admit("a"), pod.admit("b"), pod.admit("b")]
    line = [waits(pod.ask("b")) for _ in range(2)]

    pod.complete(first[0])
    pod.complete(first[1])

    assert all(isinstance(ticket.verdict, Permit) for ticket in line), "a has gone, and b has the whole pod"


def test_a_quota_that_is_used_up_is_told_with_how_it_stands() -> None:
    pod = Pod(with_tenants(TenantConfig(name="a", tokens_per_second=20)))
    pod.admit("a")

    found = refusal(pod.ask("a"))

    assert (found.reason, found.status, found.should_retry) == (Reason.TENANT_QUOTA, 429, True)
    # 200 tokens at once, of which 150 are taken: 100 more come back in 5 s.
    assert found.headers()["RateLimit"] == '"tokens";r=50;t=5'
    assert found.retry_after_us == 5 * S
    assert "20 tokens per second" in found.message
    pod.admit("b")


def test_a_refusal_for_load_gives_the_quota_back_and_so_does_a_client_that_leaves() -> None:
    pod = Pod(with_tenants(TenantConfig(name="a", tokens_per_second=15), max_wait_us=S))
    for _ in range(4):
        pod.admit("b")

    left = waits(pod.ask("a"))
    assert refusal(pod.ask("a")).reason is Reason.TENANT_QUOTA, "it is reserved while it waits"
    pod.admission.leave(left, pod.now_us)
    late = waits(pod.ask("a"))
    pod.admission.expire(late, pod.now_us)
    assert refusal(late.verdict).reason is Reason.SLOTS

    waits(pod.ask("a"))


def test_what_was_not_used_of_a_quota_comes_back_with_the_end() -> None:
    pod = Pod(with_tenants(TenantConfig(name="a", tokens_per_second=15)))
    permit = pod.admit("a")
    choice = permit.entry.choices[0]
    choice.computed_tokens, choice.output_tokens = 100, 10

    permit.close(pod.now_us)

    found = refusal(pod.ask("a"))
    assert found.rate_limit is not None
    assert found.rate_limit.remaining_tokens == 150 - 110


def test_what_was_credited_and_never_computed_is_no_use_of_a_quota() -> None:
    pod = Pod(with_tenants(TenantConfig(name="a", tokens_per_second=15)))
    credited = Cost((ChoiceCost(100, 50, cached_tokens=64, prefix_key=b"k"),))

    pod.admit("a", credited).close(pod.now_us)

    pod.admit("a", credited)


def test_a_quota_does_not_count_while_no_capacity_exists_or_for_what_can_never_fit() -> None:
    pod = Pod(with_tenants(TenantConfig(name="a", tokens_per_second=15)))
    assert refusal(pod.ask("a", Cost((ChoiceCost(5_000, 1),)))).status == 400
    pod.admission.set_unavailable(Reason.DRAINING, pod.now_us)
    assert refusal(pod.ask("a")).status == 503
    pod.admission.set_unavailable(None, pod.now_us)

    pod.admit("a")


def test_a_callers_own_order_is_kept_inside_its_class() -> None:
    pod = Pod()
    inside = [pod.admit() for _ in range(4)]
    behind, usual = waits(pod.ask(behind=True)), waits(pod.ask())

    pod.complete(inside[0])

    assert (behind.verdict, isinstance(usual.verdict, Permit)) == (None, True)


class Storm:
    """Short requests at every tick before a pool of 33 blocks, and now and then one of 160 tokens that comes back."""

    def __init__(self) -> None:
        self.pod = Pod(live_config(max_wait_us=S), slots=32, blocks=33)
        self.inside: deque[tuple[int, Permit]] = deque()
        self.line: list[Ticket] = []
        self.short_in = 0

    def tick(self) -> None:
        """A tenth of a second: who has stayed for ten goes, one short request comes."""
        pod = self.pod
        pod.now_us += S // 10
        pod.observe()
        while self.inside and self.inside[0][0] <= pod.now_us:
            pod.complete(self.inside.popleft()[1])
        for ticket in list(pod.admission._queue):
            if ticket.deadline_us <= pod.now_us:
                pod.admission.expire(ticket, pod.now_us)
        before = len(self.inside)
        self.ask(Cost((ChoiceCost(16, 16),)))
        for ticket in [ticket for ticket in self.line if ticket.verdict is not None]:
            self.line.remove(ticket)
            if isinstance(ticket.verdict, Permit):
                self.inside.append((pod.now_us + 10 * S, ticket.verdict))
        self.short_in += len(self.inside) - before

    def ask(self, cost: Cost) -> Permit | Refusal | Ticket:
        verdict = self.pod.ask("", cost)
        if isinstance(verdict, Permit):
            self.inside.append((self.pod.now_us + 10 * S, verdict))
        elif isinstance(verdict, Ticket):
            self.line.append(verdict)
        return verdict

    def run_s(self, seconds: int) -> None:
        for _ in range(10 * seconds):
            self.tick()


LONG = Cost((ChoiceCost(130, 30),))


def seconds_until_a_long_one_is_in(storm: Storm, most: int = 120) -> int:
    """It asks every two seconds."""
    for second in range(0, most, 2):
        verdict = storm.ask(LONG)
        storm.run_s(2)
        if isinstance(verdict, Permit) or (isinstance(verdict, Ticket) and isinstance(verdict.verdict, Permit)):
            return second + 2
    return most


def test_a_storm_of_short_requests_does_not_keep_a_longer_one_out_for_minutes() -> None:
    storm = Storm()
    storm.run_s(30)
    short_in, began_us, waits_s = storm.short_in, storm.pod.now_us, []
    for _ in range(4):
        waits_s.append(seconds_until_a_long_one_is_in(storm))
        storm.run_s(20)

    # All that runs stays for ten seconds.
    assert max(waits_s) <= 20, waits_s
    took_s = (storm.pod.now_us - began_us) // S
    assert storm.short_in - short_in >= took_s // 2, "and the short ones go on, at a third of what they had alone"


def test_without_the_guard_the_same_storm_keeps_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SizeGuard, "kept_for", lambda *_: None)
    monkeypatch.setattr(SizeGuard, "is_ahead", lambda *_: False)
    storm = Storm()
    storm.run_s(30)

    assert seconds_until_a_long_one_is_in(storm) == 120


def test_short_requests_are_told_that_room_is_kept() -> None:
    storm = Storm()
    storm.run_s(20)
    for _ in range(3):
        storm.ask(LONG)
        storm.run_s(2)

    reasons = Counter(v.reason for v in storm.pod.verdicts.values() if isinstance(v, Refusal))

    assert reasons[Reason.SIZE_GUARD]
    assert "longer requests" in next(
        v.message for v in storm.pod.verdicts.values() if isinstance(v, Refusal) and v.reason is Reason.SIZE_GUARD
    )


def test_a_flood_that_must_leave_room_does_not_stand_in_the_way_of_those_it_is_left_for() -> None:
    pod = Pod(slots=10, blocks=200)
    for _ in range(6):
        pod.admit("flood")
    for name in ("a", "b"):
        pod.admit(name)
    pod.admission.tenants.was_short(pod.now_us, for_others=False)
    held = waits(pod.ask("flood"))
    assert held.held is not None
    assert held.held.reason is Reason.TENANT_SHARE
    assert "has 75 % of what runs, its share is 33 %" in held.held.problem

    pod.admit("a")

    assert held.verdict is None
    pod.now_us += S + 1
    pod.observe()
    assert isinstance(held.verdict, Permit), "the others ask no more: what they leave may be borrowed"


@pytest.mark.parametrize(
    ("ttft_ms", "prompt", "is_held"),
    [
        # A twentieth of the promise: 100 ms. What stands before takes 25 ms and its steps, a token 50 µs.
        pytest.param(2_000, 100, False, id="a-short-one-goes-in-behind-what-waits"),
        pytest.param(2_000, 1_800, True, id="what-it-brings-itself-counts"),
        pytest.param(400, 100, True, id="by-the-promise"),
    ],
)
def test_a_flood_brings_little_prefill_while_others_ask(ttft_ms: int, prompt: int, *, is_held: bool) -> None:
    pod = Pod(live_config(ttft_us=ttft_ms * 1000, max_wait_us=S), slots=100, blocks=2000)
    pod.state = replace(pod.state, max_length_tokens=4096)
    pod.observe()
    for name in ("flood",) * 12 + ("b",):
        pod.admit(name, Cost((ChoiceCost(1, 200),)))
    first = pod.admit("a", Cost((ChoiceCost(500, 50),)))
    pod.now_us += 1
    pod.admission.tenants.was_short(pod.now_us, for_others=False)

    asked = pod.ask("flood", Cost((ChoiceCost(prompt, 50),)))

    assert isinstance(asked, Ticket) == is_held
    if isinstance(asked, Ticket):
        pod.complete(first)
        assert isinstance(asked.verdict, Permit), "nothing waits before it: it may be as long as it is"


def test_one_that_asks_for_an_earlier_token_than_there_is_stands_in_nobodys_way() -> None:
    pod = Pod(slots=10, blocks=400)
    pod.admit()

    hasty = [refusal(pod.ask("hasty", Cost((ChoiceCost(300, 50),)), promise_us=1)) for _ in range(4)]

    assert {found.reason for found in hasty} == {Reason.TTFT_PROMISE}
    pod.admit("other")
    assert pod.admission.sizes.kept_for(Terms(service_class="critical"), COST, pod.now_us) is None
    assert not pod.admission.returning.budget.closed_to("critical", pod.now_us)


def test_one_whose_own_promise_is_lost_while_it_waits_goes_and_the_next_comes_in() -> None:
    pod = Pod(slots=2, blocks=400)
    inside = [pod.admit() for _ in range(2)]
    hasty = waits(pod.ask("hasty", promise_us=200_000))
    behind = waits(pod.ask("other"))
    pod.now_us += 190_000

    pod.complete(inside[0])

    assert refusal(hasty.verdict).reason is Reason.TTFT_PROMISE
    assert isinstance(behind.verdict, Permit)


def test_observe_tells_who_would_have_been_refused_for_the_share_of_others() -> None:
    live = live_config(max_wait_us=0)
    pod = Pod(replace(live, admission=replace(live.admission, mode="Observe")), slots=10, blocks=200)
    for name in ("flood",) * 6 + ("a", "b"):
        pod.admit(name)
    pod.admission.tenants.was_short(pod.now_us, for_others=False)

    pod.admit("flood")

    assert pod.admission.decisions.last(1)[0].shed_by == Reason.TENANT_SHARE
