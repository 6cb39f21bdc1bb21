"""Whose word is taken for who a caller is: peers in the networks that were named, and nobody else.

Pure. A network is written as a CIDR; one address is a network of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network


def is_network(text: str) -> bool:
    """Whether this can be read as a network, with no bits set beyond its length."""
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


class TrustedPeers:
    """The networks whose identity headers are believed."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ip_network(network) for network in networks]
        # Gateways are few and keep their connections; clients are many, and none of them is worth remembering for long.
        self.includes = lru_cache(maxsize=1024)(self._includes)

    def _includes(self, peer: str | None) -> bool:
        """Whether this peer address lies in one of them. IPv4 that arrives on a dual-stack socket counts as IPv4."""
        if peer is None:
            return False
        try:
            address = ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)
