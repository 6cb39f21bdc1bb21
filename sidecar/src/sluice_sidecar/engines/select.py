"""Which engine stands behind the gate."""

from __future__ import annotations

from collections.abc import Callable

from sluice_sidecar.admission import Admission
from sluice_sidecar.config import GateConfig
from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.engines.sluice import SluiceEngine


def engine_link(config: GateConfig, admission: Admission, clock: Callable[[], int]) -> EngineLink:
    """The link to the configured engine."""
    return SluiceEngine(config.engine_socket, admission, clock, config.state_interval_us)
