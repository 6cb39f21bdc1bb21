"""Which engine stands behind the gate."""

from __future__ import annotations

from collections.abc import Callable

from sluice_engine.live_config import SLOConfig
from sluice_sidecar.admission import Admission
from sluice_sidecar.config import GateConfig
from sluice_sidecar.engines.connection import EngineConnection
from sluice_sidecar.engines.dialect import Dialect
from sluice_sidecar.engines.foreign import ForeignEngine
from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.engines.llamacpp import LlamaCpp
from sluice_sidecar.engines.sglang import SGLang
from sluice_sidecar.engines.sluice import SluiceEngine
from sluice_sidecar.engines.told import Started
from sluice_sidecar.engines.vllm import VLLM


def engine_link(config: GateConfig, slo: SLOConfig, admission: Admission, clock: Callable[[], int]) -> EngineLink:
    """The link to the configured engine."""
    if config.engine == "sluice":
        return SluiceEngine(config.engine_socket, admission, clock, config.state_interval_us)
    dialects: dict[str, Dialect] = {"vllm": VLLM(), "sglang": SGLang(), "llamacpp": LlamaCpp()}
    dialect = dialects[config.engine]
    return ForeignEngine(
        dialect,
        EngineConnection.to_url(config.engine_url, keep_alive_s=dialect.traits.keep_alive_s),
        admission,
        clock,
        slo=slo,
        started=Started(
            max_sequences=config.engine_max_sequences,
            kv_tokens=config.engine_kv_tokens,
            chunk_tokens=config.engine_chunk_tokens,
        ),
        interval_us=config.state_interval_us,
        has_priorities=config.engine_priorities,
    )
