from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.scripted_engine import live_config
from sluice_sidecar.telemetry.measure import GoodRequests, QuantileWindow, Residence, StreamTimes, percentile

S = 1_000_000


@given(st.lists(st.integers(100, 10 * S), min_size=1, max_size=200), st.sampled_from([50.0, 90.0, 99.0]))
def test_a_quantile_is_the_true_one_or_up_to_five_percent_more(values: list[int], percent: float) -> None:
    window = QuantileWindow()
    for value in values:
        window.add(value, now_us=0)

    found = window.quantile(percent, now_us=0)

    ordered = sorted(values)
    true = next(v for i, v in enumerate(ordered, 1) if i * 100 >= len(ordered) * percent)
    assert found is not None
    assert true <= found <= true * 1.05 + 2


def test_values_leave_the_window_after_five_minutes() -> None:
    window = QuantileWindow()
    window.add(1_000, now_us=0)

    assert window.quantile(99, now_us=299 * S) is not None
    assert window.quantile(99, now_us=300 * S) is None


def stream(*token_us: int, arrived_us: int = 0, prompt_tokens: int = 10) -> StreamTimes:
    times = StreamTimes(arrived_us, prompt_tokens)
    for now_us in token_us:
        times.token(now_us, gap_promise_us=100_000)
    return times


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        pytest.param(stream(2 * S, 2 * S + 100_000), (True, True), id="exactly-as-promised"),
        pytest.param(stream(2 * S + 1), (False, True), id="the-first-token-a-microsecond-late"),
        pytest.param(stream(1 * S, 1 * S + 100_001), (True, False), id="one-gap-of-one-too-long"),
        pytest.param(stream(*range(0, 10 * S, 99_000), 10 * S + 50_000), (True, True), id="one-gap-of-a-hundred"),
        pytest.param(stream(3 * S, prompt_tokens=8_192), (True, True), id="a-longer-prompt-has-longer"),
    ],
)
def test_a_stream_keeps_its_promise(times: StreamTimes, kept: tuple[bool, bool]) -> None:
    assert times.kept(live_config().slo, now_us=20 * S, output_tokens=None, streamed=True) == kept


def test_choices_that_take_turns_have_gaps_of_their_own() -> None:
    times = StreamTimes(0, 10)

    gaps = [times.token(now_us, 100_000, choice) for now_us, choice in [(1, 0), (2, 1), (200_001, 0), (200_002, 1)]]

    assert gaps == [None, None, 200_000, 200_000]
    assert (times.first_us, times.gaps, times.gaps_over) == (1, 2, 2)


@pytest.mark.parametrize(
    ("now_us", "tokens", "kept"),
    [
        pytest.param(2 * S + 900_000, 10, True, id="within-the-time-of-ten-tokens"),
        pytest.param(2 * S + 900_001, 10, False, id="a-microsecond-over"),
        pytest.param(2 * S + 1, None, False, id="without-usage-as-one-token"),
    ],
)
def test_a_whole_answer_is_held_to_the_time_of_all_its_tokens(now_us: int, tokens: int | None, *, kept: bool) -> None:
    assert StreamTimes(0, 10).kept(live_config().slo, now_us, tokens, streamed=False) == (kept, True)


def test_goodput_counts_the_good_ones_of_five_minutes() -> None:
    good = GoodRequests()
    for second in range(120):
        good.add(good=second % 2 == 0, now_us=second * S)

    assert good.totals(120 * S) == (120, 60)
    assert good.good_per_minute(120 * S) == pytest.approx(30)
    assert good.totals(1_000 * S) == (0, 0)
    assert GoodRequests().good_per_minute(5) == 0


def test_residence_is_unmeasured_until_a_few_have_left() -> None:
    residence = Residence()
    residence.add(1 * S)
    residence.add(3 * S)
    assert residence.mean_us is None

    residence.add(2 * S)

    assert residence.mean_us == pytest.approx(2 * S, abs=1)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        pytest.param([3, 1, 2], 50, 2, id="the-middle-one"),
        pytest.param([3, 1, 2], 100, 3, id="the-largest"),
        pytest.param([3, 1, 2], 0, 1, id="never-below-the-smallest"),
        pytest.param(list(range(1, 101)), 99, 99, id="one-in-a-hundred-is-above"),
        pytest.param([7], 99, 7, id="a-single-one"),
    ],
)
def test_a_percentile_is_one_of_the_values(values: list[int], percent: float, expected: int) -> None:
    assert percentile(values, percent) == expected
