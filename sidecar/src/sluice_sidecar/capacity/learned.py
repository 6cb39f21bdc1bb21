"""What the gate learns from what came of its predictions, and from how long calls stay.

Owns the predictions of those that wait for their first token. Must not know what is decided by it. Pure: the clock
comes in with each call.
"""

from __future__ import annotations

from sluice_engine.live_config import SLOConfig
from sluice_sidecar.capacity.ledger import Entry, Ledger
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.pessimism import Pessimism
from sluice_sidecar.capacity.punctuality import Punctuality
from sluice_sidecar.telemetry.measure import Residence

# Where more is asked for than fits, whoever is let in stands right at the promise: by the mean, half of them would miss
# it. Two deviations above it few do, and while somebody waits, a line that is a little shorter costs no throughput.
DEVIATIONS = 2.0


class Learned:
    """What to make of a prediction."""

    def __init__(self, slo: SLOConfig) -> None:
        self.bias = Pessimism(slo.time_to_first_token_us, deviations=DEVIATIONS)
        """Of the time to a first token."""
        self.pace = Pessimism(slo.inter_token_latency_us)
        """Of the time between two tokens."""
        self.punctuality = Punctuality(slo.target_percent)
        """Of first tokens, whatever was predicted."""
        self.residence = Residence()
        self._predicted_us: dict[str, int] = {}
        """Time to first token by request id, before the bias, of those that wait for it."""
        self._due_us: dict[str, int] = {}
        """When the first token is due by the promise, of those that are not known to be late."""

    def configure(self, slo: SLOConfig) -> None:
        """Another promise; what was learned stays."""
        self.bias.configure(slo.time_to_first_token_us)
        self.pace.configure(slo.inter_token_latency_us)
        self.punctuality.configure(slo.target_percent)

    def predicted(self, request_id: str, ttft_us: int, due_us: int | None = None) -> None:
        """Somebody entered, and its first token is expected after so long, before the bias, and due at `due_us`."""
        self._predicted_us[request_id] = ttft_us
        if due_us is not None:
            self._due_us[request_id] = due_us

    def first_token(self, entry: Entry, now_us: int) -> None:
        """A first token went out."""
        predicted_us = self._predicted_us.pop(entry.id, None)
        if (due_us := self._due_us.pop(entry.id, None)) is not None:
            self.punctuality.told(entry.admitted_us, now_us, late=now_us > due_us)
        if predicted_us:
            self.bias.learn(predicted_us, now_us - entry.admitted_us, now_us)

    def left(self, entry: Entry, now_us: int, *, completed: bool) -> None:
        """A call has left."""
        self._predicted_us.pop(entry.id, None)
        self._due_us.pop(entry.id, None)
        if completed:
            self.residence.add(now_us - entry.admitted_us)

    def moved(self, ledger: Ledger, limits: Limits, elapsed_us: int, now_us: int) -> None:
        """A state came so long after the one before: how the engine got on, and who is overdue."""
        tokens, decodes = ledger.decoded
        if decodes and elapsed_us > 0:
            self.pace.learn(limits.decode_step_us(decodes) * tokens // decodes, elapsed_us, now_us)
        for name in [name for name, due_us in self._due_us.items() if now_us > due_us]:
            entry = ledger.entries[name]
            # An answer that is not streamed shows its first token here alone, and not where no request is listed.
            if all(choice.seen for choice in entry.choices):
                late = not any(choice.output_tokens for choice in entry.choices)
                self.punctuality.told(entry.admitted_us, now_us, late=late)
                del self._due_us[name]
        self.punctuality.moved(now_us)
        waiting = ((ledger.entries[name], predicted_us) for name, predicted_us in self._predicted_us.items())
        self.bias.suspect(
            (predicted_us, now_us - entry.admitted_us)
            for entry, predicted_us in waiting
            # An answer that is not streamed shows its first token here alone.
            if all(choice.seen and not choice.output_tokens for choice in entry.choices)
        )

    @property
    def waiting(self) -> int:
        """Calls whose first token has not come."""
        return len(self._predicted_us)
