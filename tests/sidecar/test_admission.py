from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.state import DerivedLimits, EngineState, RequestState
from sluice_engine.core.terms import CLASSES, Terms
from sluice_engine.live_config import LiveConfig, TenantConfig
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import LEASE_US, Permit
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.peak import FuturePeak
from sluice_sidecar.errors import Reason, Refusal

S = 1_000_000
# The class that may fill all of the room.
CRITICAL = Terms(service_class="critical")


def cost(prompt: int = 100, output: int = 50, choices: int = 1) -> Cost:
    return Cost((ChoiceCost(prompt, output),) * choices)


class Door:
    """An admission with a hand-turned clock, before an engine that has just told its state."""

    def __init__(self, state: EngineState | None = None, live: LiveConfig | None = None) -> None:
        self.now_us = 100 * S
        self.state = state or ready_state()
        self.admission = Admission(
            live or live_config(), stale_after_us=500_000, blind_after_us=5 * S, draw=lambda lo, hi: (lo + hi) // 2
        )
        self.verdicts: dict[str, Permit | Refusal] = {}
        self.observe()
        self.admission.set_unavailable(None, self.now_us)

    def observe(self, **changes: Any) -> None:
        self.state = replace(self.state, seq=self.state.seq + 1, **changes)
        self.admission.observe(self.state, self.now_us, self.now_us)

    def enter(self, name: str, asked: Cost | None = None, terms: Terms = CRITICAL) -> Permit | Refusal | Ticket:
        return self.admission.enter(
            name, asked or cost(), self.now_us, lambda verdict: self.verdicts.__setitem__(name, verdict), terms=terms
        )

    def admit(self, name: str, asked: Cost | None = None) -> Permit:
        permit = self.enter(name, asked)
        assert isinstance(permit, Permit), permit
        return permit

    def complete(self, permit: Permit) -> None:
        permit.completed = True
        permit.close(self.now_us)

    def measure(self, residence_us: int) -> None:
        """Three requests come and go."""
        for name in ("m1", "m2", "m3"):
            permit = self.admit(name)
            self.now_us += residence_us
            self.observe()
            self.complete(permit)


@pytest.fixture
def door() -> Door:
    return Door()


def refusal(verdict: object) -> Refusal:
    assert isinstance(verdict, Refusal), verdict
    return verdict


@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.ENGINE_LOADING, Reason.ENGINE_DEAD])
def test_without_capacity_it_is_503_before_anything_else(door: Door, reason: Reason) -> None:
    door.admission.set_unavailable(reason, door.now_us)

    found = refusal(door.enter("a", cost(prompt=10**9)))

    assert (found.reason, found.status) == (reason, 503)


def test_what_can_never_fit_is_400_with_the_numbers(door: Door) -> None:
    found = refusal(door.enter("a", cost(prompt=1_000, output=100)))

    assert (found.status, found.reason) == (400, Reason.CONTEXT_LENGTH_EXCEEDED)
    assert "1000 tokens" in found.message
    assert "1024" in found.message


def test_the_fifth_of_four_slots_waits_and_takes_the_place_of_the_first_that_leaves(door: Door) -> None:
    permits = [door.admit(name) for name in "abcd"]

    ticket = door.enter("e")
    assert isinstance(ticket, Ticket)
    door.complete(permits[0])

    assert isinstance(door.verdicts["e"], Permit)
    assert ticket.verdict is door.verdicts["e"]


def test_those_at_the_door_are_let_in_in_order_and_nobody_overtakes(door: Door) -> None:
    permits = [door.admit(name) for name in "abcd"]
    assert isinstance(door.enter("large", cost(choices=2)), Ticket)
    assert isinstance(door.enter("small"), Ticket)

    door.complete(permits[0])
    assert door.verdicts == {}
    assert isinstance(door.enter("late"), Ticket), "one slot is free, and others wait for it"
    door.complete(permits[1])
    assert list(door.verdicts) == ["large"]
    door.complete(permits[2])
    assert list(door.verdicts) == ["large", "small"]
    door.complete(permits[3])
    assert list(door.verdicts) == ["large", "small", "late"]


