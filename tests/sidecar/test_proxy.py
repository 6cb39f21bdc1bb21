from __future__ import annotations

from sidecar.running import RunningGate, empty
from sidecar.scripted_engine import Script, ScriptedEngine


async def test_a_stream_arrives_whole_and_in_order(gate: RunningGate, engine: ScriptedEngine) -> None:
    engine.script = Script(tokens=5)

    async with gate.post() as response:
        body = await response.text()

    assert response.status == 200
    assert body.count("tok") == 5
    assert body.endswith("data: [DONE]\n\n")
    await empty(gate.gate)
