"""What the operator signs in with: read again when it is replaced, and not as fast as it is refused."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from kubernetes.aio.config import incluster_config

from sluice_operator import handlers
from sluice_operator.cluster import credentials

NOW = dt.datetime(2026, 11, 30, tzinfo=dt.UTC)


def write(token: Path, text: str) -> None:
    token.write_text(f"{text}\n")


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the token, as a pod has it."""
    path, authority = tmp_path / "token", tmp_path / "ca.crt"
    write(path, "first")
    authority.write_text("a certificate")
    for name, value in {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(credentials, "TOKEN_PATH", path)
    monkeypatch.setattr(credentials, "CA_PATH", authority)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(path))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    return path


async def test_the_next_request_after_a_token_was_replaced_carries_the_new_one(token: Path) -> None:
    chosen = await credentials.configuration()
    assert await chosen.get_api_key_with_prefix("BearerToken") == "Bearer first"

    write(token, "second")

    assert await chosen.get_api_key_with_prefix("BearerToken") == "Bearer second"
    assert chosen.host == credentials.cluster_url() == "https://[fd00::1]:443"


@pytest.mark.usefixtures("token")
async def test_who_is_refused_signs_in_again_but_not_as_fast_as_that(token: Path) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        write(token, "second")

    at = [0.0]
    sign_in = handlers.SignIn(lambda: at[0], sleep)

    first = await sign_in(NOW)
    assert (first.token, first.scheme, first.expiration) == ("first", "Bearer", NOW + dt.timedelta(minutes=10))
    at[0] = 1.0
    second = await sign_in(NOW)
    at[0] = 600.0
    await sign_in(NOW)

    assert second.token == "second"
    assert slept == [4.0]