def test_a_wait_that_is_over_ends_in_the_reason_that_held_it(door: Door) -> None:
    for name in "abcd":
        door.admit(name)
    ticket = door.enter("e")
    assert isinstance(ticket, Ticket)

    door.now_us = ticket.deadline_us
    door.admission.expire(ticket, door.now_us)

    found = refusal(door.verdicts["e"])
    assert (found.reason, found.status) == (Reason.SLOTS, 429)
    assert "4 of 4 slots" in found.message


def test_the_wait_is_at_most_what_is_configured_and_a_quarter_of_the_slack(door: Door) -> None:
    for name in "abcd":
        door.admit(name)
    patient = door.enter("e")
    assert isinstance(patient, Ticket)
    assert patient.deadline_us - door.now_us == 300_000

    hurried = Door(live=live_config(ttft_us=200_000))
    for name in "abcd":
        hurried.admit(name, cost(prompt=5))
    ticket = hurried.enter("e", cost(prompt=5))
    assert isinstance(ticket, Ticket)
    assert 0 < ticket.deadline_us - hurried.now_us < 50_000


def test_the_door_holds_no_more_than_could_run_at_once(door: Door) -> None:
    for name in "abcd":
        door.admit(name)

    verdicts = [door.enter(f"w{i}") for i in range(6)]

    assert [isinstance(verdict, Ticket) for verdict in verdicts] == [True] * 4 + [False] * 2


def test_a_wait_that_cannot_help_is_refused_at_once(door: Door) -> None:
    door.measure(60 * S)
    for name in "abcd":
        door.admit(name)

    assert refusal(door.enter("e")).reason is Reason.SLOTS


def test_a_future_peak_over_the_ceiling_is_refused_though_blocks_are_free_now() -> None:
    door = Door(live=live_config(max_wait_us=0))
    door.admit("a", cost(prompt=100, output=900))

    found = refusal(door.enter("b", cost(prompt=100, output=900)))

    assert found.reason is Reason.KV_PEAK
    assert "may be used" in found.message


def test_the_ceiling_comes_down_with_preemptions_and_shuts_the_door() -> None:
    door = Door(live=live_config(max_wait_us=0))
    door.admit("a", cost(prompt=100, output=600))
    asked = cost(prompt=100, output=600)
    door.complete(door.admit("b", asked))

    for second in range(1, 40):
        door.now_us += S
        door.observe(preemptions_total=second * 3)

    assert refusal(door.enter("b", asked)).reason is Reason.KV_PEAK


def test_a_first_token_that_would_come_too_late_is_refused_with_the_time_it_would_take() -> None:
    door = Door(live=live_config(ttft_us=50_000, max_wait_us=0))
    door.admit("a", cost(prompt=600, output=1))

    found = refusal(door.enter("b", cost(prompt=100)))

    assert found.reason is Reason.TTFT_PROMISE
    assert "0.1 s is promised" in found.message
    # This wait is known from the step table: no drain need be measured.
    assert found.retry_after_us is not None


def test_a_refusal_says_that_less_of_the_promise_is_given_away(door: Door) -> None:
    door.admit("a", cost(prompt=100, output=50))
    predicted_us = door.admission.room.predicted_ttft_us(limits_of(door), cost(prompt=100), door.now_us)
    door.admission.room.learned.punctuality.share = 0.8
    promise_us = door.admission.room.look(cost(prompt=100), door.now_us, 0).promised_ttft_us
    assert promise_us is not None

    held = door.admission.room.look(cost(prompt=100), door.now_us, promise_us - predicted_us).held

    assert held is not None
    assert "of which 80 % is given away while first tokens come late" in held.problem


