from __future__ import annotations

import random

import pytest

from sluice_sidecar.waiting.lately import HALF_LIFE_US, Lately

WEIGHTS = {"heavy": 3}


def lately(*given: tuple[str, int, int]) -> Lately:
    found = Lately(lambda tenant: WEIGHTS.get(tenant, 1))
    for tenant, engine_us, at_us in given:
        found.add(tenant, engine_us, at_us)
    return found


def part(found: Lately, tenant: str) -> float:
    """Of what the one with most was given."""
    return max((step / 1000 for step in range(1001) if found.is_most(tenant, step / 1000)), default=0.0)


def test_where_nobody_was_given_anything_nobody_had_more_than_its_share() -> None:
    assert not lately().some_had(1, 1)


def test_what_was_given_a_half_life_ago_counts_half() -> None:
    found = lately(("old", 3_000, 0), ("new", 1_000, HALF_LIFE_US))

    assert found.is_most("old", 1.0)
    assert part(found, "new") == pytest.approx(2 / 3, abs=1e-3)


def test_a_correction_counts_for_the_moment_that_it_corrects() -> None:
    found = lately(("a", 5_000, 0), ("b", 1_000, 2 * HALF_LIFE_US), ("a", -1_000, 0))

    assert found.is_most("a", 1.0)
    assert found.is_most("b", 1.0)


def test_each_counts_for_its_weight() -> None:
    found = lately(("heavy", 3_000, 0), ("light", 500, 0))
    assert part(found, "light") == pytest.approx(0.5, abs=1e-3)

    WEIGHTS["light"] = 2
    try:
        found.rank()
        assert part(found, "light") == pytest.approx(0.25, abs=1e-3)
    finally:
        del WEIGHTS["light"]


def test_one_with_more_than_twice_its_share_is_known() -> None:
    found = lately(("a", 2_100, 0), ("b", 500, 0), ("c", 500, 0), ("d", 900, 0))

    assert found.some_had(2, 4)
    found.add("b", 400, 0)
    assert not found.some_had(2, 4)


def test_years_change_nothing_in_what_is_said() -> None:
    found = lately()
    for number in range(20_000):
        found.add("a", 4_000, 7 * number * HALF_LIFE_US)
        found.add("b", 1_000, 7 * number * HALF_LIFE_US)

    assert part(found, "b") == pytest.approx(0.25, abs=1e-3)
    found.forget("a")
    assert found.is_most("b", 1.0)


def test_after_a_long_rest_only_what_is_new_counts() -> None:
    found = lately(("a", 1_000_000, 0), ("b", 1, 3_000 * HALF_LIFE_US), ("a", -1_000_000, 0))

    assert part(found, "a") == 0.0
    assert found.is_most("b", 1.0)


def test_who_has_most_is_known_whoever_comes_and_goes() -> None:
    found, source = lately(), random.Random(2)
    had: dict[str, int] = {}
    for number in range(3_000):
        name = f"t{source.randrange(40)}"
        if name in had and source.random() < 0.1:
            del had[name]
            found.forget(name)
        else:
            had[name] = had.get(name, 0) + (engine_us := source.randint(-200, 5_000))
            found.add(name, engine_us, 0)
        most = max(had, key=lambda tenant: had[tenant], default=None)
        assert most is None or found.is_most(most, 1.0)
        if number % 100 == 0 and len(had) > 1:
            second = sorted(had.values())[-2]
            assert second == had[str(most)] or not found.is_most(min(had, key=lambda tenant: had[tenant]), 1.0)
    assert len(found._ranks) <= 2 * 40 + 65
