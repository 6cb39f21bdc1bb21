"""Whom to preempt: a policy of its own, apart from the order of the queue. What it then costs is `price`'s.

A policy is a rank: who has the least is the first to go. The caps are the same under every policy: requests that
resumed lately and have made no progress since, and those preempted too often, are passed over. Start reading at
`choose_victim`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction

from sluice_engine.config import VictimPolicy
from sluice_engine.core.request import Request

Rank = Callable[[Request], tuple[int | Fraction, ...]]
"""What the least of goes first. Ranks of one policy have one length."""

# A class is two levels: one level is a caller's own order among its own requests, and no reason to take a slot away.
CLASS_LEVELS = 2


def choose_victim(
    running: Iterable[Request], needing: Request, rank: Rank | None = None, *, max_preemptions: int
) -> Request | None:
    """The request to preempt so that `needing` can grow; `running` is only read.

    The needing request itself is a candidate: when it ranks first, it is the one to step back. When all are passed
    over, the latest arrival goes, so that the oldest always gets on. None when nobody but the needing request runs:
    there is nothing to gain. `rank`: least computed unless told otherwise.
    """
    candidates = list(running)
    if all(request is needing for request in candidates):
        return None
    eligible = [request for request in candidates if may_be_preempted(request, max_preemptions)]
    if eligible:
        return min(eligible, key=rank or least_computed)
    return max(candidates, key=lambda request: (request.arrival_us, request.place, request is needing))


def choose_outranked(
    running: Iterable[Request],
    entering: Request,
    rank: Rank | None = None,
    *,
    max_preemptions: int,
    enough: Callable[[list[Request]], bool],
) -> list[Request]:
    """The requests to preempt so that a more urgent one enters, in the order in which they go; none when it is no use.

    Only requests of a lower class may go, the lowest class first, `rank` among equals; never one that is passed over
    otherwise. `enough` says whether the places and blocks of these would do: either they do, or nobody is preempted.
    Two requests can never take the place from each other, because being a class lower does not change with time.
    """
    rank = rank or least_computed
    outranked = [
        request
        for request in running
        if request.priority - entering.priority >= CLASS_LEVELS and may_be_preempted(request, max_preemptions)
    ]
    outranked.sort(key=lambda request: (-request.priority, *rank(request)))
    victims: list[Request] = []
    for request in outranked:
        victims.append(request)
        if enough(victims):
            return victims
    return []


def may_be_preempted(request: Request, max_preemptions: int) -> bool:
    """Whether it has made progress since it last resumed, and was not preempted too often."""
    return request.num_preemptions < max_preemptions and request.num_computed >= request.protected_until


def rank_for(
    policy: VictimPolicy,
    *,
    price_us: Callable[[Request], int],
    freed_blocks: Callable[[Request], int],
    latest_us: Callable[[Request], int | None],
) -> Rank:
    """The rank of a victim policy; what a policy has no use for is not called.

    `price_us`: what losing its place costs a request (`price`), `freed_blocks`: blocks that would really come free,
    `latest_us`: the last moment at which it must go on to meet its deadlines; None without deadlines. The later that
    is, the more slack it has: what the clock shows now is the same for all.
    """
    match policy:
        case "Last":
            return last
        case "LeastComputed":
            return least_computed
        case "LowestPriority":
            return lowest_priority
        case "MostBlocksPerMillisecond":
            return lambda request: (
                -Fraction(freed_blocks(request), max(1, price_us(request))),
                *least_computed(request),
            )
        case "MostSlack":
            return lambda request: (*_by_slack(latest_us(request)), *least_computed(request))


def last(request: Request) -> tuple[int, ...]:
    """The latest arrival: whoever came first keeps what it has."""
    return (-request.arrival_us, -request.place)


def least_computed(request: Request) -> tuple[int, ...]:
    """The least computed state: the least work is lost."""
    return (request.num_computed, *last(request))


def lowest_priority(request: Request) -> tuple[int, ...]:
    """The least urgent, whatever it has waited: aging is for those that wait."""
    return (-request.priority, *least_computed(request))


def _by_slack(latest_us: int | None) -> tuple[int, int]:
    """Without a deadline there is all the time in the world; a deadline that is missed already has the least of it."""
    return (0, 0) if latest_us is None else (1, -latest_us)
