"""What a call has used when it leaves: to the last token that went by, whatever the engine told last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config, ready_state
from sluice_engine.core.state import RequestState
from sluice_engine.live_config import TenantConfig
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Ledger, Permit
from sluice_sidecar.capacity.limits import Limits

TENANT = {"x-sluice-tenant": "a"}


@asynccontextmanager
async def unpolled(engine: ScriptedEngine, folder: Path) -> AsyncIterator[tuple[RunningGate, list[int]]]:
    """A gate that asks the engine once and then not again, and what was charged to the quota of tenant a."""
    live = live_config()
    live = replace(live, admission=replace(live.admission, tenants=(TenantConfig(name="a", tokens_per_second=1_000),)))
    slow: dict[str, Any] = {"state_interval_us": 3_600_000_000, "stale_after_us": 10**12, "blind_after_us": 10**12}
    async with running_gate(engine, folder, live=live, trusted_peers=("127.0.0.0/8",), **slow) as gate:
        charged: list[int] = []
        settle = gate.gate.admission.quotas.settle

        def noted(request_id: str, used_tokens: int) -> None:
            charged.append(used_tokens)
            settle(request_id, used_tokens)

        gate.gate.admission.quotas.settle = noted  # type: ignore[method-assign]
        yield gate, charged


@pytest.mark.parametrize(
    ("asked", "prompt_tokens", "output_tokens"),
    [
        # The token that ended it is in no event.
        pytest.param({"stream": True}, None, 14, id="streamed"),
        pytest.param({"stream": False}, 20, 13, id="whole-with-its-usage"),
        pytest.param({"stream": False, "n": 3}, 20, 13, id="of-several-choices-the-prompt-once-as-its-usage-says"),
    ],
)
async def test_tokens_after_the_last_look_at_the_engine_are_charged_too(
    engine: ScriptedEngine, socket_dir: Path, asked: dict[str, Any], prompt_tokens: int | None, output_tokens: int
) -> None:
    engine.script = Script(tokens=13)
    async with unpolled(engine, socket_dir) as (gate, charged):
        async with gate.post(headers=TENANT, **asked) as response:
            await response.read()
        await empty(gate.gate)

        estimate = gate.gate.admission.decisions.last(1)[0].prompt_tokens
        assert charged == [output_tokens + (prompt_tokens or estimate)]


async def test_a_client_that_leaves_is_charged_what_went_by(engine: ScriptedEngine, socket_dir: Path) -> None:
    engine.script = Script(tokens=13, hold_token={6: asyncio.Event()})
    async with unpolled(engine, socket_dir) as (gate, charged):
        async with gate.post(headers=TENANT) as response:
            text = b""
            while text.count(b"tok") < 6:
                text += await response.content.readany()
        await until(lambda: engine.aborted == 1)
        await empty(gate.gate)

        assert charged == [6 + (gate.gate.admission.decisions.last(1)[0].prompt_tokens or 0)]


def opened(choices: int, *, lists_requests: bool = True) -> tuple[Ledger, Limits, Permit]:
    limits = Limits.from_state(ready_state(), live_config())
    assert limits is not None
    ledger = Ledger(lists_requests=lists_requests)
    ledger.apply(ready_state(), limits, 0)
    return ledger, limits, ledger.reserve("a", Cost((ChoiceCost(100, 50),) * choices), 0)


@pytest.mark.parametrize("lists_requests", [True, False])
@pytest.mark.parametrize(
    ("choices", "went_by", "told", "counts"),
    [
        pytest.param(1, [7], (90, 9), [(90, 9)], id="usage-is-the-last-word"),
        pytest.param(1, [7], (None, None), [(100, 7)], id="without-it-what-went-by"),
        pytest.param(1, [9], (90, 7), [(90, 7)], id="also-where-it-says-less"),
        pytest.param(1, [0], (90, 0), [(90, 0)], id="an-answer-of-nothing"),
        pytest.param(3, [0, 0, 0], (90, 8), [(100, 2), (100, 3), (100, 3)], id="each-choice-has-its-part"),
        pytest.param(2, [5, 2], (90, 8), [(100, 5), (100, 3)], id="of-what-was-not-seen"),
        pytest.param(2, [5, 2], (None, None), [(100, 5), (100, 2)], id="of-two-without-it"),
    ],
)
def test_the_count_that_is_charged(
    choices: int,
    went_by: list[int],
    told: tuple[int | None, int | None],
    counts: list[tuple[int, int]],
    *,
    lists_requests: bool,
) -> None:
    ledger, _, permit = opened(choices, lists_requests=lists_requests)
    found: list[list[tuple[int, int]]] = []
    ledger.on_release = lambda entry, _completed, _now: found.append(
        [(choice.prompt_tokens, choice.output_tokens) for choice in entry.choices]
    )
    for index, count in enumerate(went_by):
        permit.tokens(index, count)

    permit.told(*told)
    permit.completed = True
    permit.close(1)
    permit.close(2)

    assert found == [counts], "once"


def test_of_a_lister_the_larger_of_what_it_told_and_what_went_by_counts() -> None:
    ledger, limits, permit = opened(2)
    listed = [
        RequestState(
            id="a", choice=choice, status="running", prompt_tokens=80, computed_tokens=90, output_tokens=11,
            max_tokens=50, blocks=6, incarnation=0, preemptions=0,
        )
        for choice in range(2)
    ]  # fmt: skip
    permit.tokens(0, 9)
    permit.tokens(1, 12)
    ledger.apply(ready_state(requests=tuple(listed)), limits, 1)
    entry = permit.entry

    permit.close(2)

    assert [choice.output_tokens for choice in entry.choices] == [11, 12]
