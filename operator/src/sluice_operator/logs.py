"""The operator's logs: the JSON lines of all three programs, from a level on that the installer chose."""

from __future__ import annotations

import logging

from sluice_engine.logs import log_to_stderr


def setup_logging(level: str) -> None:
    """Log everything from this level on; kopf only its warnings, since it tells each event of each object."""
    log_to_stderr(level)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
