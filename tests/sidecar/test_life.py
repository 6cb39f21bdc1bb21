"""The engine's life from what polls came to; the same through sockets is in test_server."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.scripted_engine import ready_state
from sluice_engine.core.state import LoadingProgress
from sluice_sidecar.capacity.life import EngineLife, Patience
from sluice_sidecar.errors import Reason

S = 1_000_000


def test_an_idle_state_that_stands_still_is_as_new_as_its_poll() -> None:
    life = EngineLife()
    assert life.answered(ready_state(), 1 * S) == 1 * S
    assert life.answered(ready_state(), 9 * S) == 9 * S


def test_a_working_state_that_stands_still_is_as_old_as_its_last_change() -> None:
    life = EngineLife()
    assert life.answered(ready_state(running_requests=1), 1 * S) == 1 * S
    assert life.answered(ready_state(running_requests=1), 9 * S) == 1 * S
    assert life.answered(ready_state(running_requests=1, seq=2), 10 * S) == 10 * S
    assert life.answered(ready_state(running_requests=1, seq=2, boot_id="boot-2"), 11 * S) == 11 * S


def test_a_step_in_flight_moves_as_it_runs_and_one_that_stands_still_is_old() -> None:
    life = EngineLife()
    assert life.answered(ready_state(running_requests=1, step_running_us=10), 1 * S) == 1 * S
    assert life.answered(ready_state(running_requests=1, step_running_us=3 * S), 4 * S) == 4 * S
    assert life.answered(ready_state(running_requests=1, step_running_us=3 * S), 5 * S) == 4 * S


def test_an_engine_that_speaks_seldom_is_given_its_time() -> None:
    life = EngineLife(Patience(frozen_after_us=5 * S))
    assert life.answered(ready_state(running_requests=1), 1 * S) == 1 * S
    assert life.answered(ready_state(running_requests=1), 5 * S) == 5 * S
    assert life.answered(ready_state(running_requests=1), 6 * S) == 1 * S


def test_a_state_of_another_version_is_relied_on_by_nobody() -> None:
    life = EngineLife()
    assert life.answered(ready_state(schema_version="2.0"), 1 * S) is None
    assert life.state is None
    assert life.unavailable(1 * S, has_limits=True) is Reason.ENGINE_LOADING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"phase": "loading"}, Reason.ENGINE_LOADING, id="loading"),
        pytest.param({"phase": "failed"}, Reason.ENGINE_DEAD, id="failed"),
        pytest.param({"hung": True}, Reason.ENGINE_DEAD, id="hung"),
        pytest.param({}, None, id="ready"),
    ],
)
def test_its_phase_says_whether_it_can_serve(changes: dict[str, Any], reason: Reason | None) -> None:
    life = EngineLife()
    life.answered(ready_state(**changes), 0)
    assert life.unavailable(0, has_limits=True) is reason


def test_a_refused_connection_is_a_dead_engine_at_once_and_news_only_once() -> None:
    life = EngineLife()
    assert not life.refused(0, 0), "one that never was up is no news"
    life.answered(ready_state(), 0)
    assert life.refused(1, 1)
    assert not life.refused(2, 2)
    assert life.unavailable(1, has_limits=True) is Reason.ENGINE_DEAD
    assert life.life_problem(10 * S) is None
    assert life.life_problem(11 * S) == "its socket has refused connections for 10 s"
    life.answered(ready_state(), 12 * S)
    assert life.unavailable(12 * S, has_limits=True) is None


def test_silence_takes_it_out_of_service_and_only_much_later_its_life() -> None:
    life = EngineLife(Patience(silent_after_us=30 * S, wedged_after_us=300 * S))
    life.answered(ready_state(), 0)
    life.unanswered(1 * S)
    life.unanswered(20 * S)
    assert life.unavailable(31 * S, has_limits=True) is None
    assert life.unavailable(31 * S + 1, has_limits=True) is Reason.ENGINE_DEAD
    assert life.life_problem(301 * S) is None
    assert life.life_problem(302 * S) == "it has answered nothing for 301 s"


def test_nonsense_is_an_answer_but_no_state() -> None:
    life = EngineLife()
    life.answered(ready_state(), 0)
    life.unanswered(1 * S)
    life.unreadable()
    assert life.silent_us(40 * S) == 0


def test_a_drain_comes_before_everything() -> None:
    life = EngineLife()
    life.draining = True
    assert life.unavailable(0, has_limits=True) is Reason.DRAINING


def test_a_start_says_how_far_it_is() -> None:
    life = EngineLife()
    assert life.start_problem() == "the engine has not opened its socket yet"
    life.answered(
        ready_state(phase="loading", loading=LoadingProgress(stage="weights", bytes_done=1, bytes_total=4)), 0
    )
    assert life.start_problem() == "loading: weights 25 %"
    life.answered(ready_state(phase="loading", failure="its metrics lack vllm:kv_cache_usage_perc"), 0)
    assert life.start_problem() == "loading: its metrics lack vllm:kv_cache_usage_perc"
    life.answered(ready_state(), 0)
    assert life.start_problem() is None
