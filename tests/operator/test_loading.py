"""How far a start is, in words."""

from __future__ import annotations

import pytest

from sluice_engine.core.state import LoadingProgress
from sluice_operator.observed.loading import progress

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("loading", "words"),
    [
        pytest.param(None, "", id="nothing-is-known"),
        pytest.param(LoadingProgress(stage="weights"), " (weights)", id="weights-of-unknown-size"),
        pytest.param(
            LoadingProgress(stage="weights", bytes_done=68, bytes_total=100), " (60 % of the weights)", id="in-tens"
        ),
        pytest.param(
            LoadingProgress(stage="download", bytes_done=42, bytes_total=100), " (40 % downloaded)", id="a-download"
        ),
        pytest.param(LoadingProgress(stage="step_table"), " (measuring step times)", id="a-kept-table"),
        pytest.param(
            LoadingProgress(stage="step_table", steps_done=79, steps_total=80),
            " (measuring step times: 90 %)",
            id="nearly-measured",
        ),
        pytest.param(LoadingProgress(stage="warmup"), " (warming up)", id="warming-up"),
    ],
)
def test_a_start_tells_its_stage_and_how_far_it_is(loading: LoadingProgress | None, words: str) -> None:
    assert progress(loading) == words


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "words"),
    [
        pytest.param(6 * GB, 15 * GB, 60, " (40 % of the weights: 6.0 GB of 15.0 GB, about 2 min to go)", id="minutes"),
        pytest.param(45, 60, 60, " (70 % of the weights, about 20 s to go)", id="seconds"),
        pytest.param(
            200 * 10**6, 400 * 10**6, 1, " (50 % of the weights: 200 MB of 400 MB, about 10 s to go)", id="few"
        ),
        pytest.param(GB, 15 * GB, 600, " (0 % of the weights: 0.0 GB of 15.0 GB)", id="too early for a guess"),
        pytest.param(GB, GB, 600, " (100 % of the weights: 1.0 GB of 1.0 GB)", id="nothing to go"),
        pytest.param(6 * GB, 15 * GB, -3, " (40 % of the weights: 6.0 GB of 15.0 GB)", id="clocks that disagree"),
    ],
)
def test_weights_tell_their_bytes_and_a_guess_of_the_rest(done: int, total: int, elapsed_s: float, words: str) -> None:
    assert progress(LoadingProgress(stage="weights", bytes_done=done, bytes_total=total), elapsed_s) == words
