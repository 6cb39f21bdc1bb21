"""How long an answer will be, from how long each tenant's were: a quantile, given what it has produced already.

Owns the history of answers, bounded in number and in tenants. An answer that was cut off (by `max_tokens`, or by a
client that left) tells only that it would have been at least so long, and is counted as that (the product-limit
estimator: Kaplan & Meier, J. Am. Stat. Assoc. 53, 1958); or a tenant's small limits would pass for short answers.
Pure. Must not know what a prediction is for. Start reading at `Outputs.expected`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable

# Eight of ten answers end within it. Many together come near their mean, which for lengths spread as wide as those of
# chats (their logarithm by about 1) lies at the 70th percentile; a few tens together stay below n times the 80th.
QUANTILE = 0.8
# What is expected goes by the last few hundred answers: enough for the quantile, few enough to follow a change.
TENANT_ANSWERS = 256
ALL_ANSWERS = 1024
# Before a tenant has so many, all tenants' answers are its history; before all have, `max_tokens` is.
LEAST_ANSWERS = 32
# The bias is that of the last two hundred answers or so: that of fifty, of lengths spread as those of chats, moves by a
# tenth by chance.
BIAS_DECAY = 0.995
PRIOR_ANSWERS = 4
MOST_TENANTS = 256


class Answers:
    """The lengths of the last answers, and the share of them that is longer than any length."""

    def __init__(self, most: int) -> None:
        self._answers: deque[tuple[int, bool]] = deque(maxlen=most)
        """(tokens, whether it was cut off there)"""
        self._unread = 0
        self._lengths: list[int] = []
        """Lengths at which some ended of themselves, rising."""
        self._ended: list[float] = []
        """The share that has ended by that length."""

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, tokens: int, *, cut_off: bool) -> None:
        """Count one."""
        self._answers.append((tokens, cut_off))
        self._unread += 1

    def quantile(self, share: float, produced: int) -> int | None:
        """The length by which `share` of those end that are longer than `produced`; None where nothing tells."""
        # The sorting is the work: a sixteenth more answers move a quantile by little.
        if self._unread * 16 > len(self._answers):
            self._read()
        first = bisect_right(self._lengths, produced)
        ended = self._ended[first - 1] if first else 0.0
        # What lies between two sums of many small shares is rounding.
        index = bisect_left(self._ended, ended + (1 - ended) * share - 1e-9, first)
        return self._lengths[index] if index < len(self._lengths) else None

    def _read(self) -> None:
        self._unread = 0
        self._lengths, self._ended = [], []
        going, longer = len(self._answers), 1.0
        # One cut off at a length was still going when others of that length ended.
        for tokens, cut_off in sorted(self._answers):
            if not cut_off:
                longer *= (going - 1) / going
                if self._lengths and self._lengths[-1] == tokens:
                    self._ended[-1] = 1 - longer
                else:
                    self._lengths.append(tokens)
                    self._ended.append(1 - longer)
            going -= 1


class LengthBias:
    """How far answers outgrow what was predicted of them, all of late together: actual over predicted, at least 1.

    A quantile follows a change only once most of its history has changed; the blocks are needed before. What is
    predicted well is longer than the mean, so the bias is 1 there. One that is inside counts as soon as it is longer.
    """

    def __init__(self) -> None:
        self._actual = self._predicted = self._answers = 0.0
        self._late_actual = self._late_predicted = 0

    def learn(self, predicted_tokens: int, tokens: int) -> None:
        """An answer has ended."""
        self._actual = self._actual * BIAS_DECAY + tokens
        self._predicted = self._predicted * BIAS_DECAY + predicted_tokens
        self._answers = self._answers * BIAS_DECAY + 1

    def suspect(self, late: Iterable[tuple[int, int]]) -> None:
        """(predicted, produced) of those that are longer already: counted until told anew."""
        self._late_actual = self._late_predicted = 0
        for predicted_tokens, tokens in late:
            self._late_actual += tokens
            self._late_predicted += predicted_tokens

    @property
    def factor(self) -> float:
        """What to multiply a prediction by."""
        # A few answers as predicted stand beside the evidence: one long answer is no proof.
        prior = PRIOR_ANSWERS * self._predicted / self._answers if self._answers else 0.0
        actual, predicted = prior + self._actual, prior + self._predicted
        # Those that go on are yet to become as long as they will be: they can tell of more, and not of less.
        with_late = (actual + self._late_actual) / max(1.0, predicted + self._late_predicted)
        return max(1.0, actual / max(1.0, predicted), with_late)


class Outputs:
    """The answers of late, by tenant and of all."""

    def __init__(self) -> None:
        self.bias = LengthBias()
        self._all = Answers(ALL_ANSWERS)
        self._tenants: OrderedDict[str, Answers] = OrderedDict()

    def expected(self, tenant: str, max_tokens: int, produced: int = 0) -> int:
        """Output tokens to expect in all of a request that has produced so many: more than those, up to `max_tokens`.

        One that has outlived everything known is expected to use all that it may.
        """
        own = self._tenants.get(tenant)
        answers = self._all if own is None or len(own) < LEAST_ANSWERS else own
        if len(answers) < LEAST_ANSWERS:
            return max_tokens
        length = answers.quantile(QUANTILE, produced)
        return max_tokens if length is None else min(max_tokens, length)

    def learn(self, tenant: str, tokens: int, *, cut_off: bool) -> None:
        """An answer ended; `cut_off`: not of itself, so that it would have been longer."""
        if cut_off and not tokens:
            return
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = Answers(TENANT_ANSWERS)
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        # One that ended at once still took a token: the model's end.
        for answers in (self._all, own):
            answers.add(max(1, tokens), cut_off=cut_off)
