"""How an end in the engine reaches the caller."""

from __future__ import annotations

import pytest

from engine.scripted import make_request
from engine.tiny_model import tiny_tokenizer
from sluice_engine.core.emissions import Emission
from sluice_engine.core.request import Outcome
from sluice_engine.errors import RequestError
from sluice_engine.serving.output import ChoiceOutput


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        pytest.param(Outcome.FAILED, 500, "request_failed", id="a-failure-is-the-engine-s-fault"),
        pytest.param(Outcome.EXPIRED, 504, "deadline_missed", id="a-missed-deadline-is-a-timeout"),
        pytest.param(Outcome.ABORTED, 503, "engine_not_ready", id="an-end-from-outside-is-a-lack-of-capacity"),
    ],
)
def test_an_end_without_an_answer_is_an_error_of_its_own(outcome: Outcome, status: int, code: str) -> None:
    request = make_request("A", 4, 4)
    output = ChoiceOutput(0, request, tiny_tokenizer(), ())

    with pytest.raises(RequestError) as raised:
        output.push(Emission(request, outcome=outcome))

    assert (raised.value.status, raised.value.code) == (status, code)