def test_what_was_waited_before_the_door_is_gone_from_the_promise() -> None:
    door = Door(live=live_config(ttft_us=50_000, max_wait_us=0))
    door.admit("a", cost(prompt=100, output=50))
    predicted_us = door.admission.room.predicted_ttft_us(limits_of(door), cost(prompt=100), door.now_us)
    assert predicted_us <= 50_000

    for waited_us, reason in [(50_000 - predicted_us + 1, Reason.TTFT_PROMISE), (50_000 - predicted_us, None)]:
        held = door.admission.room.look(cost(prompt=100), door.now_us, waited_us).held
        assert (None if held is None else held.reason) == reason
    late = door.admission.enter("b", cost(prompt=100), door.now_us, lambda _: None, waited_us=49_999)
    assert refusal(late).reason is Reason.TTFT_PROMISE
    assert "0.1 s is promised" in refusal(late).message


def test_what_was_waited_at_the_door_is_gone_from_the_promise(door: Door) -> None:
    permits = [door.admit(name) for name in "abcd"]
    ticket = door.enter("e")
    assert isinstance(ticket, Ticket)
    assert ticket.arrived_us == door.now_us

    door.now_us += 3 * S  # its timer is late: the promise of 2 s is broken already
    door.observe()
    door.complete(permits[0])

    assert door.verdicts == {}
    assert ticket.held is not None
    assert ticket.held.reason is Reason.TTFT_PROMISE


def limits_of(door: Door) -> Limits:
    assert door.admission.room.limits is not None
    return door.admission.room.limits


def test_where_the_promise_is_only_observed_nobody_is_refused_for_it() -> None:
    door = Door(live=live_config(ttft_us=1, max_wait_us=0, enforcement="Observe"))
    door.admit("a")
    door.admit("b")


def test_an_idle_pod_admits_one_request_that_fits_whatever_is_predicted() -> None:
    door = Door(live=live_config(ttft_us=1, max_wait_us=0))
    door.admission.room.ceiling.share = 0.0

    door.admit("a", cost(prompt=500, output=500, choices=9))
    assert isinstance(door.enter("b"), Refusal)


def test_an_engine_that_cannot_keep_the_promise_still_serves_one_at_a_time() -> None:
    door = Door(ready_state(derived=DerivedLimits(feasible=False)), live_config(max_wait_us=0))

    permit = door.admit("a")
    assert refusal(door.enter("b")).reason is Reason.SLOTS
    door.complete(permit)
    door.admit("c")


def test_stale_state_costs_a_fifth_of_the_room(door: Door) -> None:
    door.now_us += 500_001

    assert door.admission.room.freshness(door.now_us) == "stale"
    assert door.admission.room.sequences(door.now_us) == 3
    assert door.admission.room.ceiling_blocks(door.now_us) == 76


def test_a_blind_gate_goes_on_by_its_ledger_with_half_the_last_good_concurrency(door: Door) -> None:
    for name in "abcd":
        door.complete(door.admit(name)) if name == "d" else door.admit(name)
    assert door.admission.room.sequences(door.now_us) == 4
    door.now_us += 5 * S + 1

    assert door.admission.room.freshness(door.now_us) == "blind"
    assert door.admission.room.sequences(door.now_us) == 2


def test_a_gate_that_never_saw_concurrency_lets_one_in_while_blind(door: Door) -> None:
    door.now_us += 60 * S
    door.admit("a")

    assert isinstance(door.enter("b"), Refusal | Ticket)


def test_a_blind_gate_ignores_what_an_old_state_listed(door: Door) -> None:
    stranger = RequestState(
        id="theirs", choice=0, status="running", prompt_tokens=9, computed_tokens=9, output_tokens=1, max_tokens=5,
        blocks=1, incarnation=0, preemptions=0,
    )  # fmt: skip
    door.observe(requests=(stranger,) * 1)
    door.now_us += 6 * S

    door.admit("a")


