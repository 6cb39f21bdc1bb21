"""What `helm test` says of an installation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sluice_operator import installed
from sluice_operator.installed import Unanswered, findings, host, read

OPERATOR = "sluice-system/sluice-operator"
DISCOVERED = '{"resources": [{"name": "inferenceservices", "kind": "InferenceService"}]}'


def says(text: str) -> Callable[[], str]:
    return lambda: text


def fails(text: str) -> Callable[[], str]:
    def raises() -> str:
        raise Unanswered(text)

    return raises


@pytest.mark.parametrize(
    ("definition", "readiness", "good", "said"),
    [
        pytest.param(says(DISCOVERED), says("ok"), [True, True], f"operator {OPERATOR} is ready", id="all is well"),
        pytest.param(
            says(DISCOVERED),
            fails("Connection refused"),
            [True, False],
            f"operator {OPERATOR} is not ready: Connection refused",
            id="no ready pod is behind the Service",
        ),
        pytest.param(
            fails("404 Not Found"),
            says("ok"),
            [False, True],
            "inferenceservices.sluice.dev is not served: 404 Not Found",
            id="the definition is missing",
        ),
        pytest.param(
            says('{"resources": []}'),
            says("ok"),
            [False, True],
            "inferenceservices.sluice.dev is not served",
            id="something else of the group is served",
        ),
        pytest.param(says(DISCOVERED), None, [True, True], "metrics.service is false", id="there is no Service to ask"),
    ],
)
def test_each_part_is_looked_at_and_told(
    definition: Callable[[], str], readiness: Callable[[], str] | None, good: list[bool], said: str
) -> None:
    found = findings(definition, readiness, OPERATOR)

    assert [is_good for is_good, _ in found] == good
    assert any(said in line for _, line in found)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        pytest.param({}, "sluice-operator-metrics.sluice-system.svc", id="by its name"),
        pytest.param({"SLUICE_OPERATOR_METRICS_SERVICE_HOST": "10.96.0.7"}, "10.96.0.7", id="by the pod's variable"),
        pytest.param({"SLUICE_OPERATOR_METRICS_SERVICE_HOST": "fd00::7"}, "[fd00::7]", id="by an IPv6 address"),
    ],
)
def test_the_service_is_found(environment: dict[str, str], found: str) -> None:
    assert host("sluice-operator-metrics", "sluice-system", environment) == found


async def test_an_answer_that_is_no_200_is_told_with_its_status() -> None:
    async def not_ready(_: web.Request) -> web.Response:
        return web.Response(status=503, text="not everything was listed yet")

    app = web.Application()
    app.add_routes([web.get("/readyz", not_ready)])
    async with TestServer(app) as server:
        with pytest.raises(Unanswered, match="503 Service Unavailable"):
            await asyncio.to_thread(read, str(server.make_url("/readyz")))


def test_outside_a_cluster_it_says_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("sys.argv", ["installed", "sluice-system"])

    assert installed.main() == 2
    assert capsys.readouterr().err == "this check runs in a pod: `helm test` starts it\n"


def test_without_arguments_it_says_how_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["installed"])

    assert installed.main() == 2
    assert "NAMESPACE [SERVICE]" in capsys.readouterr().err
