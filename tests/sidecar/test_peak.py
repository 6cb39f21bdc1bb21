from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice_engine.core.fit import blocks_for
from sluice_sidecar.capacity.peak import FuturePeak, Growth, growth


def held_at(step: int, growths: list[Growth], block_tokens: int) -> int:
    """Blocks held at a step by those that still run: their input, one token for each step since, shared ones once."""
    running = [g for g in growths if step <= g.end]
    held = sum(blocks_for(g.held + min(g.grows, max(0, step - g.prefill_steps)), block_tokens) for g in running)
    groups: dict[bytes, list[int]] = defaultdict(list)
    for g in running:
        if g.shared_blocks:
            groups[g.key].append(g.shared_blocks)
    return held - sum(sum(shared) - max(shared) for shared in groups.values())


def peak_by_simulation(growths: list[Growth], block_tokens: int) -> int:
    """Step by step, whoever ends where."""
    return max(
        (held_at(step, growths, block_tokens) for step in range(max((g.end for g in growths), default=0) + 1)),
        default=0,
    )


def filled(growths: list[Growth], block_tokens: int) -> FuturePeak:
    peak = FuturePeak(block_tokens)
    peak.refill(growths)
    return peak


def sharing(growth: Growth, block_tokens: int, key: bytes, share: int) -> Growth:
    """Nobody shares more blocks than the whole ones of its input."""
    shared = min(share, growth.held // block_tokens)
    return growth._replace(shared_blocks=shared, key=key if shared else b"")


plain = st.builds(Growth, st.integers(1, 90), st.integers(1, 60), st.integers(0, 12))
block_sizes = st.sampled_from([1, 2, 3, 8, 16])


@st.composite
def scenes(draw: st.DrawFn) -> tuple[int, list[Growth]]:
    """A block size, and up to twelve requests of which some share."""
    block_tokens = draw(block_sizes)
    keyed = st.builds(sharing, plain, st.just(block_tokens), st.sampled_from([b"a", b"b"]), st.integers(0, 6))
    return block_tokens, draw(st.lists(keyed, max_size=12))


@given(scenes())
def test_the_peak_is_that_of_a_step_by_step_simulation(scene: tuple[int, list[Growth]]) -> None:
    block_tokens, growths = scene

    assert filled(growths, block_tokens).peak() == peak_by_simulation(growths, block_tokens)


@given(scenes(), st.integers(0, 12))
def test_the_peak_with_others_is_that_of_all_together(scene: tuple[int, list[Growth]], cut: int) -> None:
    block_tokens, growths = scene
    inside, asking = growths[:cut], growths[cut:]
    peak = filled(inside, block_tokens)

    assert peak.peak_with(asking) == peak_by_simulation(growths, block_tokens)
    assert peak.peak() == peak_by_simulation(inside, block_tokens), "asking changes nothing"


@given(scenes(), st.integers(1, 6))
def test_the_peak_with_choices_that_are_alike_is_that_of_all_together(
    scene: tuple[int, list[Growth]], choices: int
) -> None:
    block_tokens, growths = scene
    one = growths[0] if growths else Growth(20, 5, 0)
    asking = [one] * choices

    assert filled(growths, block_tokens).peak_with(asking) == peak_by_simulation(growths + asking, block_tokens)


@pytest.mark.parametrize(
    ("items", "peak"),
    [
        pytest.param([], 0, id="nobody-needs-nothing"),
        pytest.param([Growth(24, 3, 0)], 27, id="the-practice's-A-alone-needs-27"),
        pytest.param([Growth(24, 3, 0), Growth(4, 7, 0)], 34, id="one-leaves-before-the-other-peaks"),
        pytest.param([Growth(10, 1, 0), Growth(10, 1, 100)], 21, id="the-other-has-not-begun-to-grow"),
        pytest.param([Growth(10, 5, 0), Growth(10, 5, 5)], 25, id="one-peaks-as-the-other-starts"),
        pytest.param([Growth(20, 5, 0, 10, b"a")] * 3, 25 + 15 + 15, id="what-three-share-counts-once"),
        pytest.param([Growth(20, 5, 0, 10, b"a"), Growth(20, 5, 0, 10, b"b")], 50, id="two-of-different-beginnings"),
        pytest.param([Growth(20, 5, 0, 10, b"a"), Growth(20, 30, 0, 10, b"a")], 50, id="the-last-one-keeps-it"),
        pytest.param([Growth(20, 5, 0, 4, b"a"), Growth(20, 5, 0, 10, b"a")], 46, id="they-share-what-both-have"),
    ],
)
def test_peaks_that_can_be_worked_out_by_hand(items: list[Growth], peak: int) -> None:
    assert filled(items, block_tokens=1).peak() == peak


@pytest.mark.parametrize(
    ("known", "remaining", "total", "share", "expected"),
    [
        pytest.param(24, 24, 28, 8, Growth(24, 3, 3), id="a-fresh-prompt-in-three-chunks"),
        pytest.param(24, 24, 28, 100, Growth(24, 3, 1), id="a-fresh-prompt-in-one-step"),
        pytest.param(26, 1, 28, 8, Growth(26, 1, 1), id="a-decode-with-one-more-to-hold"),
        pytest.param(27, 1, 28, 8, Growth(27, 1, 1), id="the-last-token-holds-no-state-but-counts-as-one"),
        pytest.param(40, 1, 28, 8, Growth(40, 1, 1), id="who-outgrew-its-prediction-has-one-more"),
        pytest.param(24, 24, 28, 0, Growth(24, 3, 24), id="no-share-is-a-token-a-step"),
    ],
)
def test_growth(known: int, remaining: int, total: int, share: int, expected: Growth) -> None:
    assert growth(known, remaining, total, share) == expected


def test_who_never_entered_cannot_leave() -> None:
    with pytest.raises(AssertionError, match="who leaves has entered"):
        filled([Growth(10, 5, 0)], 16).remove(Growth(11, 5, 0))


class PeakMachine(RuleBasedStateMachine):
    """In any order of coming, going and starting anew, the peak is that of the step-by-step simulation."""

    @initialize(block_tokens=block_sizes)
    def begin(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.peak = FuturePeak(block_tokens)
        self.inside: list[Growth] = []

    @rule(one=plain, key=st.sampled_from([b"a", b"b"]), share=st.integers(0, 6))
    def enter(self, one: Growth, key: bytes, share: int) -> None:
        one = sharing(one, self.block_tokens, key, share)
        asked = self.peak.peak_with([one])
        self.peak.add(one)
        self.inside.append(one)
        assert self.peak.peak() == asked

    @rule(one=plain, choices=st.integers(2, 4), key=st.sampled_from([b"a", b"b"]), share=st.integers(0, 6))
    def enter_with_several_choices(self, one: Growth, choices: int, key: bytes, share: int) -> None:
        several = [sharing(one, self.block_tokens, key, share)] * choices
        asked = self.peak.peak_with(several)
        for each in several:
            self.peak.add(each)
        self.inside += several
        assert self.peak.peak() == asked

    @rule(times=st.integers(1, 80))
    def many_enter(self, times: int) -> None:
        for number in range(times):
            one = Growth(1 + number % 40, 1 + number * 7 % 50, number % 3)
            self.peak.add(one)
            self.inside.append(one)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        self.peak.remove(one)

    @rule(fresh=st.booleans())
    def begin_anew(self, *, fresh: bool) -> None:
        if fresh:
            self.peak = FuturePeak(self.block_tokens)
        self.peak.refill(self.inside)

    @invariant()
    def the_peak_is_exact(self) -> None:
        assert len(self.peak) == len(self.inside)
        assert self.peak.peak() == peak_by_simulation(self.inside, self.block_tokens)


PeakMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPeakMachine = PeakMachine.TestCase
