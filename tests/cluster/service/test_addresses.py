"""A service on a node with both families of addresses."""

from __future__ import annotations

import asyncio
import functools
import urllib.request

import pytest

from cluster.service.space import Space, answers
from cluster.service.streams import once

pytestmark = [pytest.mark.cluster, pytest.mark.full]


def test_pods_and_services_are_reached_by_both_families_where_the_cluster_has_both(space: Space) -> None:
    families = {":" in one["address"] for one in space.node.get("node", "node1")["status"]["addresses"]}
    assert True in families, "this node has one family: python tests/cluster/node.py run --dual-stack -- pytest …"
    space.serve(space.tiny("both"))

    service = space.get("service", "both")["spec"]
    assert service["ipFamilies"] == ["IPv4", "IPv6"]
    for address in service["clusterIPs"]:
        url = f"http://[{address}]" if ":" in address else f"http://{address}"
        space.node.wait_for(f"the node to route {url}", functools.partial(answers, url))
        assert asyncio.run(once(url, "tiny", "hello", max_tokens=3)).finish_reason == "length"

    (pod,) = space.pods("both")
    first, second = (one["ip"] for one in pod["status"]["podIPs"])
    for host in (first, f"[{second}]"):
        with urllib.request.urlopen(f"http://{host}:9090/metrics", timeout=30) as said:
            assert b"sluice_gate_" in said.read()
