"""Records of a pod on paper: steps, decisions and states, as JSON documents and as what is read from them.

It lies outside `tests/operator/` since nothing in a folder of that name can be imported: the standard library's wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice_engine import codec
from sluice_engine.core.state import (
    DerivedLimits,
    EngineState,
    FinishedState,
    PoolState,
    RequestState,
)
from sluice_engine.live_config import SLOConfig
from sluice_operator.records.source import Records, records
from sluice_sidecar.telemetry.decisions import Decision
from sluice_sidecar.telemetry.state import Admission, GateState, Measured

Json = dict[str, Any]

STEP_US = 100_000
"""Every step on paper takes so long unless told otherwise; step n begins at n × this."""


def share(name: str, start: int, num_tokens: int = 1, *, slot: int = 0, sampled: bool = True) -> Json:
    return {"request_id": name, "slot": slot, "start": start, "num_tokens": num_tokens, "sampled": sampled}


def chunk(name: str, start: int, num_tokens: int, *, slot: int = 0, last: bool = False) -> Json:
    return share(name, start, num_tokens, slot=slot, sampled=last)


def lost(name: str, num_computed: int, for_whom: str, **prices: Any) -> Json:
    return {
        "request_id": name,
        "num_computed": num_computed,
        "freed_blocks": -(-num_computed // 16),
        "recompute_us": 240_000,
        "beneficiary_id": for_whom,
        **prices,
    }


def step(number: int, *scheduled: Json, preempted: Sequence[Json] = (), **changes: Any) -> Json:
    decodes = sum(one["num_tokens"] == 1 and one["start"] > 0 for one in scheduled)
    document = {
        "step": number,
        "start_us": number * STEP_US,
        "predicted_us": STEP_US,
        "real_us": STEP_US,
        "decode_requests": decodes,
        "prefill_tokens": sum(one["num_tokens"] for one in scheduled) - decodes,
        "context_tokens": 0,
        "scheduled": list(scheduled),
        "preempted": list(preempted),
        "waiting_reasons": {},
        "idle_reason": None,
        "tokens_left": 100,
        "prefill_left": 50,
        "free_blocks_before": 80,
        "free_blocks_after": 80,
    }
    return document | changes


def decision(name: str, at_us: int, **changes: Any) -> Decision:
    values: Json = {
        "request_id": name,
        "client_id": "",
        "route": "chat",
        "arrived_us": at_us,
        "choices": 1,
        "prompt_tokens": 100,
        "max_tokens": 50,
        "verdict": "admitted",
        "decided_us": at_us,
    }
    return Decision(**(values | changes))


def finished(name: str, outcome: str = "length", *, choice: int = 0) -> FinishedState:
    return FinishedState(id=name, choice=choice, outcome=outcome, prompt_tokens=100, output_tokens=50)


def running(name: str, *, computed: int = 10, status: Any = "running", choice: int = 0) -> RequestState:
    return RequestState(
        id=name,
        choice=choice,
        status=status,
        prompt_tokens=100,
        computed_tokens=computed,
        output_tokens=max(0, computed - 100),
        max_tokens=50,
        blocks=-(-computed // 16),
        incarnation=0,
        preemptions=0,
    )


def state(*requests: RequestState, ended: Sequence[FinishedState] = (), **changes: Any) -> GateState:
    """A pod of 100 blocks and 4 slots that promises 2 s and 150 ms."""
    engine = EngineState(
        schema_version="1.0",
        boot_id="boot",
        seq=1,
        phase="ready",
        model="tiny",
        max_length_tokens=1024,
        step=7,
        pool=PoolState(block_tokens=16, total_blocks=100, free_blocks=60),
        running_requests=sum(request.status == "running" for request in requests),
        waiting_requests=sum(request.status == "waiting" for request in requests),
        derived=DerivedLimits(
            feasible=True, chunk_ceiling_tokens=256, token_budget=260, max_sequences=4, kv_capacity_tokens=1600
        ),
        requests=requests,
        finished=tuple(ended),
    )
    values: Json = {
        "schema_version": "1.1",
        "ready": True,
        "draining": False,
        "freshness": "fresh",
        "live_config_hash": "l",
        "gate_config_hash": "g",
        "measured": Measured(time_to_first_token_us=800_000, inter_token_latency_us=90_000, requests=9),
        "admission": Admission(
            open=True,
            kv_ceiling_percent=95.0,
            predicted_peak_blocks=70,
            ledger_requests=2,
            admitted_total=12,
            refused_total={"slots": 3, "kv_peak": 1},
        ),
        "engine": engine,
        "promise": SLOConfig(time_to_first_token_us=2_000_000, inter_token_latency_us=150_000),
    }
    return GateState(**(values | changes))


def document(*steps: Json, of: GateState | None = None, decisions: Sequence[Decision] = ()) -> Json:
    """What a file of records holds."""
    result: Json = {"steps": list(steps), "decisions": codec.encode(list(decisions))}
    return result | ({} if of is None else {"state": codec.encode(of)})


def recorded(*steps: Json, of: GateState | None = None, decisions: Sequence[Decision] = ()) -> Records:
    """The records of that document."""
    return records(document(*steps, of=of, decisions=decisions), "test")
