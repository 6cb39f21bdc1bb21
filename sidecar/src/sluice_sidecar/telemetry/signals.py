"""What the pod says of itself to those who route and scale: headers on every answer, and series.

Owns how demand and headroom are written. What they are is `headroom`'s to say, what was counted `demand`'s.
docs/metrics.md has a line for each series, docs/api.md for each header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice_engine.core.terms import CLASSES
from sluice_sidecar.admission import Admission
from sluice_sidecar.telemetry.demand import ATTEMPTS, VERDICTS
from sluice_sidecar.telemetry.headroom import demanded, headroom
from sluice_sidecar.telemetry.state import Headroom

HEADROOM_HEADER = "x-sluice-headroom"
CLASS_CUT_HEADER = "x-sluice-class-cut"
NOBODY = "none"
# A storm of answers costs one look in that time; a router that reads an answer has waited longer for it.
_KEPT_US = 100_000


class Signals(Collector):
    """Demand and headroom, as others read them."""

    def __init__(self, admission: Admission, clock: Callable[[], int]) -> None:
        self._admission = admission
        self._clock = clock
        self._headers: dict[str, str] = {}
        self._as_of_us: int | None = None

    def headers(self) -> dict[str, str]:
        """What every answer says; at most a tenth of a second old."""
        now_us = self._clock()
        if self._as_of_us is None or now_us - self._as_of_us >= _KEPT_US:
            self._as_of_us, self._headers = now_us, headers_of(headroom(self._admission, now_us))
        return self._headers

    def collect(self) -> Iterator[Metric]:
        """The series, now."""
        now_us, demand = self._clock(), self._admission.demand
        tokens = CounterMetricFamily(
            "sluice_gate_demand_tokens",
            "Tokens to compute that were asked for: prompt tokens not found computed, and expected output.",
            labels=["verdict", "attempt"],
        )
        blocks = CounterMetricFamily(
            "sluice_gate_demand_block_seconds",
            "KV blocks that were asked for, times the seconds a full pod would hold them.",
            labels=["verdict", "attempt"],
        )
        for verdict in VERDICTS:
            for attempt in ATTEMPTS:
                tokens.add_metric([verdict, attempt], demand.tokens_total[verdict, attempt])
                blocks.add_metric([verdict, attempt], demand.block_us_total[verdict, attempt] / 1e6)
        yield from (tokens, blocks)
        queued, room = demanded(self._admission, now_us), headroom(self._admission, now_us)
        gauges = [
            ("queued_tokens", "Tokens to compute of the requests that wait at the door.", queued.queued_tokens),
            ("queued_block_seconds", "KV blocks times seconds of the requests that wait at the door.",
             queued.queued_block_seconds),
            ("headroom_slots", "Choices that could still be let in at once.", room.slots),
            ("headroom_blocks", "KV blocks below the ceiling, less what is inside will come to hold.", room.blocks),
            ("headroom_tokens_per_second", "Tokens a second that could still be let in; absent without traffic.",
             room.tokens_per_second),
            ("capacity_tokens_per_second", "The same of an empty pod; absent without traffic.",
             room.capacity_tokens_per_second),
        ]  # fmt: skip
        for name, text, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(f"sluice_gate_{name}", text, value=value)
        is_open = GaugeMetricFamily(
            "sluice_gate_class_open", "1 while a small request of the class would be let in.", labels=["class"]
        )
        cut = -1 if room.class_cut is None else CLASSES.index(room.class_cut)
        for index, name in enumerate(CLASSES):
            is_open.add_metric([name], float(index <= cut))
        yield is_open


def headers_of(room: Headroom) -> dict[str, str]:
    """Headroom as headers: a dictionary as in RFC 9651, and the least urgent class that is let in."""
    fields = {"slots": room.slots, "blocks": room.blocks, "tokens-per-second": room.tokens_per_second}
    written = ", ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    return {HEADROOM_HEADER: written, CLASS_CUT_HEADER: room.class_cut or NOBODY}
