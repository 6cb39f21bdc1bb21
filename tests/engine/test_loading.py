"""A start that nobody waits for any more ends by itself, in whatever it is doing, and is no failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from engine.serving import clock
from sluice_engine.core.state import LoadingProgress
from sluice_engine.serving.publication import LoadedEngine
from sluice_engine.serving.service import EngineService


@pytest.mark.parametrize("stage", ["download", "weights", "step_table"])
async def test_a_start_that_is_closed_ends_at_its_next_sign_of_progress(stage: str) -> None:
    begun, went_on = threading.Event(), []

    def load(progress: Callable[[LoadingProgress], None]) -> LoadedEngine:
        try:
            while True:
                progress(LoadingProgress(stage=stage))  # type: ignore[arg-type]  # one of them
                begun.set()
        except Exception:  # what stands in the way of a fault does not stand in the way of this
            went_on.append(stage)
            raise

    service = EngineService(load, clock)
    service.start()
    await asyncio.to_thread(begun.wait)
    service.close()
    async with asyncio.timeout(20):
        await service.ended()
    assert service.failure is None
    assert service.phase == "draining"
    assert went_on == []
