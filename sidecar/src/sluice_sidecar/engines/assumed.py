"""Progress that nobody tells: a whole answer of another engine shows no token before its end.

Pure. Without it such a request would count as prefill for as long as it is inside, and the door would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sluice_sidecar.capacity.ledger import Entry
from sluice_sidecar.capacity.limits import Limits

# Of the time that all prefill inside takes: after twice that, what was passed on first has surely been computed.
_MARGIN = 2


def assume_prefilled(entries: Iterable[Entry], limits: Limits, now_us: int) -> None:
    """Take the prompt of whatever has been inside for long enough as computed, though no token of it was seen."""
    entries = list(entries)
    choices = [choice for entry in entries for choice in entry.choices if not choice.gone]
    queue_tokens = sum(choice.remaining_tokens for choice in choices if choice.prefilling)
    enough_us = _MARGIN * limits.prefill_us(0, queue_tokens, len(choices))
    for entry in entries:
        if entry.forwarded_us is None or now_us - entry.forwarded_us <= enough_us:
            continue
        for choice in entry.choices:
            if not choice.output_tokens and choice.prefilling:
                choice.computed_tokens = choice.known_tokens - 1
