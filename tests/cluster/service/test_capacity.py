"""More work than fits, a step that would break the promise, and a second pod."""

from __future__ import annotations

import asyncio

import openai
import pytest

from cluster.service.space import KIND, Space
from cluster.service.streams import Stream, client, stream

pytestmark = pytest.mark.cluster


async def test_a_pod_refuses_what_it_cannot_finish_and_says_when_to_come_back(space: Space) -> None:
    url = space.serve(space.tiny("busy", cache={"capacity": "512Ki"}, admission={"maxWait": "0s"}))

    async def rush() -> tuple[list[Stream], list[openai.RateLimitError]]:
        async with client(url) as who:
            streams = [stream(who, "tiny", "word " * 20, max_tokens=200) for _ in range(24)]
            outcomes = await asyncio.gather(*streams, return_exceptions=True)
        served = [outcome for outcome in outcomes if isinstance(outcome, Stream)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, openai.RateLimitError)]
        assert len(served) + len(refused) == len(outcomes), outcomes
        return served, refused

    served, _ = await rush()  # from which the gate learns how fast its work ends
    also_served, refused = await rush()

    assert served
    assert also_served
    assert refused
    for refusal in refused:
        assert refusal.response.headers["x-sluice-reason"] == refusal.code
        assert refusal.type == "rate_limit_error"
        assert int(refusal.response.headers["retry-after"]) >= 1
        assert float(refusal.response.headers["retry-after-ms"]) >= 1


def test_the_api_server_refuses_a_chunk_that_the_measured_cost_cannot_keep(space: Space) -> None:
    service = space.tiny("promise")
    space.serve(service)
    cost = space.status("promise")["stepCost"]
    left_ns = 1000 * (2_000_000 - cost["fixedMicroseconds"] - cost["decodeMicroseconds"])
    ceiling = left_ns // cost["perPrefillTokenNanoseconds"]

    service["spec"]["scheduling"]["prefillChunkTokens"] = 2 * ceiling
    refusal = space.refusal(service)

    assert "scheduling.prefillChunkTokens takes longer than slo.interTokenLatency" in refusal
    assert "lower scheduling.prefillChunkTokens, relax slo.interTokenLatency, or set" in refusal
    service["spec"]["scheduling"]["prefillChunkTokens"] = ceiling // 2
    space.apply(service)


def test_scaling_brings_a_second_pod_and_takes_it_away_again(space: Space) -> None:
    space.serve(space.tiny("scaled"))

    space.kubectl("scale", f"{KIND}/scaled", "--replicas=2")
    space.wait("scaled", "jsonpath={.status.readyReplicas}=2")
    space.wait("scaled", "condition=Ready")
    assert len(space.pods("scaled")) == 2

    space.kubectl("scale", f"{KIND}/scaled", "--replicas=1")
    space.wait("scaled", "jsonpath={.status.replicas}=1")
    space.wait("scaled", "condition=Ready")
