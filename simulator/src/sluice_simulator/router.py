"""Which replica an attempt goes to. A gate never re-routes: a refusal comes back to the client, and through here again.

Owns the two policies. It reads what a gate publishes, never the requests inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sluice_simulator.call import Call
from sluice_simulator.replica import Replica

Policy = Literal["RoundRobin", "LeastLoaded"]
POLICIES: tuple[Policy, ...] = ("RoundRobin", "LeastLoaded")


class RoundRobin:
    """One after the other."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._next = 0

    def choose(self, call: Call) -> Replica:
        """The replica to ask."""
        del call
        replica = self._replicas[self._next % len(self._replicas)]
        self._next += 1
        return replica


class LeastLoaded:
    """The replica with the most headroom, as its gate tells it; the first of those that are equal."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    def choose(self, call: Call) -> Replica:
        """The replica to ask."""
        del call
        return max(self._replicas, key=Replica.headroom)


def router_of(policy: Policy, replicas: Sequence[Replica]) -> RoundRobin | LeastLoaded:
    """The router of a scenario."""
    return RoundRobin(replicas) if policy == "RoundRobin" else LeastLoaded(replicas)
