"""The page of worked examples is what the engine's own classes give, and has the numbers that everybody quotes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/worked-example.md"


def tool(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_the_page_is_what_the_generator_writes_bit_for_bit() -> None:
    text: str = tool("worked_example").worked_example()

    assert PAGE.read_text("utf-8") == text, "run `make golden`, and read the difference: somebody changed a schedule"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("| largest chunk within 150 ms | 3,428 tokens |", id="the ceiling of 150 ms"),
        pytest.param("| largest chunk within 100 ms | 2,000 tokens |", id="the ceiling of 100 ms"),
        pytest.param("| a step with 8,192 tokens beside a decode | 316.72 ms |", id="a chunk of 8,192"),
        pytest.param("12,000 tokens costs 440 ms in one step", id="a long prompt in one step"),
        pytest.param("500 ms in all, or 540 ms with the decode share", id="and in four"),
        pytest.param("of which 50.5 % produce a token", id="half of a static batch is padding"),
        pytest.param("| 60 s | 3 | background, fresh 3, fresh 4, fresh 5 |", id="aging"),
        pytest.param("| 52.4 GB/s | 100 % free | 0 s | 240 ms | 50 ms | swap |", id="both prices of a preemption"),
        pytest.param("| at once, for ever | 120 | 140 | 160 |", id="a retry storm"),
        pytest.param("retries at most 10 % of capacity | 120 | 130 | 130 |", id="a retry budget"),
        pytest.param("| A | 0 | 24 | 4 | 27 |", id="A needs 27 units"),
        pytest.param("| B | 0 | 4 | 8 | 11 |", id="B needs 11"),
        pytest.param("| C | 1 | 8 | 4 | 11 |", id="C needs 11"),
        pytest.param("| D | 2 | 20 | 2 | 21 |", id="D needs 21"),
    ],
)
def test_the_page_has_the_text_s_numbers(words: str) -> None:
    assert words in " ".join(PAGE.read_text("utf-8").split())


@pytest.mark.parametrize("variant", [0, 1, 2], ids=["never split", "chunks of eight", "priority"])
def test_the_practice_keeps_its_bounds(variant: int) -> None:
    practice, rules = tool("practice"), tool("practice_page").VARIANTS[variant]
    schedule = practice.play(rules)

    computed = dict.fromkeys("ABCD", 0)
    for line in schedule.lines:
        assert line.held_units <= 40
        opened = rules.chunk is None and any(tokens > 16 for _, tokens in (*line.prefills, ("", line.tokens)))
        assert line.tokens <= 16 or opened
        for one in line.preempted:
            computed[one.request_id] = 0
        for name, tokens in line.prefills:
            assert rules.chunk is None or tokens <= rules.chunk
            computed[name] += tokens
        for name in line.decodes:
            computed[name] += 1
    assert computed == {one.name: one.need for one in practice.FOUR}, "each computes all but its last token"
    assert schedule.finished.keys() == set("ABCD")
