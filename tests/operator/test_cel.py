"""The part of CEL that rules use."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.resource.cel import CelError, compile_rule

SELF = {"a": 7, "text": "abc", "list": [1, 2], "nested": {"b": "x"}, "wait": "1500ms", "flag": True}


@pytest.mark.parametrize(
    ("source", "value"),
    [
        pytest.param("1 + 2 * 3", 7, id="products bind tighter than sums"),
        pytest.param("(1 + 2) * 3", 9, id="parentheses bind tightest"),
        pytest.param("7 / 2 - 10 / 3", 0, id="division truncates"),
        pytest.param("self.a >= 7 && self.a <= 7", True, id="comparisons within a conjunction"),
        pytest.param("false && false || true", True, id="conjunctions bind tighter than disjunctions"),
        pytest.param("has(self.nested.b) && !has(self.nested.c)", True, id="presence of the last field"),
        pytest.param("self.text.size() == 3 && size(self.list) == 2", True, id="sizes"),
        pytest.param("self.text.matches('^[a-c]+$')", True, id="a pattern"),
        pytest.param("self.nested.b == 'x' && self.nested != self.list", True, id="equality of any values"),
        pytest.param("duration(self.wait) > duration('1s')", True, id="durations compare"),
        pytest.param("duration(self.wait).getMilliseconds() * 1000", 1_500_000, id="durations as milliseconds"),
        pytest.param("self.list.all(x, x > 0)", True, id="all"),
        pytest.param("self.list.all(x, x > 1)", False, id="not all"),
        pytest.param("self.list.exists(x, x == 2) && !self.list.exists(x, x == 3)", True, id="exists"),
        pytest.param("self.missing == 1 || true", True, id="a decisive right side outweighs a failed left one"),
        pytest.param("self.missing == 1 && false", False, id="also for a conjunction"),
        pytest.param(r"'it\'s'", "it's", id="escaped quotes"),
        pytest.param("type(self.a) == int && type(self.text) == string", True, id="types"),
        pytest.param("type(self.a) == string || type(self.flag) == int", False, id="a boolean is no number"),
    ],
)
def test_it_evaluates(source: str, value: Any) -> None:
    assert compile_rule(source)({"self": SELF}) == value


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("self.missing == 1", id="an absent field"),
        pytest.param("self.missing == 1 || false", id="a failed side that decides"),
        pytest.param("self.text > 1", id="unequal types"),
        pytest.param("!self.a", id="no boolean"),
        pytest.param("duration('1 day') > duration('1s')", id="no duration"),
    ],
)
def test_it_fails_on_the_value(source: str) -> None:
    rule = compile_rule(source)

    with pytest.raises(CelError):
        rule({"self": SELF})


@pytest.mark.parametrize(
    "source",
    [
        "self.",
        "self.a ==",
        "(self.a",
        "self.a self.a",
        "self.a ? 1 : 2",
        "self.map(x, x)",
        "[1",
        "[1][",
        "now()",
        "'open",
    ],
)
def test_what_is_outside_the_supported_part_is_no_rule(source: str) -> None:
    with pytest.raises(CelError):
        compile_rule(source)
