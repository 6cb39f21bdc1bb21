"""Answers that could never fit, and bodies that hold no prompt to count."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.running import RunningGate

HUGE = 10**4299


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        pytest.param(1_000_000, "1000000", id="a million"),
        pytest.param(2**31 - 2, "2147483646", id="the last that is told as it is"),
        pytest.param(2**31, "at least 2147483647", id="beyond the field's bound"),
        pytest.param(HUGE, "at least 2147483647", id="4300 digits"),
    ],
)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_that_could_never_fit_is_refused_by_its_own_name(
    gate: RunningGate, field: str, wanted: int, told: str
) -> None:
    body: dict[str, Any] = {field: wanted}
    async with gate.post(**body) as response:
        error = (await response.json())["error"]

    assert response.status == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert f"An answer of {told} output tokens ({field}) can never fit" in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize("messages", [None, 7, [], [{"role": "user"}]], ids=["missing", "a number", "empty", "no text"])
async def test_what_holds_no_prompt_is_the_engines_to_refuse(gate: RunningGate, messages: Any) -> None:
    """The estimate alone would not fit: the template's part and this answer exceed the length."""
    async with gate.post(messages=messages, max_tokens=1020) as response:
        assert response.status != 500
