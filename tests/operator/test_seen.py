"""What the watches brought is what the API server has, in whatever order lists, events and answers come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice_operator.cluster.seen import Seen, place_of
from sluice_operator.plan import Observed, key

Json = dict[str, Any]
KINDS = ("ConfigMap", "Pod")


def item(kind: str = "ConfigMap", name: str = "a", *, number: int = 1, service: str = "chat") -> Json:
    metadata = {"name": name, "namespace": "llm", "resourceVersion": str(number)}
    labels = {"sluice.dev/inferenceservice": service} if service else {}
    return {"kind": kind, "metadata": {**metadata, "labels": labels}}


def versions(seen: Seen, service: str = "chat") -> dict[tuple[str, str], str]:
    found: Observed = asyncio.run(seen.observe("llm", service, KINDS))
    return {key(one): one["metadata"]["resourceVersion"] for one in (*found.owned.values(), *found.pods)}


def replace(seen: Seen, kind: str, items: list[Json], version: str) -> None:
    """A list, as `Kube` takes it in."""
    for one in items:
        seen.put(one)
    seen.replace(kind, "", [(place, key(one)) for one in items if (place := place_of(one))], version)


@pytest.fixture
def seen() -> Seen:
    made = Seen()
    for kind in KINDS:
        replace(made, kind, [], "0")
    return made


def test_an_older_version_never_replaces_a_newer_one(seen: Seen) -> None:
    seen.put(item(number=5))
    seen.put(item(number=4))
    seen.remove(item(number=3))

    assert versions(seen) == {("ConfigMap", "a"): "5"}


def test_an_answer_that_comes_late_does_not_bring_back_what_is_gone(seen: Seen) -> None:
    seen.put(item(name="b", number=2))
    seen.put(item(number=5))
    seen.remove(item(number=7))
    seen.put(item(number=6))

    assert versions(seen) == {("ConfigMap", "b"): "2"}


def test_a_list_forgets_what_it_does_not_hold_but_not_what_was_written_since(seen: Seen) -> None:
    for one in (item(name="gone", number=3), item(name="kept", number=4), item(name="new", number=9)):
        seen.put(one)
    seen.put(item("Pod", "p", number=2))

    replace(seen, "ConfigMap", [item(name="kept", number=4)], "8")

    assert set(versions(seen)) == {("ConfigMap", "kept"), ("ConfigMap", "new"), ("Pod", "p")}


def test_an_object_that_is_given_to_another_service_is_gone_from_the_first(seen: Seen) -> None:
    seen.put(item(number=3))
    seen.put(item(number=4, service="other"))

    assert versions(seen) == {}
    assert versions(seen, "other") == {("ConfigMap", "a"): "4"}


@pytest.mark.parametrize(
    ("service", "told"),
    [
        pytest.param("other", [("llm", "chat"), ("llm", "other")], id="to another service"),
        pytest.param("", [("llm", "chat")], id="to nobody"),
    ],
)
def test_whoever_gives_an_object_away_is_told_of_it_at_once(
    seen: Seen, service: str, told: list[tuple[str, str]]
) -> None:
    seen.put(item(number=3))

    assert seen.put(item(number=4, service=service)) == told
    assert versions(seen) == {}


def test_who_gave_it_away_is_not_confused_by_what_comes_late(seen: Seen) -> None:
    seen.put(item(number=3))
    seen.put(item(number=5, service="other"))

    assert seen.put(item(number=4)) == []
    assert versions(seen, "other") == {("ConfigMap", "a"): "5"}


def test_what_came_of_our_own_write_is_no_news(seen: Seen) -> None:
    assert seen.put(item(number=3)) == [("llm", "chat")], "the answer to our write, which nobody waits for"
    assert seen.put(item(number=3)) == [], "the same by the watch"
    assert seen.put(item(number=4)) == [("llm", "chat")], "somebody changed it"
    assert seen.remove(item(number=5)) == [("llm", "chat")]


def test_of_what_is_only_compared_its_metadata_is_kept(seen: Seen) -> None:
    written = {"managedFields": [{"manager": "x"}]}
    for kind in ("Service", "Deployment"):
        one = item(kind)
        seen.put({**one, "metadata": {**one["metadata"], **written}, "spec": {"replicas": 2}})
    for kind in ("Service", "Deployment"):
        replace(seen, kind, [item(kind)], "0")

    found = asyncio.run(seen.observe("llm", "chat", ("Service", "Deployment"))).owned

    assert found["Service", "a"] == item("Service")
    assert found["Deployment", "a"] == {**item("Deployment"), "spec": {"replicas": 2}}


def test_nothing_is_kept_of_a_service_that_is_gone(seen: Seen) -> None:
    for name in "abc":
        seen.put(item(name=name, number=3))
    for name in "abc":
        seen.remove(item(name=name, number=4))

    assert (seen._services, seen._places) == ({}, {})


def test_pods_that_come_and_go_leave_nothing(seen: Seen) -> None:
    seen.put(item(number=1))
    for number in range(2, 200, 2):
        seen.put(item("Pod", f"p{number}", number=number))
        seen.remove(item("Pod", f"p{number}", number=number + 1))

    assert len(seen._services["llm", "chat"]) == len(seen._places) == 1


class Follows(RuleBasedStateMachine):
    """One object changes, goes and comes back; its events come in order, our answers and lists whenever they like."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()
        for kind in KINDS:
            replace(self.seen, kind, [], "0")
        self.seen.put(item(name="another"))
        self.number = 1
        self.now: int | None = None
        self.events: list[tuple[str, Json]] = []
        self.answers: list[Json] = []

    @rule()
    def write(self) -> None:
        self.number += 1
        self.now = self.number
        self.events.append(("MODIFIED", item(number=self.number)))
        self.answers.append(item(number=self.number))

    @precondition(lambda self: self.now is not None)
    @rule()
    def delete(self) -> None:
        self.number += 1
        self.now = None
        self.events.append(("DELETED", item(number=self.number)))

    @precondition(lambda self: self.events)
    @rule()
    def event(self) -> None:
        kind, one = self.events.pop(0)
        (self.seen.remove if kind == "DELETED" else self.seen.put)(one)

    @precondition(lambda self: self.answers)
    @rule(index=st.integers(0, 5))
    def answer(self, index: int) -> None:
        self.seen.put(self.answers.pop(index % len(self.answers)))

    @rule()
    def listing(self) -> None:
        self.events.clear()  # the watch goes on from the list
        self.answers.clear()
        held = [item(name="another")] + ([item(number=self.now)] if self.now else [])
        replace(self.seen, "ConfigMap", held, str(self.number))

    @invariant()
    def nothing_is_newer_than_the_truth(self) -> None:
        known = versions(self.seen).get(("ConfigMap", "a"))
        if not self.events and not self.answers:
            assert known == (None if self.now is None else str(self.now))


test_follows = Follows.TestCase
