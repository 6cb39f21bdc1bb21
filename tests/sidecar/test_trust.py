"""Whose headers of identity are believed."""

from __future__ import annotations

import pytest

from sluice_engine.errors import InvalidConfig
from sluice_sidecar.callers.trust import TrustedPeers
from sluice_sidecar.config import GateConfig


@pytest.mark.parametrize(
    ("networks", "peer", "trusted"),
    [
        pytest.param([], "10.1.2.3", False, id="nobody-unless-named"),
        pytest.param(["10.0.0.0/8"], "10.1.2.3", True, id="a-gateway-in-its-network"),
        pytest.param(["10.0.0.0/8"], "11.1.2.3", False, id="a-neighbour-outside"),
        pytest.param(["10.0.0.0/8"], "::ffff:10.1.2.3", True, id="ipv4-on-a-dual-stack-socket"),
        pytest.param(["fd00::/8"], "fd00::7", True, id="ipv6"),
        pytest.param(["fe80::/10"], "fe80::1%eth0", True, id="ipv6-with-a-zone"),
        pytest.param(["127.0.0.1"], "127.0.0.1", True, id="one-address"),
        pytest.param(["10.0.0.0/8", "127.0.0.0/8"], "127.0.0.1", True, id="the-second-of-two"),
        pytest.param(["0.0.0.0/0"], None, False, id="a-peer-without-an-address"),
        pytest.param(["0.0.0.0/0"], "unix", False, id="a-peer-that-has-no-internet-address"),
    ],
)
def test_trust(networks: list[str], peer: str | None, trusted: bool) -> None:  # noqa: FBT001
    assert TrustedPeers(networks).includes(peer) is trusted


@pytest.mark.parametrize("network", ["10.0.0.0/33", "10.0.0.1/8", "gateway", ""])
def test_what_is_no_network_is_refused_by_name(network: str) -> None:
    with pytest.raises(InvalidConfig, match="trusted_peers"):
        GateConfig(served_name="tiny", trusted_peers=(network,))
