"""`/state`: what the engine's thread published, and what only a reader can tell: how long a step runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from sluice_engine.codec import digest, encode
from sluice_engine.core.state import SCHEMA_VERSION, AdapterState, EngineState, GrammarState
from sluice_engine.core.steptime import ChunkCeiling, StepTable
from sluice_engine.live_config import LiveConfig
from sluice_engine.serving.service import EngineService


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What names this engine for as long as it runs."""

    boot_id: str
    served_name: str
    engine_config_hash: str
    live_config_hash: str
    """Of the `live.json` that it was started with."""


def engine_state(
    service: EngineService,
    identity: Identity,
    live_config_refused: str = "",
    grammars: GrammarState | None = None,
    adapters: tuple[AdapterState, ...] = (),
) -> EngineState:
    """The whole document, as of now. `live_config_refused`: why the `live.json` that lies there is not in force."""
    engine, published = service.engine, service.publication
    told = engine.tuning.current if engine is not None else None
    table = engine.tuning.table if engine is not None else None
    return EngineState(
        schema_version=SCHEMA_VERSION,
        boot_id=identity.boot_id,
        seq=published.seq if published is not None else 0,
        phase=service.phase,
        failure=": ".join(service.failure) if service.failure is not None else "",
        model=identity.served_name,
        model_revision=engine.model_revision if engine is not None else "",
        max_length_tokens=engine.max_length_tokens if engine is not None else 0,
        ranks=max(1, len(engine.rank_bytes)) if engine is not None else 1,
        step=published.step if published is not None else 0,
        step_running_us=service.step_running_us(),
        step_predicted_us=engine.loop.step_predicted_us if engine is not None else 0,
        hung=service.hung(),
        pool=published.pool if published is not None else None,
        prefix=published.prefix if published is not None else None,
        host=published.host if published is not None else None,
        running_requests=published.running_requests if published is not None else 0,
        waiting_requests=published.waiting_requests if published is not None else 0,
        waiting_tokens=published.waiting_tokens if published is not None else 0,
        preemptions_total=published.preemptions_total if published is not None else 0,
        derived=told.derived if told is not None else None,
        step_cost=told.step_cost if told is not None else None,
        prefill_cost=told.prefill_cost if told is not None else None,
        decode_curve_us=told.decode_curve_us if told is not None else (),
        decode_context_ps=told.decode_context_ps if told is not None else 0,
        table_digest=_digest(table) if table is not None else "",
        engine_config_hash=identity.engine_config_hash,
        live_config_hash=_live_hash(engine.tuning.live) if engine is not None else identity.live_config_hash,
        live_config_refused=live_config_refused,
        loading=service.progress,
        grammars=grammars,
        adapters=adapters,
        requests=published.requests if published is not None else (),
        finished=published.finished if published is not None else (),
    )


def step_table(service: EngineService) -> dict[str, Any] | None:
    """`/step-table`: the table as it is now, and c(b) in a full cache by it; None before there is one."""
    engine = service.engine
    table = engine.tuning.table if engine is not None else None
    if engine is None or table is None:
        return None
    promise_us = engine.tuning.current.limits.ceiling.promise_us
    # One of its own: the engine's belongs to its thread.
    ceiling = ChunkCeiling(table, promise_us, search_up_to_tokens=table.prefill_axis[-1])
    return {
        "promise_us": promise_us,
        "ceiling_tokens": {str(b): ceiling(b, table.context_axis[-1]) for b in table.decode_axis if b},
        "table": encode(table),
    }


@functools.lru_cache(maxsize=2)
def _digest(table: StepTable) -> str:
    return digest(table)


@functools.lru_cache(maxsize=2)
def _live_hash(live: LiveConfig) -> str:
    return digest(live)
