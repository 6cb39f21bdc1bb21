from __future__ import annotations

import os

import pytest

from charts.helm import Helm, find
from charts.promtool import Promtool
from cluster.testnode.errors import Missing


@pytest.fixture(scope="session")
def helm() -> Helm:
    try:
        return Helm(find())
    except Missing as missing:
        problem = f"the chart's tests need helm: {missing}"
        if os.environ.get("CI") == "true":
            pytest.fail(problem)
        pytest.skip(problem)


@pytest.fixture(scope="module")
def promtool() -> Promtool:
    try:
        return Promtool.find()
    except Missing as missing:
        problem = f"the tests of rules and queries need promtool: {missing}"
        if os.environ.get("CI") == "true":
            pytest.fail(problem)
        pytest.skip(problem)
