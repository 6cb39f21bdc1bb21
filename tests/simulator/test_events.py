"""Virtual time."""

from __future__ import annotations

from sluice_simulator.events import Events


def test_what_falls_on_one_moment_happens_in_the_order_it_was_asked_for() -> None:
    events, seen = Events(), []
    for name in ("a", "b", "c"):
        events.at(5, lambda name=name: seen.append(name))  # type: ignore[misc]
    events.at(3, lambda: seen.append("first"))

    events.run(lambda: False)

    assert seen == ["first", "a", "b", "c"]
    assert events.now_us == 5


def test_what_was_cancelled_does_not_happen_and_moves_no_time() -> None:
    events, seen = Events(), []
    timer = events.at(9, lambda: seen.append("late"))
    events.at(4, timer.cancel)

    events.run(lambda: False)

    assert seen == []
    assert events.now_us == 4


def test_the_loop_ends_when_it_is_told_to() -> None:
    events = Events()

    def again() -> None:
        events.after(10, again)

    again()
    events.run(lambda: events.now_us >= 100)

    assert events.now_us == 100
