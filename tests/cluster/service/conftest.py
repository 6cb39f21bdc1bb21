from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.service.release import Release
from cluster.service.space import Space, models
from cluster.testnode.cluster import Cluster
from tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def release(node: Cluster) -> Iterator[Release]:
    """The operator, installed once by Helm."""
    for file in make_tiny_llama(models(node) / "tiny").iterdir():
        file.chmod(0o644)  # pods run as somebody else
    with node.namespace("sluice-system") as namespace:
        installed = Release(node, "sluice", namespace)
        installed.install()
        yield installed


@pytest.fixture
def space(release: Release, namespace: str) -> Space:
    return Space.prepare(release.node, namespace)
