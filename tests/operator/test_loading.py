"""How far a start is, in words."""

from __future__ import annotations

import pytest

from sluice_engine.core.state import LoadingProgress
from sluice_operator.loading import progress


@pytest.mark.parametrize(
    ("loading", "words"),
    [
        pytest.param(None, "", id="nothing-is-known"),
        pytest.param(LoadingProgress(stage="weights"), " (weights)", id="weights-of-unknown-size"),
        pytest.param(
            LoadingProgress(stage="weights", bytes_done=68, bytes_total=100), " (60 % of the weights)", id="in-tens"
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