def test_come_back_is_left_out_while_the_drain_is_unmeasured() -> None:
    door = Door(live=live_config(max_wait_us=0))
    for name in "abcd":
        door.admit(name)

    found = refusal(door.enter("e"))

    assert found.retry_after_us is None
    assert "Retry-After" not in found.headers()
    assert found.headers()["x-should-retry"] == "true"


@pytest.mark.parametrize(
    ("residence_us", "lo_us", "hi_us"),
    [
        pytest.param(1 * S, 1 * S, 2 * S, id="a-quick-drain-is-at-least-a-second"),
        pytest.param(20 * S, 5 * S, 10 * S, id="the-measured-wait-and-the-crowd-of-one"),
        pytest.param(400 * S, 20 * S, 30 * S, id="never-beyond-what-clients-honour"),
    ],
)
def test_come_back_after_the_measured_wait(residence_us: int, lo_us: int, hi_us: int) -> None:
    door = Door(live=live_config(max_wait_us=0))
    bounds: list[tuple[int, int]] = []
    door.admission.returning.retry_after._draw = lambda lo, hi: bounds.append((lo, hi)) or lo  # type: ignore[func-returns-value]
    door.measure(residence_us)
    for name in "abcd":
        door.admit(name)

    found = refusal(door.enter("e"))

    assert set(bounds) == {(lo_us, hi_us)}
    assert found.retry_after_us == lo_us


def test_a_crowd_is_told_to_come_back_spread_over_the_time_it_takes_to_let_it_in() -> None:
    door = Door(live=live_config(max_wait_us=0))
    highest: list[int] = []
    door.admission.returning.retry_after._draw = lambda _, hi: highest.append(hi) or hi  # type: ignore[func-returns-value]
    door.measure(8 * S)
    for name in "abcd":
        door.admit(name)

    for index in range(6):
        door.enter(f"r{index}")

    # One place returns every 2 s: each of the crowd widens the window by as much.
    assert list(dict.fromkeys(highest)) == [(2 + 2 * n) * S for n in range(1, 7)]


def test_the_headers_of_a_busy_answer() -> None:
    headers = Refusal(Reason.SLOTS, "busy", retry_after_us=1_234_567).headers()

    assert headers["Retry-After"] == "2"
    assert headers["retry-after-ms"] == "1235"
    assert headers["x-sluice-reason"] == "slots"
    assert headers["Cache-Control"] == "no-store"


def test_a_client_that_left_with_a_permit_it_never_heard_of_gives_it_back(door: Door) -> None:
    permits = [door.admit(name) for name in "abcd"]
    ticket = door.enter("e")
    assert isinstance(ticket, Ticket)
    door.complete(permits[0])
    assert len(door.admission.room.ledger.entries) == 4

    door.admission.leave(ticket, door.now_us)

    assert len(door.admission.room.ledger.entries) == 3


def test_all_at_the_door_are_told_when_the_engine_dies(door: Door) -> None:
    for name in "abcd":
        door.admit(name)
    door.enter("e")
    door.enter("f")

    door.admission.set_unavailable(Reason.ENGINE_DEAD, door.now_us)

    assert [refusal(verdict).reason for verdict in door.verdicts.values()] == [Reason.ENGINE_DEAD] * 2


def test_the_learned_ratio_comes_from_what_the_engine_counted(door: Door) -> None:
    for index in range(8):
        name = f"r{index}"
        permit = door.admit(name, Cost((ChoiceCost(340, 5),), text_bytes=900, overhead_tokens=40))
        request = RequestState(
            id=name, choice=0, status="running", prompt_tokens=265, computed_tokens=0, output_tokens=0, max_tokens=5,
            blocks=0, incarnation=0, preemptions=0,
        )  # fmt: skip
        door.observe(requests=(request,))
        door.complete(permit)
        door.observe(requests=())

    assert door.admission.room.pricing.ratio.tokens_per_byte == pytest.approx(225 / 900)


