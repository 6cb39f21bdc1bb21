"""Who a caller is: by key, by a trusted peer's word, by `user`; and what nobody can make himself into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from sidecar.running import RunningGate, empty, running_gate
from sidecar.scripted_engine import ScriptedEngine
from sluice_engine.core.terms import Terms
from sluice_sidecar.callers.api_keys import ApiKeys
from sluice_sidecar.callers.identity import Callers
from sluice_sidecar.errors import Reason, Refusal

KEY, OTHER = "sk-team-a-0123456789", "sk-team-b-0123456789"
KEYS = ApiKeys.parse({"team-a": KEY.encode(), "team-b": OTHER.encode()}, b"secret")


@pytest.mark.parametrize(
    ("keys", "authorization", "named", "tenant"),
    [
        pytest.param(KEYS, f"Bearer {KEY}", "", "team-a", id="a right key"),
        pytest.param(KEYS, f"Bearer {OTHER}", "team-a", "team-b", id="a right key wins over a trusted peer's word"),
        pytest.param(KEYS, None, "team-z", "team-z", id="a trusted peer has let its callers in itself"),
        pytest.param(KEYS, "Bearer of-the-gateway", "team-z", "team-z", id="its callers' keys may be the peer's own"),
        pytest.param(KEYS, None, "", None, id="no key"),
        pytest.param(KEYS, "Bearer nobody-knows-this-key", "", None, id="a wrong key"),
        pytest.param(KEYS, f"Basic {KEY}", "", None, id="another scheme"),
        pytest.param(ApiKeys.parse({}, b"secret"), f"Bearer {KEY}", "", None, id="no key is in force"),
        pytest.param(None, None, "", "", id="no key is asked for"),
        pytest.param(None, f"Bearer {KEY}", "team-z", "team-z", id="no key is asked for, and one is sent"),
    ],
)
def test_the_tenant_is_whom_the_key_or_a_trusted_peer_says(
    keys: ApiKeys | None, authorization: str | None, named: str, tenant: str | None
) -> None:
    headers: CIMultiDict[str] = CIMultiDict({} if authorization is None else {"authorization": authorization})

    found = Callers(keys).identify(headers, Terms(tenant=named))

    if tenant is None:
        assert isinstance(found, Refusal)
        assert found.reason is Reason.INVALID_API_KEY
        assert (found.status, found.should_retry) == (401, False)
        assert authorization is None or authorization.split()[-1] not in found.message
    else:
        assert found == Terms(tenant=tenant)


@pytest.mark.parametrize("user", ["alice@example.com", "team-a", "user-4711", "", "\ud800", "x" * 100_000])
def test_a_user_of_a_body_is_a_tenant_of_its_own_kind_and_takes_nobodys_name(user: str) -> None:
    tenant = Callers(None).named_by(user, Terms()).tenant

    assert tenant != user or user == ""
    assert tenant == "" if not user else (tenant.startswith("user-") and len(tenant) == 21)
    assert Callers(None).named_by(user, Terms(tenant="team-a")).tenant == "team-a"


async def tenant_of(engine: ScriptedEngine, gate: RunningGate, **request: Any) -> str | None:
    async with gate.post(**request) as response:
        assert response.status == 200, await response.text()
        await response.read()
    return engine.headers[-1].get("x-sluice-tenant")


async def test_the_engine_is_told_the_tenant_and_never_the_key(engine: ScriptedEngine, socket_dir: Path) -> None:
    (socket_dir / "keys").mkdir()
    async with running_gate(engine, socket_dir, keys=KEYS) as gate:
        headers = {"Authorization": f"Bearer {KEY}", "Cookie": "session=1", "x-sluice-tenant": "team-b"}
        assert await tenant_of(engine, gate, headers=headers, user="somebody") == "team-a"
        told = {name.lower() for name in engine.headers[-1]}
        assert not told & {"authorization", "cookie"}


async def test_without_a_right_key_nothing_is_read_or_asked(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with running_gate(engine, socket_dir, keys=KEYS) as gate:
        for headers in ({}, {"Authorization": f"Bearer {KEY}x"}):
            async with gate.post(headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert response.headers["x-sluice-reason"] == "invalid_api_key"
                assert response.headers["x-should-retry"] == "false"
                error = (await response.json())["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        async with gate.client.get(f"{gate.url}/v1/models") as response:
            assert response.status == 401
        async with gate.client.get(f"{gate.url}/readyz") as response:
            assert response.status == 200, "a probe has no key"
        async with gate.client.get(f"{gate.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}) as response:
            assert response.status == 200
        page = gate.gate.metrics.page().decode()
        await empty(gate.gate)
    assert engine.bodies == []
    assert 'sluice_gate_refused_total{reason="invalid_api_key"} 3.0' in page


async def test_keys_that_change_are_in_force_from_the_next_request_on(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with running_gate(engine, socket_dir, keys=KEYS) as gate:
        headers = {"Authorization": f"Bearer {KEY}"}
        gate.gate.use_keys(ApiKeys.parse({"renamed": KEY.encode()}, b"secret"))
        assert await tenant_of(engine, gate, headers=headers) == "renamed"
        gate.gate.use_keys(ApiKeys.parse({}, b"secret"))
        async with gate.post(headers=headers) as response:
            assert response.status == 401
        async with gate.client.get(f"{gate.admin_url}/state") as response:
            assert (await response.json())["api_keys"] == 0


async def test_a_user_is_the_tenant_where_nobody_else_says(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with running_gate(engine, socket_dir, trusted_peers=("127.0.0.0/8",)) as gate:
        alice = await tenant_of(engine, gate, user="alice")
        assert alice is not None
        assert alice.startswith("user-")
        assert await tenant_of(engine, gate, user="bob") != alice
        assert await tenant_of(engine, gate, user="alice") == alice
        assert await tenant_of(engine, gate, user=17) is None
        assert await tenant_of(engine, gate) is None
        assert await tenant_of(engine, gate, user="alice", headers={"x-sluice-tenant": "gold"}) == "gold"


@pytest.mark.parametrize("header", ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"])
async def test_a_gateways_fairness_id_is_the_tenant_where_the_gateway_is_trusted(
    engine: ScriptedEngine, socket_dir: Path, header: str
) -> None:
    async with running_gate(engine, socket_dir, trusted_peers=("127.0.0.0/8",)) as gate:
        assert await tenant_of(engine, gate, headers={header: "team-a"}) == "team-a"
        assert await tenant_of(engine, gate, headers={header: "a", "x-sluice-tenant": "b"}) == "b"
        async with gate.post(headers={header: "no tenant"}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, header)
    async with running_gate(engine, socket_dir) as gate:
        assert await tenant_of(engine, gate, headers={header: "team-a"}) is None
        assert header not in engine.headers[-1], "the engine believes what the gate passes on"
        assert f'stripped_headers_total{{header="{header}"}} 1.0' in gate.gate.metrics.page().decode()
