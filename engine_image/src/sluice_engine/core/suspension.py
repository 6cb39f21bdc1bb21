"""What becomes of a preempted request's state: dropped and computed again, or kept on the host and copied back.

Both ways are priced for each victim and the cheaper one is taken (`price`). Copies wait here until a step runs, which
takes them all: out, then in, then it computes. When a step failed, what it copied out is not trusted: those
requests begin again from nothing. It knows no queue and no batch. Start reading at `suspend` and `resume`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sluice_engine.config import Resume
from sluice_engine.core.host_pool import Copies, HostPool
from sluice_engine.core.link import Link
from sluice_engine.core.price import HostRoom, PreemptionPrice, price
from sluice_engine.core.request import Request, RequestStatus
from sluice_engine.core.state import HostState

# Each time away moves the estimate of the next by this part of the difference.
AWAY_SMOOTHING = 8


@dataclass(frozen=True, slots=True)
class SwapSpace:
    """Where state can be kept, and the way there."""

    host: HostPool
    link: Link


class Suspension:
    """The state of those that were preempted, and the copies that move it."""

    def __init__(
        self,
        space: SwapSpace | None,
        block_tokens: int,
        *,
        resume: Resume,
        recompute_us: Callable[[Request], int],
        lose: Callable[[Request], None],
    ) -> None:
        """`recompute_us`: what computing a request again costs. `lose`: takes its progress from a waiting request.

        Without a space nothing is ever swapped.
        """
        self.host = space.host if space is not None else HostPool(0, block_tokens)
        self._space = space
        self._resume: Resume = resume
        self.away_us = 0
        """How long preempted requests are away, as measured lately."""
        self._block_tokens = block_tokens
        self._recompute_us = recompute_us
        self._lose = lose
        self._out: list[tuple[int, int]] = []
        self._in: list[tuple[int, int]] = []
        self._leaving: list[Request] = []
        """Whose state is in `_out`."""
        self._in_flight: dict[int, list[Request]] = {}
        self._since_us: dict[Request, int] = {}

    def price(self, request: Request) -> PreemptionPrice:
        """What preempting this request would cost now, both ways, and which way it would go."""
        space = self._space
        return price(
            request.num_computed,
            self._block_tokens,
            self._recompute_us(request),
            resume=self._resume,
            link=space.link if space is not None else None,
            host=HostRoom(free_blocks=self.host.num_free, total_blocks=self.host.num_blocks),
            queued_us=self.copies_us(self._out, self._in),
            suspension_us=self.away_us,
        )

    def suspend(self, request: Request, now_us: int) -> PreemptionPrice:
        """Keep the state of a request that still holds its blocks, where that is the cheaper way."""
        chosen = self.price(request)
        self._since_us[request] = now_us
        if chosen.choice == "swap":
            self._out += self.host.swap_out(request)
            self._leaving.append(request)
        return chosen

    def resume(self, request: Request, *, found_blocks: int, step: int, now_us: int) -> None:
        """A request enters and has its blocks: bring back what it keeps, but for what was found in the cache."""
        since_us = self._since_us.pop(request, None)
        if since_us is not None:
            self.away_us += (now_us - since_us - self.away_us) // (AWAY_SMOOTHING if self.away_us else 1)
        if request.host_blocks:
            self._in += self.host.swap_in(request, first=found_blocks, step=step)

    def drop(self, request: Request) -> None:
        """A request ended: keep nothing of it."""
        self._since_us.pop(request, None)
        self.host.drop(request)

    def take_copies(self, step: int) -> tuple[Copies, Copies]:
        """The copies out and in that this step makes."""
        if self._leaving:
            self._in_flight[step] = self._leaving
            self._leaving = []
        copies = tuple(self._out), tuple(self._in)
        self._out.clear()
        self._in.clear()
        return copies

    def copies_us(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> int:
        """How long these copies take."""
        space = self._space
        return space.link.out_us(len(out)) + space.link.in_us(len(back)) if space is not None else 0

    def state(self) -> HostState | None:
        """The host pool and the way there, for those who look on; None without."""
        if self._space is None:
            return None
        host, link = self.host, self._space.link
        return HostState(
            total_blocks=host.num_blocks,
            free_blocks=host.num_free,
            swaps_total=host.swaps_total,
            blocks_out_total=host.blocks_out_total,
            blocks_in_total=host.blocks_in_total,
            link_fixed_us=link.fixed_us,
            link_out_ns_per_block=link.out_ns_per_block,
            link_in_ns_per_block=link.in_ns_per_block,
        )

    def settled(self, step: int) -> None:
        """The results of a step were taken."""
        self.host.settled(step)
        self._in_flight.pop(step, None)

    def failed(self, step: int) -> list[Request]:
        """A step failed, and its copies with it. The requests that came back since, on state that cannot be trusted."""
        came_back = []
        for request in self._in_flight.pop(step, ()):
            self.host.drop(request)
            if request.status is RequestStatus.RUNNING:
                came_back.append(request)
            elif request.status is RequestStatus.WAITING:
                self._lose(request)
        return came_back
