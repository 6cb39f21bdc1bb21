"""The gate's own metrics, all named `sluice_gate_*`; every label's values are bounded.

Owns names, help texts and buckets. Gauges are read from their owners at scrape time.
docs/metrics.md has a line for each.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from sluice_engine.watched import Watched
from sluice_sidecar.admission import Admission
from sluice_sidecar.capacity.freshness import STATE_FAULTS, StateFault
from sluice_sidecar.errors import Reason
from sluice_sidecar.estimates.media import KINDS
from sluice_sidecar.telemetry.instruments import FastCounter, FastHistogram
from sluice_sidecar.telemetry.regret import Verdicts
from sluice_sidecar.telemetry.state import Freshness
from sluice_sidecar.web.shedding import Shedding

_US = 1e-6
_FRESHNESS: tuple[Freshness, ...] = ("fresh", "stale", "blind", "none")
# First tokens: from an idle GPU to the ten seconds that the CPU example promises, and what is beyond any promise.
_TTFT_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 30, 60)
_ITL_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_DOOR_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2, 5)


class GateMetrics:
    """Counters and histograms that the request path feeds, and the page they make."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "sluice_gate_requests_total",
            "Requests that ended, by route and outcome (completed, refused, expired, failed, client_left, stalled, "
            "drained).",
            ["route", "outcome"],
            registry=r,
        )
        self.stripped_headers = Counter(
            "sluice_gate_stripped_headers_total",
            "Identity headers (class, tenant, fairness id) that were not read, since their peer is not trusted.",
            ["header"],
            registry=r,
        )
        self.unreadable_headers = Counter(
            "sluice_gate_unreadable_headers_total",
            "Headers of proxies and clients about attempts and deadlines that say nothing that can be read.",
            ["header"],
            registry=r,
        )
        self.promise = Counter(
            "sluice_gate_promise_total",
            "Completed requests by what became of the promise (kept, ttft_missed, itl_missed); kept ones are goodput.",
            ["verdict"],
            registry=r,
        )
        for verdict in ("kept", "ttft_missed", "itl_missed"):
            self.promise.labels(verdict)  # from the start: the first miss of a new series is in no rate
        self.output_tokens = Counter(
            "sluice_gate_output_tokens_total", "Output tokens of completed requests that reported usage.", registry=r
        )
        self.request_bytes = Counter("sluice_gate_request_bytes_total", "Body bytes taken from clients.", registry=r)
        self.response_bytes = FastCounter("sluice_gate_response_bytes_total", "Body bytes sent to clients.", registry=r)
        self.tokenize = Counter(
            "sluice_gate_exact_counts_total",
            "Prompts counted exactly by the engine: those large enough that an estimate could decide wrongly.",
            registry=r,
        )
        self.door_wait = Histogram(
            "sluice_gate_door_wait_seconds",
            "Time between a whole body and its admission or refusal, for requests that waited at the door.",
            buckets=_DOOR_BUCKETS,
            registry=r,
        )
        self.ttft = Histogram(
            "sluice_gate_time_to_first_token_seconds",
            "Time between a whole body and the first text sent to the client, for streams.",
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.itl = FastHistogram(
            "sluice_gate_inter_token_latency_seconds",
            "Time between two chunks with text of one choice of a stream, at the door.",
            buckets=_ITL_BUCKETS,
            registry=r,
        )
        ProcessCollector(registry=r)

    def page(self) -> bytes:
        """The exposition of everything registered here."""
        return generate_latest(self.registry)


class AdmissionCollector(Collector):
    """What the admission, its ledger and the server hold, read when scraped."""

    def __init__(
        self,
        admission: Admission,
        clock: Callable[[], int],
        *,
        in_flight: Callable[[], int],
        held_bytes: Callable[[], int],
        loop_lag_us: Callable[[], int],
        ready: Callable[[], bool],
        draining: Callable[[], bool],
        shedding: Shedding,
    ) -> None:
        self._admission = admission
        self._shedding = shedding
        self._clock = clock
        self._gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("in_flight", "Requests between their first header byte and their last answer byte.", in_flight),
            ("held_bodies_bytes", "Request bodies held in memory.", held_bytes),
            ("loop_lag_seconds", "How late the gate's event loop was at its last poll.", lambda: loop_lag_us() * _US),
            ("ready", "1 while readiness says yes: engine ready, not draining; load never changes it.", ready),
            ("draining", "1 while the gate drains or has drained.", draining),
        ]

    def collect(self) -> Iterator[Metric]:
        """Every gauge and counter, now."""
        now_us, admission = self._clock(), self._admission
        room, ledger = admission.room, admission.room.ledger
        age_us = room.state_age_us(now_us)
        residence_us = room.learned.residence.mean_us
        gauges = [(name, text, float(read())) for name, text, read in self._gauges]
        gauges += [
            ("waiting_at_door", "Requests that wait at the door for their admission.", admission.waiting),
            ("ledger_requests", "Admitted requests whose stream has not ended.", len(ledger.entries)),
            ("ledger_choices", "Choices that hold or will hold a slot in the engine.", room.inside(now_us)),
            ("ledger_blocks", "KV blocks of what was let in, all known input counted.", room.ledger_blocks()),
            ("predicted_peak_blocks", "Most KV blocks held at any future step if nobody else enters.",
             room.peak_blocks(now_us)),
            ("kv_ceiling_blocks", "KV blocks that the predicted peak may reach.", room.ceiling_blocks(now_us)),
            ("kv_ceiling_ratio", "Share of the pool that the predicted peak may reach, as steered by preemptions.",
             room.ceiling.share),
            ("max_sequences", "Choices that may run at once, given how fresh the engine's state is.",
             room.sequences(now_us)),
            ("preemptions_per_minute", "Preemptions in the engine, over the last 30 s.",
             room.ceiling.per_minute(now_us)),
            ("state_age_seconds", "Age of the engine's state in use; -1 before the first.",
             -1.0 if age_us is None else age_us * _US),
            ("tokens_per_byte", "Learned upper estimate of prompt tokens per byte of text.",
             room.pricing.ratio.tokens_per_byte),
            ("prefix_found_ratio", "Share of credited prompt tokens that the engine finds computed; 1 until measured.",
             room.pricing.prefixes.share),
            ("ttft_bias_ratio", "Actual over predicted time to first token, never below 1.",
             room.learned.bias.factor(now_us)),
            ("pace_bias_ratio", "Actual over predicted time between two tokens, never below 1.",
             room.learned.pace.factor(now_us)),
            ("output_bias_ratio", "Actual over predicted length of answers, never below 1.",
             room.pricing.outputs.bias.factor),
            ("promise_share_ratio", "Share of the promise that predictions may take; less where many were late.",
             room.learned.punctuality.share),
            ("retry_share", "Share of retries in the work let in of late.", admission.returning.budget.share()),
            ("residence_seconds", "Mean stay of a completed request; -1 before it was measured.",
             -1.0 if residence_us is None else residence_us * _US),
        ]  # fmt: skip
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"sluice_gate_{name}", text, value=value)
        media = GaugeMetricFamily(
            "sluice_gate_media_tokens",
            "Prompt tokens that one part beside text is taken for.",
            labels=["kind"],
        )
        for kind in KINDS:
            media.add_metric([kind], float(room.pricing.media.tokens_of(kind)))
        yield media
        freshness = GaugeMetricFamily(
            "sluice_gate_freshness", "1 for how far the state is trusted.", labels=["freshness"]
        )
        for word in _FRESHNESS:
            freshness.add_metric([word], float(room.freshness(now_us) == word))
        yield freshness
        refused = CounterMetricFamily(
            "sluice_gate_refused", "Refusals of the gate's own, by reason.", labels=["reason"]
        )
        for reason in Reason:
            # All of them from the start: a missing series is not zero.
            refused.add_metric([reason.value], admission.refused_total[reason.value])
        yield refused
        shed = CounterMetricFamily(
            "sluice_gate_shed", "Refusals in a storm, by what was not read (body, headers).", labels=["unread"]
        )
        shed.add_metric(["body"], self._shedding.early_total)
        shed.add_metric(["headers"], self._shedding.canned_total)
        yield shed
        retries = CounterMetricFamily(
            "sluice_gate_retries", "Attempts that were retries, by what was decided on each.", labels=["verdict"]
        )
        for verdict in ("admitted", "refused"):
            retries.add_metric([verdict], admission.returning.verdicts[verdict])
        yield retries
        yield _verdicts(admission.decisions.regret.verdicts)
        answers = CounterMetricFamily(
            "sluice_gate_answers", "Answers by whether they stayed within the length expected.", labels=["verdict"]
        )
        for verdict, number in room.pricing.answers_total.items():
            answers.add_metric([verdict], number)
        yield answers
        yield _faults(room.sight.faults)
        counters = [
            ("prefix_credited_tokens", "Prompt tokens credited as computed before, of requests that began.",
             room.pricing.prefixes.credited_tokens_total),
            ("prefix_found_tokens", "Of those, tokens that the engine found.",
             room.pricing.prefixes.found_tokens_total),
            ("admitted", "Requests let in.", admission.admitted_total),
            ("releases", "Ledger entries given back.", ledger.releases_total),
            ("double_closes", "Permits closed more than once; harmless, and a bug.", ledger.double_closes_total),
            ("leases_expired", "Ledger entries whose owner was lost.", ledger.leases_expired_total),
        ]  # fmt: skip
        for name, text, count in counters:
            yield CounterMetricFamily(f"sluice_gate_{name}", text, value=count)


