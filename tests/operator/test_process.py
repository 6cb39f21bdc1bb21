"""The operator's process: settings, heartbeats, logs, and what gates answer."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

import operator_scene as scene
from sluice_engine import codec
from sluice_engine.logs import JSONFormatter
from sluice_operator import __main__ as operator_main
from sluice_operator import config, handlers
from sluice_operator.cluster.gates import GateClient, decode_state
from sluice_operator.errors import InvalidSettings, LeaseLost
from sluice_operator.health import Health, application
from sluice_operator.metrics import HeartbeatCollector, Metrics

IMAGES = {"SLUICE_ENGINE_IMAGE": "engine:1", "SLUICE_GATE_IMAGE": "gate:1"}


def test_settings_come_from_the_environment() -> None:
    settings = config.from_environment({
        **IMAGES, "SLUICE_WATCH_NAMESPACES": "a, b,", "SLUICE_LOG_LEVEL": "debug", "SLUICE_METRICS_PORT": "0",
        "SLUICE_RESYNC_SECONDS": "60", "SLUICE_POLL_SECONDS": "2.5", "PATH": "/bin",
        "SLUICE_OTLP_ENDPOINT": "http://collector:4318", "SLUICE_NETWORK_POLICY": "Disabled",
        "SLUICE_ADMIN_NAMESPACES": "monitoring,ops", "SLUICE_POD_MONITOR_LABELS": "release=prometheus, team=a",
        "SLUICE_LEASE": "system/sluice", "SLUICE_IDENTITY": "sluice-operator-1",
        "SLUICE_PROMETHEUS_URL": "http://prometheus:9090",
    })  # fmt: skip

    assert (settings.images.engine, settings.images.gate) == ("engine:1", "gate:1")
    assert settings.namespaces == ("a", "b")
    assert (settings.log_level, settings.metrics_port) == ("DEBUG", 0)
    assert (settings.resync_s, settings.poll_s) == (60, 2.5)
    assert settings.otlp_endpoint == "http://collector:4318"
    around = settings.surroundings
    assert (around.network_policy, around.admin_namespaces) == (False, ("monitoring", "ops"))
    assert around.prometheus_url == "http://prometheus:9090"
    assert around.pod_monitor_labels == {"release": "prometheus", "team": "a"}
    assert config.from_environment(IMAGES).otlp_endpoint == ""
    assert config.from_environment(IMAGES).surroundings.network_policy is True
    assert (settings.lease, settings.identity) == (("system", "sluice"), "sluice-operator-1")
    assert config.from_environment(IMAGES).lease is None


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"SLUICE_ENGINE_IMAGE": ""}, id="no engine image"),
        pytest.param({"SLUICE_GATE_IMAGE": ""}, id="no gate image"),
        pytest.param({"SLUICE_LOG_LEVEL": "loud"}, id="a level that is none"),
        pytest.param({"SLUICE_METRICS_PORT": "http"}, id="a port that is no number"),
        pytest.param({"SLUICE_METRICS_PORT": "70000"}, id="a port that does not exist"),
        pytest.param({"SLUICE_RESYNC_SECONDS": "1"}, id="a resync without a pause"),
        pytest.param({"SLUICE_RESYNC_SECONDS": "nan"}, id="a resync after no number of seconds"),
        pytest.param({"SLUICE_METRICS_PORT": "inf"}, id="a port without an end"),
        pytest.param({"SLUICE_METRICS_PORT": "8081.5"}, id="half a port"),
        pytest.param({"SLUICE_OTLP_ENDPOINT": "collector:4318"}, id="an endpoint without a scheme"),
        pytest.param({"SLUICE_LEASE": "sluice"}, id="a lease without a namespace"),
        pytest.param({"SLUICE_IDENTITY": "", "SLUICE_LEASE": "a/b"}, id="a lease for nobody"),
        pytest.param({"SLUICE_POLL_SECONDS": "0"}, id="a poll without a pause"),
        pytest.param({"SLUICE_PROMETHEUS_URL": "prometheus:9090"}, id="a Prometheus without a scheme"),
        pytest.param({"SLUICE_NETWORK_POLICY": "false"}, id="a switch that is neither"),
        pytest.param({"SLUICE_POD_MONITOR_LABELS": "release"}, id="a label without a value"),
    ],
)
def test_a_bad_setting_is_named(broken: dict[str, str]) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(broken))):
        config.from_environment({**IMAGES, **broken})


def test_the_process_says_in_one_line_what_is_wrong_with_its_settings() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sluice_operator"], env={}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert done.stderr == "sluice-operator: SLUICE_ENGINE_IMAGE must be set to the image of the engine\n"


def test_who_lost_the_lease_starts_anew_as_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str]]] = []

    async def run(_: config.Settings) -> None:
        raise LeaseLost("the lease system/sluice-operator could not be renewed in time")

    monkeypatch.setattr(operator_main, "run", run)
    for name, value in IMAGES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(operator_main, "setup_logging", lambda _: None)
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-P", "-m", "sluice_operator"])

    operator_main.main()

    assert started == [(sys.executable, [sys.executable, "-P", "-m", "sluice_operator"])]


def test_an_api_server_that_is_back_is_noticed_within_seconds() -> None:
    pauses = handlers.settings().networking.error_backoffs

    assert max(pauses) <= 5
    assert sum(pauses) >= 3600


async def test_liveness_follows_the_heartbeats() -> None:
    now = [0.0]
    health = Health(lambda: now[0])
    health.expect("resync", 60)
    async with TestClient(TestServer(application(health, CollectorRegistry()))) as client:
        now[0] = 60
        assert (await client.get("/livez")).status == 200
        now[0] = 61
        answer = await client.get("/livez")
        assert answer.status == 503
        assert await answer.text() == "resync: silent for 61 s, allowed are 60 s"
        health.beat("resync")
        assert (await client.get("/livez")).status == 200


def test_the_age_of_each_heartbeat_is_a_series_beside_its_limit() -> None:
    now = [0.0]
    health, registry = Health(lambda: now[0]), CollectorRegistry()
    registry.register(HeartbeatCollector(health.ages))
    health.expect("resync", 60)

    now[0] = 45

    one = {"heartbeat": "resync"}
    assert registry.get_sample_value("sluice_operator_heartbeat_age_seconds", one) == 45
    assert registry.get_sample_value("sluice_operator_heartbeat_limit_seconds", one) == 60


async def test_readiness_waits_for_the_first_list() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    health = Health(lambda: 0.0)
    async with TestClient(TestServer(application(health, registry))) as client:
        assert (await client.get("/readyz")).status == 503
        health.is_synced = True
        assert (await client.get("/readyz")).status == 200
        assert "sluice_operator_api_writes_total" in await (await client.get("/metrics")).text()


async def test_who_stands_by_is_ready_and_says_so() -> None:
    health = Health(lambda: 0.0)
    health.is_standby = True
    async with TestClient(TestServer(application(health, CollectorRegistry()))) as client:
        answer = await client.get("/readyz")
        text = await answer.text()

    assert (answer.status, text) == (200, "standing by: another operator holds the lease")


def test_a_log_line_is_one_json_document() -> None:
    record = logging.makeLogRecord(
        {"msg": "applied", "levelname": "INFO", "name": "x", "object": "Service/chat", "_library": 1}
    )

    line = json.loads(JSONFormatter().format(record))

    assert line["message"] == "applied"
    assert line["object"] == "Service/chat"
    assert "_library" not in line


STATE = codec.to_json(scene.gate_state()).encode()


@pytest.mark.parametrize(
    ("content", "is_understood"),
    [
        pytest.param(STATE, True, id="a state"),
        pytest.param(STATE.replace(b"{", b'{"new_field":1,', 1), True, id="a state with a newer field"),
        pytest.param(
            STATE.replace(b'"schema_version":"1.0"', b'"schema_version":"2.0"'), False, id="another major version"
        ),
        pytest.param(b"<html>", False, id="no JSON"),
        pytest.param(b"{}", False, id="something else"),
        pytest.param(b"\xff", False, id="no text"),
    ],
)
def test_only_a_state_of_a_known_version_is_understood(content: bytes, *, is_understood: bool) -> None:
    assert (decode_state(content) is not None) is is_understood


@pytest.mark.parametrize(
    ("answer", "is_understood"),
    [
        pytest.param(web.Response(body=STATE), True, id="a gate"),
        pytest.param(web.Response(status=503), False, id="a gate that cannot say"),
        pytest.param(web.Response(body=b"x" * (9 << 20)), False, id="an endless answer"),
    ],
)
async def test_a_gate_is_asked(answer: web.Response, *, is_understood: bool) -> None:
    async def state(_: web.Request) -> web.StreamResponse:
        return answer

    app = web.Application()
    app.router.add_get("/state", state)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        found = await GateClient(session).state_at(str(server.make_url("")).rstrip("/"))

    assert (found is not None) is is_understood


async def test_a_pod_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def state_at(self: GateClient, url: str) -> Any:
        asked.append(url)
        return scene.gate_state() if "10.0.0.1" in url else None

    monkeypatch.setattr(GateClient, "state_at", state_at)
    async with aiohttp.ClientSession() as session:
        states = await GateClient(session).states({"a": "10.0.0.1", "b": "10.0.0.2", "c": "fd00::1"})

    assert list(states) == ["a"]
    assert asked == ["http://10.0.0.1:9090", "http://10.0.0.2:9090", "http://[fd00::1]:9090"]
