from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.service.release import Release
from cluster.service.space import Space, open_space


@pytest.fixture(scope="session")
def release() -> Release:
    """The operator, installed once by Helm into a namespace that enforces the restricted standard."""
    found = Release("sluice", "sluice-system")
    found.prepare()
    found.install()
    return found


@pytest.fixture
def space(release: Release) -> Iterator[Space]:
    with open_space() as opened:
        yield opened