class FilesCollector(Collector):
    """What became of changes of the files that the gate follows."""

    def __init__(self, files: Iterable[Watched[Any, Any]]) -> None:
        self._files = files

    def collect(self) -> Iterator[Metric]:
        """One family."""
        changes = CounterMetricFamily(
            "sluice_gate_config_changes",
            "Changes of files that the gate follows (live.json, api keys), by what became of them (applied, refused).",
            labels=["file", "result"],
        )
        for file in self._files:
            changes.add_metric([file.name, "applied"], file.applied_total)
            changes.add_metric([file.name, "refused"], file.refused_total)
        yield changes


def _verdicts(known: Verdicts) -> CounterMetricFamily:
    family = CounterMetricFamily(
        "sluice_gate_verdicts",
        "Verdicts held against what became of the request; shed is what Enforce would have refused (Observe only).",
        labels=["verdict", "promise"],
    )
    family.add_metric(["admitted", "kept"], known.admitted - known.admitted_but_missed)
    family.add_metric(["admitted", "missed"], known.admitted_but_missed)
    family.add_metric(["shed", "kept"], known.shed_but_met)
    family.add_metric(["shed", "missed"], known.shed - known.shed_but_met)
    return family


def _faults(faults: Counts[StateFault]) -> Metric:
    family = CounterMetricFamily(
        "sluice_gate_state_faults", "Times at which the engine's state or the clock was wrong.", labels=["fault"]
    )
    for fault in STATE_FAULTS:
        family.add_metric([fault], faults[fault])
    return family
