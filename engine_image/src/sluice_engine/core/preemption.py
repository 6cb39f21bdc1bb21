"""Whom to preempt when a running request cannot grow: a policy of its own, apart from the order of the queue."""

from __future__ import annotations

from collections.abc import Iterable

from sluice_engine.core.request import Request


def choose_victim(running: Iterable[Request], needing: Request, *, max_preemptions: int) -> Request | None:
    """The request that loses least: the one with the least computed state, the latest arrival among equals.

    The needing request itself is a candidate: when it has the least to lose, it is the one to step back. Requests that
    resumed lately and have made no progress since, and those at the cap of preemptions, are passed over. When nobody
    else is left to choose, the latest arrival goes, so that the oldest always gets on. None when nobody but the needing
    request runs: there is nothing to gain.
    """
    candidates = list(running)
    if all(request is needing for request in candidates):
        return None
    eligible = [
        request
        for request in candidates
        if request.num_preemptions < max_preemptions and request.num_computed >= request.protected_until
    ]
    if eligible:
        return min(eligible, key=lambda request: (request.num_computed, -request.arrival_us))
    return max(candidates, key=lambda request: (request.arrival_us, request is needing))
