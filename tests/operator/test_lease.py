"""One process acts at a time, whatever happens to the others, to the API server and to the time between."""

from __future__ import annotations

import asyncio
import copy
import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice_operator.cluster.lease import Election, Timing
from sluice_operator.errors import ApiRefused, LeaseLost

Json = dict[str, Any]
PLACE = ("system", "sluice-operator")
TIMING = Timing()


class Api:
    """One Lease, with the API server's check of versions; `down` refuses all, `loses_answers` writes without a word."""

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.down = self.loses_answers = False
        self.writes = 0
        self._versions = itertools.count(1)

    async def read_lease(self, namespace: str, name: str) -> Json | None:
        assert (namespace, name) == PLACE
        self._answer()
        return copy.deepcopy(self.lease)

    async def write_lease(self, lease: Json) -> Json:
        self._answer()
        known = lease["metadata"].get("resourceVersion")
        if known != (self.lease or {"metadata": {}})["metadata"].get("resourceVersion"):
            raise ApiRefused(409, "Conflict", "the object has been modified")
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(next(self._versions))
        self.writes += 1
        if self.loses_answers:
            raise TimeoutError
        return copy.deepcopy(self.lease)

    def _answer(self) -> None:
        if self.down:
            raise ConnectionError("refused")

    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""


class Scene:
    """Candidates of one Lease under one clock, which passes when they sleep."""

    def __init__(self) -> None:
        self.api, self.time_s = Api(), 0.0

    def candidate(self, name: str) -> Election:
        return Election(
            self.api, PLACE, name, clock=lambda: self.time_s, now=lambda: f"at {self.time_s}", sleep=self.sleep
        )

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s
        if self.time_s > 3600:
            raise AssertionError("it would wait for ever")


@pytest.fixture
def world() -> Scene:
    return Scene()


async def test_the_first_takes_it_and_the_second_stands_by(world: Scene) -> None:
    first, second = world.candidate("a"), world.candidate("b")

    assert await first.turn()
    assert not await second.turn()

    assert (first.is_held(), second.is_held()) == (True, False)
    assert world.api.lease is not None
    assert world.api.lease["spec"] == {
        "holderIdentity": "a", "leaseDurationSeconds": 12, "acquireTime": "at 0.0", "renewTime": "at 0.0",
        "leaseTransitions": 1,
    }  # fmt: skip


async def test_one_that_dies_without_a_word_is_followed_within_sixteen_seconds(world: Scene) -> None:
    await world.candidate("a").acquire()
    died_at = world.time_s
    second = world.candidate("b")

    await second.acquire()

    assert TIMING.duration_s <= world.time_s - died_at <= 16
    assert world.api.lease is not None
    assert world.api.lease["spec"]["leaseTransitions"] == 2


async def test_one_that_ends_well_is_followed_at_once(world: Scene) -> None:
    first = world.candidate("a")
    await first.acquire()

    await first.release()

    assert not first.is_held()
    assert await world.candidate("b").turn()


async def test_a_container_that_comes_back_in_its_pod_goes_on_at_once(world: Scene) -> None:
    await world.candidate("a").acquire()
    again = world.candidate("a")

    assert await again.turn()
    assert world.api.lease is not None
    assert world.api.lease["spec"]["leaseTransitions"] == 1


async def test_one_that_cannot_renew_gives_up_before_another_may_follow(world: Scene) -> None:
    first = world.candidate("a")
    await first.acquire()
    world.api.down = True
    since = world.time_s

    with pytest.raises(LeaseLost, match="system/sluice-operator could not be renewed in time"):
        await first.keep()

    assert world.time_s - since <= TIMING.deadline_s + TIMING.retry_s < TIMING.duration_s
    assert not first.is_held()


async def test_one_whose_renewal_hangs_acts_no_more_after_its_deadline(world: Scene) -> None:
    first = world.candidate("a")
    await first.acquire()

    world.time_s += TIMING.deadline_s - 0.1
    assert first.is_held()
    world.time_s += 0.1
    assert not first.is_held()


async def test_an_outage_that_is_short_is_sat_out(world: Scene) -> None:
    first = world.candidate("a")
    await first.acquire()
    down = [True, True, False]

    async def sleep(duration_s: float) -> None:
        world.time_s += duration_s
        if not down:
            raise asyncio.CancelledError
        world.api.down = down.pop(0)

    first._sleep = sleep
    with pytest.raises(asyncio.CancelledError):
        await first.keep()

    assert first.is_held()


async def test_one_whose_lease_another_took_ends(world: Scene) -> None:
    first = world.candidate("a")
    await first.acquire()
    world.time_s += 60  # the process was stopped, and goes on
    await world.candidate("b").acquire()
    assert not first.is_held()

    world.time_s += 60
    await world.candidate("c").acquire()
    with pytest.raises(LeaseLost, match="is held by c now"):
        await first.keep()
    assert world.api.holder() == "c"


async def test_whoever_waits_sits_out_an_outage(world: Scene) -> None:
    world.api.down = True
    heard: list[float] = []
    second = world.candidate("b")
    second.beat = lambda: heard.append(world.time_s)

    async def sleep(duration_s: float) -> None:
        await world.sleep(duration_s)
        world.api.down = world.time_s < 600

    second._sleep = sleep
    await second.acquire()

    assert second.is_held()
    assert heard == [600]


async def test_nobody_releases_what_is_anothers(world: Scene) -> None:
    first, second = world.candidate("a"), world.candidate("b")
    await first.acquire()
    await second.turn()

    await second.release()

    assert world.api.holder() == "a"


class OneActs(RuleBasedStateMachine):
    """Any order of turns, deaths, outages, lost answers and pauses: never do two hold the Lease."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.candidates = [self.scene.candidate(name) for name in "abc"]
        self.born = 3

    @rule(index=st.integers(0, 2))
    def turn(self, index: int) -> None:
        asyncio.run(self.candidates[index]._try())

    @rule(index=st.integers(0, 2))
    def die_and_come_back_elsewhere(self, index: int) -> None:
        self.candidates[index] = self.scene.candidate(f"pod-{self.born}")
        self.born += 1

    @rule(index=st.integers(0, 2))
    def release(self, index: int) -> None:
        asyncio.run(self.candidates[index].release())

    @rule(duration_s=st.sampled_from([0.5, 2.0, 7.0, 11.9, 12.0, 40.0]))
    def wait(self, duration_s: float) -> None:
        self.scene.time_s += duration_s

    @rule(down=st.booleans(), loses=st.booleans())
    def network(self, *, down: bool, loses: bool) -> None:
        self.scene.api.down, self.scene.api.loses_answers = down, loses

    @invariant()
    def at_most_one_acts(self) -> None:
        assert sum(one.is_held() for one in self.candidates) <= 1

    @precondition(lambda self: not self.scene.api.down)
    @rule()
    def in_the_end_somebody_does(self) -> None:
        self.scene.api.loses_answers = False
        for _ in range(20):
            self.scene.time_s += TIMING.retry_s
            for one in self.candidates:
                asyncio.run(one._try())
        assert sum(one.is_held() for one in self.candidates) == 1


test_one_acts = OneActs.TestCase