def test_the_first_token_teaches_the_bias_once(door: Door) -> None:
    permit = door.admit("a")
    predicted_us = door.admission.room.learned._predicted_us["a"]
    door.admission.room.first_token(permit, door.now_us + 2 * predicted_us)
    door.admission.room.first_token(permit, door.now_us + 9 * predicted_us)

    # An eighth of the promise of 2 s stands for "as predicted", and a sample weighs as much as it is of the promise.
    weight, prior_us = 2 * predicted_us / (2 * S), 2 * S / 8
    expected = (prior_us + weight * 2 * predicted_us) / (prior_us + weight * predicted_us)
    assert door.admission.room.learned.bias.factor(door.now_us + 2 * predicted_us) == pytest.approx(expected)


def test_the_door_tells_why_one_more_small_request_would_be_refused(door: Door) -> None:
    assert door.admission.closed_by(door.now_us) is None
    for name in "abcd":
        door.admit(name)
    assert door.admission.closed_by(door.now_us) is Reason.SLOTS


@pytest.mark.parametrize(
    ("percent", "slots", "blocks"),
    [
        pytest.param(100, 4, 95, id="all-of-it"),
        pytest.param(75, 3, 71, id="three-quarters-of-both"),
        pytest.param(60, 3, 57, id="slots-are-rounded-up"),
        pytest.param(1, 1, 0, id="one-slot-at-least"),
    ],
)
def test_what_a_class_may_take(door: Door, percent: int, slots: int, blocks: int) -> None:
    room = door.admission.room

    assert (room.slots_for(percent, door.now_us), room.ceiling_blocks(door.now_us, percent)) == (slots, blocks)


def test_a_class_is_held_to_its_own_share_while_another_still_has_room(door: Door) -> None:
    for name in "abc":
        door.admit(name)

    look = door.admission.room.look
    assert look(cost(), door.now_us, 0).held is None
    held = look(cost(), door.now_us, 0, ceiling_percent=60).held
    assert held is not None
    assert (held.reason, held.problem) == (Reason.SLOTS, "3 of 3 slots are taken")


def test_the_end_of_an_answer_is_predicted_from_the_steps_of_those_beside_it(door: Door) -> None:
    look = door.admission.room.look(cost(prompt=100, output=50), door.now_us, 0)

    assert (look.predicted_ttft_us, look.predicted_finish_us) == (10_000, 10_000 + 49 * 8_000)


def test_steps_that_take_longer_than_the_table_says_are_learned_from_two_states(door: Door) -> None:
    def listed(output: int) -> RequestState:
        return RequestState(
            id="a", choice=0, status="running", prompt_tokens=100, computed_tokens=99 + output, output_tokens=output,
            max_tokens=400, blocks=7, incarnation=0, preemptions=0,
        )  # fmt: skip

    door.admit("a", cost(output=400))
    for poll in range(50):
        door.now_us += 200_000
        # Ten tokens in 200 ms where the table says 8 ms a step.
        door.observe(requests=(listed(1 + 10 * poll),))

    assert door.admission.room.learned.pace.factor(door.now_us) == pytest.approx(2.5, rel=0.05)


def test_a_first_token_that_is_overdue_teaches_before_it_comes(door: Door) -> None:
    door.admit("a")
    waiting = RequestState(
        id="a", choice=0, status="waiting", prompt_tokens=100, computed_tokens=0, output_tokens=0, max_tokens=50,
        blocks=0, incarnation=0, preemptions=0,
    )  # fmt: skip
    for _ in range(10):
        door.now_us += 200_000
        door.observe(requests=(waiting,))
    assert door.admission.room.learned.bias.factor(door.now_us) > 2

    door.observe(requests=(replace(waiting, status="running", computed_tokens=100, output_tokens=1),))
    assert door.admission.room.learned.bias.factor(door.now_us) == 1.0, (
        "a whole answer's first token is seen in the state"
    )


