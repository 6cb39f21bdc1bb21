"""Fixtures of the cluster tests: the node they run beside, a namespace each, and what to print when one fails."""

import os
import re
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from cluster.testnode import box, packages, programs
from cluster.testnode.cluster import INSIDE, Cluster
from cluster.testnode.errors import Missing

_node: list[Cluster] = []  # for the report of a failed test, which knows no fixtures


def _why_not() -> str:
    """One line for a person who ran these tests outside the node."""
    lacking: list[str] = []
    try:
        box.check_machine()
    except Missing as error:
        lacking.append(str(error))
    go = programs.missing_go()
    if go and not all(programs.cached(module) for module in programs.ALL):
        lacking.append(go)
    if packages.lacking() and not shutil.which("apt-get"):
        lacking.append(f"apt-get, to install {', '.join(packages.lacking())}")
    how = "the cluster tests run beside a real node: make test-cluster"
    return f"{how} (this machine lacks {'; '.join(lacking)})" if lacking else how


@pytest.fixture(scope="session")
def node() -> Cluster:
    """The running node; its tests are skipped where there is none, which in CI is a failure."""
    run = os.environ.get(INSIDE)
    if not run:
        if os.environ.get("CI") == "true":
            pytest.fail(_why_not())
        pytest.skip(_why_not())
    _node.append(Cluster(Path(run)))
    return _node[0]


@pytest.fixture
def namespace(node: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace that enforces the `restricted` Pod Security level, named after the test and gone after it."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:40].strip("-")
    with node.namespace(name) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What judges the whole run comes last."""
    items.sort(key=lambda item: item.path.parent.name == "rights")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds events, pods and logs to the report of a failed test, while its namespace is still there."""
    report = yield
    if report.failed and _node and item.get_closest_marker("cluster"):
        report.sections.append(("node", _node[0].diagnose()))
    return report
