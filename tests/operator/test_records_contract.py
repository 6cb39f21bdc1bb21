"""What a real engine's loop writes is what the commands read: shares, preemptions, who was held back, who ended."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.serving import served
from sluice_operator.records.life import ChoiceLife
from sluice_operator.records.perfetto import trace_of
from sluice_operator.records.reconstruct import life_of
from sluice_operator.records.source import Records, records
from sluice_operator.records.story import tell

CALLS, OUTPUT = 6, 40


async def crowded() -> Records:
    """Six requests that need twelve blocks each share twenty-four, on two slots less than they are."""
    async with served(num_blocks=24, max_sequences=4) as engine:
        body = {"model": "tiny", "prompt": "endless", "max_tokens": OUTPUT}
        sent = [
            engine.post("/v1/completions", body, **{"x-sluice-request-id": f"req-{number}"}) for number in range(CALLS)
        ]
        answers = await asyncio.gather(*sent)
        assert [status for status, _ in answers] == [200] * CALLS
        await engine.idle()
        _, document = await engine.get("/steps?last=4096")
        return records(document, "test")


def one(found: Records, name: str) -> ChoiceLife:
    life = life_of(found, name)
    assert life is not None
    (choice,) = life.choices
    return choice


async def test_every_life_in_a_crowded_engine_is_whole() -> None:
    found = await crowded()
    lives = [one(found, f"req-{number}") for number in range(CALLS)]

    for life in lives:
        assert (life.status, life.output_tokens, life.is_cut) == ("length", OUTPUT, False)
        assert life.gaps is not None
        assert life.gaps.number == OUTPUT - 1, "as many gaps as tokens, less one"
        assert life.chunks[0].start in {0, 4}, "from the start, or from behind the block that all of them share"
        assert len(life.waits) == len(life.suspensions) + 1
        assert all(suspension.resumed_step is not None for suspension in life.suspensions)
    suspensions = [suspension for life in lives for suspension in life.suspensions]
    assert suspensions, "the scene is there to make them preempt"
    assert all(one.freed_blocks > 0 and one.beneficiary_id.startswith("req-") for one in suspensions)
    assert len({gate for life in lives for wait in life.waits for gate in wait.held_by}) >= 1
    text = "\n".join(line for number in range(CALLS) for line in _told(found, f"req-{number}"))
    # Which of the two depends on who came first: the calls arrive together.
    assert "it was preempted for req-" in text or "it stepped back itself" in text
    assert "It came back in step" in text


async def test_its_trace_has_a_row_a_slot_and_no_row_more() -> None:
    events: list[dict[str, Any]] = trace_of(await crowded())["traceEvents"]

    rows = {event["tid"] for event in events if event["ph"] == "X"}
    assert rows <= {0, 1, 2, 3, 4}
    decoded = sum(event["args"]["tokens"] for event in events if event.get("cat") == "decode")
    lost = sum(event["ph"] == "i" for event in events)
    assert lost
    assert decoded >= CALLS * (OUTPUT - 1) - lost, "the step that computes lost state again gives a token too"


def _told(found: Records, name: str) -> list[str]:
    life = life_of(found, name)
    assert life is not None
    return tell(life)
