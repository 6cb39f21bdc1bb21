"""The gate's page and docs/metrics.md say the same, and nothing that a client sends makes a new series."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metric_lines import check
from sidecar.running import RunningGate, empty, running_gate
from sidecar.scripted_engine import Script, ScriptedEngine
from sluice_sidecar.errors import Reason


@pytest.fixture
async def trusting(engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[RunningGate]:
    async with running_gate(engine, socket_dir, trusted_peers=("127.0.0.0/8",)) as running:
        yield running


async def page(gate: RunningGate) -> str:
    async with gate.client.get(f"{gate.admin_url}/metrics") as response:
        return await response.text()


async def ask(gate: RunningGate, *, path: str = "/v1/chat/completions", user: str = "", **headers: str) -> None:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with gate.post(path=path, headers=sent, prompt="x", user=user) as response:
        await response.read()


async def test_every_series_has_its_line_with_type_and_labels_and_no_line_is_stale(trusting: RunningGate) -> None:
    await ask(trusting)
    await empty(trusting.gate)

    families = text_string_to_metric_families(await page(trusting))

    check("Gate", "sluice_gate_", families, {"reason": frozenset(reason.value for reason in Reason)})


async def test_nothing_that_a_client_sends_makes_a_series(trusting: RunningGate, engine: ScriptedEngine) -> None:
    engine.script = Script(tokens=1)
    for path in ("/v1/chat/completions", "/v1/completions"):
        await ask(trusting, path=path, x_sluice_class="batch")
        await ask(trusting, path=path, x_sluice_class="absurd")
    await empty(trusting.gate)
    before = series(await page(trusting))

    for start in range(0, 120, 4):
        await asyncio.gather(*(
            ask(
                trusting,
                path=f"/v1/{number}" if number % 3 else "/v1/completions",
                user=f"user-{number}",
                x_sluice_tenant=f"tenant-{number}",
                x_sluice_class=("critical", "background", f"class-{number}")[number % 3],
                x_request_id=f"id-{number}",
                user_agent=f"agent-{number}",
            )
            for number in range(start, start + 4)
        ))  # fmt: skip
    await empty(trusting.gate)

    new = series(await page(trusting)) - before
    assert {name for name, _ in new if not name.startswith("sluice_gate_")} == set()
    assert all("-" not in value or value.startswith("x-") for _, labels in new for _, value in labels), new
    assert len(new) <= 8, "a class more, an outcome more, and no series for a name"


def series(text: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    families = text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))) for family in families for one in family.samples}
