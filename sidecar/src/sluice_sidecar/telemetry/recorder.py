"""What the door measures of each request, kept in one place for metrics, `/state` and the predictions.

Owns the five-minute windows. Must not know sockets.
"""

from __future__ import annotations

from sluice_engine.live_config import SLOConfig
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.capacity.room import Room
from sluice_sidecar.telemetry.decisions import Decisions
from sluice_sidecar.telemetry.measure import GoodRequests, QuantileWindow, StreamTimes
from sluice_sidecar.telemetry.metrics import GateMetrics
from sluice_sidecar.telemetry.state import Measured


class Recorder:
    """Feeds windows, metrics and the learned bias from the streams."""

    def __init__(self, slo: SLOConfig, room: Room, decisions: Decisions, metrics: GateMetrics) -> None:
        self.metrics = metrics
        self._decisions = decisions
        self._slo = slo
        self._room = room
        self._ttft = QuantileWindow()
        self._itl = QuantileWindow()
        self._good = GoodRequests()

    def configure(self, slo: SLOConfig) -> None:
        """Hold requests against another promise from now on."""
        self._slo = slo

    def token(self, times: StreamTimes, permit: Permit, now_us: int, choice: int) -> None:
        """Text of a choice went by: the first of the stream, the first of this choice, or a gap after its last."""
        is_first = times.first_us is None
        gap_us = times.token(now_us, self._slo.inter_token_latency_us, choice)
        if gap_us is not None:
            self._itl.add(gap_us, now_us)
            self.metrics.itl.observe(gap_us / 1e6)
        if not is_first:
            return
        ttft_us = now_us - times.arrived_us
        self._ttft.add(ttft_us, now_us)
        self.metrics.ttft.observe(ttft_us / 1e6)
        self._room.first_token(permit, now_us)
        self._decisions.first_token(permit.entry.id, now_us)

    def completed(self, times: StreamTimes, output_tokens: int | None, now_us: int, *, streamed: bool) -> None:
        """A request came to its good end."""
        first, gaps = times.kept(self._slo, now_us, output_tokens, streamed=streamed)
        self._good.add(good=first and gaps, now_us=now_us)
        times.promise = "kept" if first and gaps else "itl_missed" if first else "ttft_missed"
        times.output_tokens = output_tokens
        self.metrics.promise.labels(times.promise).inc()
        if output_tokens:
            self.metrics.output_tokens.inc(output_tokens)

    def failed(self, now_us: int) -> None:
        """An admitted request ended badly through no fault of its client."""
        self._good.add(good=False, now_us=now_us)

    def measured(self, *, preemptions_per_minute: float, kv_usage_percent: float, now_us: int) -> Measured:
        """The last five minutes."""
        requests, good = self._good.totals(now_us)
        return Measured(
            time_to_first_token_us=self._ttft.quantile(self._slo.target_percent, now_us),
            inter_token_latency_us=self._itl.quantile(self._slo.target_percent, now_us),
            requests=requests,
            good_requests=good,
            good_requests_per_minute=round(self._good.good_per_minute(now_us), 3),
            preemptions_per_minute=preemptions_per_minute,
            kv_usage_percent=kv_usage_percent,
        )
