"""What one choice is reckoned with where answers turn out longer than was predicted."""

from __future__ import annotations

import pytest

from sidecar.scripted_engine import live_config, ready_state
from sluice_sidecar.capacity.inside import Inside
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.progress import Progress


def choice(produced: int) -> Progress:
    return Progress(100, 500, produced + 1, 20, computed_tokens=100, output_tokens=produced)


@pytest.mark.parametrize(
    ("produced", "likely"),
    [
        pytest.param(1, 100, id="as-much-longer-as-the-others"),
        pytest.param(99, 100, id="to-its-end"),
        pytest.param(100, 151, id="half-as-long-again-once-it-has-outlived-that"),
        pytest.param(400, 500, id="never-longer-than-it-may-be"),
    ],
)
def test_what_is_likely_of_an_answer_where_answers_are_five_times_as_long(produced: int, likely: int) -> None:
    assert choice(produced).likely_tokens(5.0) == likely


def test_the_future_peak_reckons_with_answers_as_long_as_they_turn_out() -> None:
    limits = Limits.from_state(ready_state(), live_config())
    assert limits is not None
    inside = Inside()
    peaks = []
    for bias in (1.0, 5.0):
        inside.refill([choice(1) for _ in range(4)], limits, bias)
        peaks.append((inside.peak_blocks(), inside.peak_blocks([choice(1)])))

    # 100 tokens of prompt and one or two more are seven blocks; with 99 more they are thirteen.
    assert peaks == [(28, 35), (52, 65)]
