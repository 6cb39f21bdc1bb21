from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.service.release import Release
from cluster.service.space import TINY, Space, models, open_space
from tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def release() -> Release:
    """The operator, installed once by Helm into a namespace that enforces the restricted standard."""
    make_tiny_llama(models() / TINY.rpartition("/")[2])
    found = Release("sluice", "sluice-system")
    found.prepare()
    found.install()
    return found


@pytest.fixture
def space(release: Release) -> Iterator[Space]:
    with open_space() as opened:
        yield opened