@pytest.mark.parametrize(("late", "share"), [(2, 1.0), (3, 0.8)])
def test_first_tokens_that_come_late_leave_less_of_the_promise_to_predictions(late: int, share: float) -> None:
    door = Door()
    for index in range(4):
        door.admit(f"r{index}")
    door.now_us += 2 * S + 1
    requests = tuple(
        RequestState(
            id=f"r{index}", choice=0, status="running", prompt_tokens=100, computed_tokens=100 * (index >= late),
            output_tokens=index >= late, max_tokens=50, blocks=0, incarnation=0, preemptions=0,
        )
        for index in range(4)
    )  # fmt: skip
    door.observe(requests=requests)

    assert door.admission.room.learned.punctuality.share == share


def test_where_nothing_shows_a_first_token_nobody_is_taken_to_be_late(door: Door) -> None:
    for index in range(4):
        door.admit(f"r{index}")
    door.now_us += 60 * S
    door.observe(requests=())

    assert door.admission.room.learned.punctuality.share == 1.0


def with_quota(live: LiveConfig) -> LiveConfig:
    """One tenant has a weight, one a quota."""
    tenants = (TenantConfig(name="a", weight=3), TenantConfig(name="quota", tokens_per_second=200))
    return replace(live, admission=replace(live.admission, tenants=tenants))


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of entering, waiting, leaving, moving, dying and forgetting ends with an empty ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.door = Door(live=with_quota(live_config(max_wait_us=300_000)))
        self.permits: dict[str, Permit] = {}
        self.tickets: dict[str, Ticket] = {}
        self.settled: dict[str, int] = {}
        self.engine: dict[str, RequestState] = {}
        self.made = 0
        self.closed = 0

    @property
    def admission(self) -> Admission:
        return self.door.admission

    @rule(
        prompt=st.integers(1, 900),
        output=st.integers(1, 900),
        choices=st.integers(1, 3),
        service_class=st.sampled_from(CLASSES),
        tenant=st.sampled_from(["", "a", "b", "quota"]),
    )
    def enter(self, prompt: int, output: int, choices: int, service_class: str, tenant: str) -> None:
        self.made += 1
        name = f"r{self.made}"
        idle = not list(self.admission.room.ledger.live()) and not self.admission.waiting

        def settle(verdict: Permit | Refusal) -> None:
            self.settled[name] = self.settled.get(name, 0) + 1
            del self.tickets[name]
            if isinstance(verdict, Permit):
                self.permits[name] = verdict
                self.check_room()

        asked = cost(prompt, output, choices)
        terms = Terms(service_class=service_class, tenant=tenant)
        verdict = self.admission.enter(name, asked, self.door.now_us, settle, terms=terms)
        if isinstance(verdict, Permit):
            self.permits[name] = verdict
            if not idle:
                self.check_room()
        elif isinstance(verdict, Ticket):
            self.tickets[name] = verdict
        if idle and self.admission.unavailable is None and prompt + output <= 1024 and tenant != "quota":
            assert isinstance(verdict, Permit), "an idle pod admits one that fits"

    def check_room(self) -> None:
        entries = self.admission.room.ledger.entries.values()
        # What the engine holds nothing for any more is only a stream: whoever enters beside it enters an idle pod.
        others = sum(any(not choice.gone for choice in entry.choices) for entry in entries) > 1
        if others and self.admission.room.freshness(self.door.now_us) == "fresh":
            assert self.admission.room.peak_blocks(self.door.now_us) <= max(
                self.admission.room.ceiling_blocks(self.door.now_us), 0
            )
            assert sum(1 for _ in self.admission.room.ledger.live()) <= self.admission.room.sequences(self.door.now_us)

    @precondition(lambda self: self.permits)
    @rule(data=st.data(), completed=st.booleans())
    def close(self, data: st.DataObject, *, completed: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.permits)))
        permit = self.permits.pop(name)
        permit.completed = completed
        self.engine.pop(name, None)
        was_open = permit.open
        assert permit.close(self.door.now_us) is was_open
        assert not permit.close(self.door.now_us), "a second close changes nothing"

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tickets)))
        ticket = self.tickets.pop(name)
        self.admission.leave(ticket, self.door.now_us)
        assert ticket.verdict is None

    @rule(elapsed_us=st.sampled_from([1_000, 100_000, 400_000, 6 * S]))
    def wait(self, elapsed_us: int) -> None:
        self.door.now_us += elapsed_us
        for ticket in list(self.tickets.values()):
            if ticket.verdict is None and ticket.deadline_us <= self.door.now_us:
                self.admission.expire(ticket, self.door.now_us)

    @rule(data=st.data(), preempted=st.integers(0, 3))
    def tell(self, data: st.DataObject, preempted: int) -> None:
        for name, permit in self.permits.items():
            permit.forwarded(self.door.now_us)
            if data.draw(st.booleans()):
                prompt = data.draw(st.integers(1, 100))
                self.engine[name] = RequestState(
                    id=name, choice=0, status="running", prompt_tokens=prompt, computed_tokens=prompt, output_tokens=1,
                    max_tokens=50, blocks=1, incarnation=0, preemptions=0,
                )  # fmt: skip
        total = self.door.state.preemptions_total + preempted
        self.door.observe(requests=tuple(self.engine.values()), preemptions_total=total)

    @rule()
    def restart(self) -> None:
        self.engine.clear()
        self.admission.set_unavailable(Reason.ENGINE_DEAD, self.door.now_us)
        assert self.admission.waiting == 0
        self.door.observe(boot_id=f"boot-{self.door.state.seq}", requests=(), preemptions_total=0)
        self.admission.set_unavailable(None, self.door.now_us)

    @rule()
    def lose_owners(self) -> None:
        self.door.now_us += LEASE_US + 1
        self.wait(0)
        self.door.observe(requests=())
        self.engine.clear()
        assert not any(permit.open for permit in self.permits.values() if permit.entry.touched_us < self.door.now_us)

    @invariant()
    def each_ticket_is_settled_at_most_once(self) -> None:
        assert all(count == 1 for count in self.settled.values())

    @invariant()
    def the_sums_are_those_of_what_is_live(self) -> None:
        inside, live = self.admission.room.ledger.inside, list(self.admission.room.ledger.live())
        parts = [choice.part for choice in live if choice.part is not None]
        counted = FuturePeak(16)
        counted.refill([part.growth for part in parts])
        assert len(parts) == len(live) == inside.choices
        assert inside.prefilling == sum(part.queue_tokens > 0 for part in parts)
        assert inside.queue_tokens == sum(part.queue_tokens for part in parts)
        assert inside.blocks == sum(blocks_for(choice.known_tokens, 16) for choice in live)
        assert inside.peak_blocks() == counted.peak()

    @invariant()
    def the_ledger_holds_what_is_open_and_nothing_else(self) -> None:
        ledger = self.admission.room.ledger
        assert set(ledger.entries) == {name for name, permit in self.permits.items() if permit.open}
        assert self.admission.waiting == len(self.tickets)
        assert self.admission.admitted_total == ledger.releases_total + len(ledger.entries)
        assert self.admission.room.ledger_blocks() >= 0

    def teardown(self) -> None:
        while self.tickets or self.permits:
            if self.tickets:
                _, ticket = self.tickets.popitem()
                self.admission.leave(ticket, self.door.now_us)
            else:
                _, permit = self.permits.popitem()
                permit.close(self.door.now_us)
        self.door.observe(requests=())
        assert (self.admission.room.ledger.entries, self.admission.waiting, self.admission.room.ledger_blocks()) == (
            {},
            0,
            0,
        )
        assert self.admission.room.learned.waiting == 0
        assert len(self.admission.tenants) <= 4
        assert self.admission.tenants.shares_percent("new") == (0, 100), "nobody is here"
        assert self.admission.quotas._reserved == {}


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAdmissionMachine = AdmissionMachine.TestCase
