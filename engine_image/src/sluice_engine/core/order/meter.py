"""What a running request uses, told to a fair order: tokens, device time, KV over time.

Nothing here is done for each request of each step. A decode's share of device time is the same for all that decode in a
step, so one running sum holds it for everybody, and a request owes the difference to where the sum stood when it was
last charged. That happens when it got some blocks, and when it leaves. Orders that share nothing out need no meter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from sluice_engine.core.request import Request

# Between two charges of a request that decodes: late enough to cost nothing, soon enough to matter to the next entry.
BLOCKS_A_CHARGE = 4


class Charged(Protocol):
    """Who wants to know."""

    def charge(self, request: Request, *, tokens: int = 0, device_us: int = 0, block_us: int = 0) -> None:
        """What a request has used since the last charge."""
        ...


@dataclass(slots=True)
class _Stay:
    """A running request, since it was last charged."""

    tokens: int
    """How far it was."""
    blocks: int
    """What it has held since `at_us`."""
    at_us: int
    block_us: int = 0
    decode_ns: int | None = None
    """The running sum as it was; None while it prefills, which is charged by the chunk."""
    prefill_ns: int = 0


class Meter:
    """Charges for running requests."""

    def __init__(self, order: Charged) -> None:
        self._order = order
        self._stays: dict[Request, _Stay] = {}
        self._decode_ns = 0
        """Device time of one decode, summed over all steps."""

    def entered(self, request: Request, now_us: int) -> None:
        """A request starts to run, on what it found computed."""
        self._stays[request] = _Stay(request.num_computed, len(request.blocks), now_us)

    def ran(self, real_us: int, decodes: int, decode_part: float, chunks: Iterable[tuple[Request, int, bool]]) -> None:
        """A step took so long. `chunks`: requests, their prefill tokens, and whether they decode from now on.

        `decode_part`: the share of the step's predicted time that the decodes alone would have taken. The decodes share
        it evenly; the rest goes to the chunks by their tokens.
        """
        shares = list(chunks)
        prefill_tokens = sum(num_tokens for _, num_tokens, _ in shares)
        real_ns = real_us * 1000
        decode_ns = real_ns if not prefill_tokens else round(real_ns * decode_part) if decodes else 0
        if decodes:
            self._decode_ns += decode_ns // decodes
        for request, num_tokens, decodes_now in shares:
            stay = self._stays.get(request)
            if stay is not None:
                stay.prefill_ns += (real_ns - decode_ns) * num_tokens // prefill_tokens
                if decodes_now:
                    stay.decode_ns = self._decode_ns

    def grew(self, request: Request, now_us: int) -> None:
        """It holds more blocks than before."""
        stay = self._stays.get(request)
        if stay is not None:
            _hold(stay, request, now_us)
            if not stay.blocks % BLOCKS_A_CHARGE:
                self._charge(request, stay)

    def left(self, request: Request, now_us: int) -> None:
        """It runs no more, and still holds what it held: charge the rest."""
        stay = self._stays.pop(request, None)
        if stay is not None:
            _hold(stay, request, now_us)
            self._charge(request, stay)

    def _charge(self, request: Request, stay: _Stay) -> None:
        device_ns = stay.prefill_ns
        if stay.decode_ns is not None:
            device_ns += self._decode_ns - stay.decode_ns
            stay.decode_ns = self._decode_ns
        device_us, stay.prefill_ns = divmod(device_ns, 1000)
        computed = request.num_computed
        self._order.charge(request, tokens=max(0, computed - stay.tokens), device_us=device_us, block_us=stay.block_us)
        stay.tokens, stay.block_us = computed, 0


def _hold(stay: _Stay, request: Request, now_us: int) -> None:
    stay.block_us += stay.blocks * (now_us - stay.at_us)
    stay.blocks, stay.at_us = len(request.blocks), now_us
