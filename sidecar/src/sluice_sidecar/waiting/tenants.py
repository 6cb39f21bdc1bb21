"""What each tenant has had of the engine, divided by its weight, and so who is due next: deficits of fair shares.

Owns an account of virtual service for every tenant that waits or runs, in one unit: microseconds of the whole engine,
by KV bytes over time or by tokens, whichever is the larger part of what there is. Whoever has had least is due next.
That is deficit round robin with a round so short that its end need not be waited for: nobody gets ahead of another by
more than one request. A tenant that comes back has saved up nothing, and owes what it had overdrawn, so what it left
unused was free for others at once. Must not know classes, queues or rooms.
Source: Shreedhar, Varghese: Efficient Fair Queuing using Deficit Round Robin, 1996; Goyal, Vin, Cheng: Start-time Fair
Queueing, 1996.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from sluice_engine.live_config import TenantConfig
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.progress import Progress
from sluice_sidecar.estimates.work import Work, held_blocks
from sluice_sidecar.waiting.lately import Lately
from sluice_sidecar.waiting.wishes import Wanted, Wishes

# Virtual service is kept in such fractions of a microsecond, and the division's remainder is carried on.
_SCALE = 1000
# Room is kept only while there is not enough for all: so long after somebody found no room.
SHORT_US = 10_000_000
# Who was given less than so much of what the one with most was, each for its weight, is not whom others wait for.
NEAR_MOST = 0.9
# But who holds so many times its share has too much, whatever it had before.
FAR_OVER = 2
# Of those who asked last, a decision looks at no more: beyond, it would cost more than it may.
LOOKED_AT = 64
# Accounts of tenants with nothing here, kept for what they have overdrawn. Names come from outside: they are bounded.
MAX_IDLE = 1024


@dataclass(slots=True)
class Account:
    """One tenant."""

    name: str
    weight: int
    virtual: int = 0
    """Service over weight, in thousandths of a microsecond of the engine."""
    waiting: int = 0
    """Its requests at the door."""
    running: int = 0
    """Its requests inside."""
    booked_us: int = 0
    """What those inside are expected to use."""
    _remainder: int = 0

    def add(self, engine_us: int) -> None:
        """Charge, or give back."""
        more, self._remainder = divmod(engine_us * _SCALE + self._remainder, self.weight)
        self.virtual += more

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing here."""
        return not self.waiting and not self.running


class Tenants:
    """The accounts."""

    def __init__(self, configured: Sequence[TenantConfig]) -> None:
        self._weights: dict[str, int] = {}
        self._accounts: dict[str, Account] = {}
        self._idle: dict[str, None] = {}
        """Tenants with nothing here that are kept for what they have overdrawn, the longest kept first."""
        self._bookings: dict[str, tuple[str, int, int]] = {}
        """Tenant, estimate and start of each request inside."""
        self._lately = Lately(self.weight)
        self._recent: OrderedDict[str, int] = OrderedDict()
        """When each tenant asked last; the last to ask at the end."""
        self._wishes = Wishes()
        self._short_us: int | None = None
        self._virtual_time = 0
        """Virtual service at which the last request started: it never falls."""
        self._booked_us = 0
        self._active_weight = 0
        self.configure(configured)

    def configure(self, configured: Sequence[TenantConfig]) -> None:
        """Take other weights; what was used stays as it was counted."""
        self._weights = {tenant.name: tenant.weight for tenant in configured}
        for account in self._accounts.values():
            weight = self._weights.get(account.name, 1)
            if not account.is_idle:
                self._active_weight += weight - account.weight
            account.weight = weight
        self._lately.rank()

    def __len__(self) -> int:
        return len(self._accounts)

    def weight(self, tenant: str) -> int:
        """What its share is in proportion to; 1 for whoever is not configured."""
        return self._weights.get(tenant, 1)

    def virtual(self, tenant: str) -> int:
        """Its service over its weight: the least is due next."""
        account = self._accounts.get(tenant)
        return self._virtual_time if account is None else account.virtual

    def asked(self, tenant: str, cost: Cost, now_us: int) -> None:
        """A request of it has come."""
        self._recent[tenant] = now_us
        self._recent.move_to_end(tenant)
        silence_us = self._wishes.silence_us()
        while now_us - self._recent[next(iter(self._recent))] > silence_us:
            self._recent.popitem(last=False)
        # Of one that is here alone nothing is to be kept from whoever comes next, nor from itself.
        if self._others_weight(tenant) and not self.is_over(tenant):
            self._wishes.add(cost, now_us)

    def was_short(self, now_us: int, *, for_others: bool) -> None:
        """Somebody found no room; `for_others`: there was some, kept for other tenants."""
        if not for_others or self._is_short(now_us):
            self._short_us = now_us

    def kept_from(self, tenant: str, now_us: int) -> Wanted | None:
        """What must still find room beside a request of a tenant that has more than its share; None for others.

        That is what those with less ask for in their fullest two seconds, while there is not enough for all and one of
        them has asked so short a while ago that it may be about to ask again.
        """
        if not self._is_short(now_us) or not self.is_over(tenant):
            return None
        silence_us = self._wishes.silence_us()
        for name in islice(reversed(self._recent), LOOKED_AT):
            if now_us - self._recent[name] > silence_us:
                return None
            if name != tenant and not self.is_over(name):
                return self._wishes.most(now_us)
        return None

    def is_over(self, tenant: str) -> bool:
        """Whether it has more than its share, and was given about as much of late as whoever was given most.

        Shares are of all that is in use: where one has less than its own, more is there for those that are next. Of
        tenants whose requests come by chance half have more than their share at any moment, and one has most: that says
        little of who has too much before it is twice the share.
        """
        account = self._accounts.get(tenant)
        if account is None:
            return False
        has, due = account.booked_us * self._active_weight, account.weight * self._booked_us
        return has > due and (has > FAR_OVER * due or self._lately.is_most(tenant, NEAR_MOST))

    def _is_short(self, now_us: int) -> bool:
        return self._short_us is not None and now_us - self._short_us <= SHORT_US

    def is_crowded(self, tenant: str) -> bool:
        """Whether it has less than its share while another was given twice its own or more of late."""
        return self._has_less(tenant) and self._lately.some_had(2, self._active_weight)

    def waits(self, tenant: str) -> None:
        """One more request of it waits."""
        account = self._active(tenant)
        if not account.waiting:
            account.virtual = max(account.virtual, self._virtual_time)
        account.waiting += 1

    def waits_no_more(self, tenant: str) -> None:
        """One request fewer of it waits."""
        account = self._accounts[tenant]
        account.waiting -= 1
        self._rest(account)

    def start(self, tenant: str, request_id: str, engine_us: int, now_us: int) -> None:
        """A request of it goes in, and is charged at once what it is expected to use."""
        account = self._active(tenant)
        if not account.waiting:
            account.virtual = max(account.virtual, self._virtual_time)
        self._virtual_time = max(self._virtual_time, account.virtual)
        account.add(engine_us)
        account.running += 1
        account.booked_us += engine_us
        self._booked_us += engine_us
        self._bookings[request_id] = tenant, engine_us, now_us
        self._lately.add(tenant, engine_us, now_us)

    def end(self, request_id: str, used_us: int) -> str | None:
        """A request has left: what it really used is charged instead; its tenant, None when it was not known."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return None
        tenant, estimate_us, started_us = booking
        account = self._accounts[tenant]
        account.add(used_us - estimate_us)
        self._lately.add(tenant, used_us - estimate_us, started_us)
        account.running -= 1
        account.booked_us -= estimate_us
        self._booked_us -= estimate_us
        self._rest(account)
        return tenant

    def shares_percent(self, tenant: str) -> tuple[int, int]:
        """What it has of what runs, and its fair share among those that wait or run now."""
        account = self._accounts.get(tenant)
        booked_us = 0 if account is None else account.booked_us
        weight = self.weight(tenant)
        due = 100 * weight // (weight + self._others_weight(tenant))
        return 100 * booked_us // max(1, self._booked_us), due

    def _others_weight(self, tenant: str) -> int:
        """Of all others that wait or run now."""
        account = self._accounts.get(tenant)
        return self._active_weight - (0 if account is None or account.is_idle else account.weight)

    def _has_less(self, tenant: str) -> bool:
        """Whether it has less than its share."""
        has, due = self.shares_percent(tenant)
        if due:
            return has < due
        # Beside more than a hundred others a share is no whole percent.
        account = self._accounts.get(tenant)
        booked_us = 0 if account is None else account.booked_us
        return booked_us * self._active_weight < self.weight(tenant) * self._booked_us

    def _active(self, tenant: str) -> Account:
        """The account of a tenant that begins to have something here, or goes on."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant, self.weight(tenant), self._virtual_time)
        self._idle.pop(tenant, None)
        if account.is_idle:
            self._active_weight += account.weight
        return account

    def _rest(self, account: Account) -> None:
        """Keep of a tenant with nothing here what it has overdrawn, and only so many such."""
        if not account.is_idle:
            return
        self._active_weight -= account.weight
        if account.virtual <= self._virtual_time:
            self._forget(account.name)
            return
        self._idle[account.name] = None
        if len(self._idle) > MAX_IDLE:
            # Half of them, those that owe least: a sweep is then paid by the tenants that came since the last one.
            by_debt = sorted(self._idle, key=lambda name: self._accounts[name].virtual)
            for name in by_debt[: len(by_debt) // 2]:
                self._forget(name)

    def _forget(self, name: str) -> None:
        del self._accounts[name]
        self._idle.pop(name, None)
        self._lately.forget(name)


def expected_us(work: Work, limits: Limits) -> int:
    """What the work of a call is expected to use, in microseconds of the whole engine."""
    return _engine_us(limits, work.prefill_tokens, work.output_tokens, work.block_us)


def used_us(choices: Iterable[Progress], stayed_us: int, limits: Limits, *, completed: bool) -> int:
    """What a call that leaves has used, as far as the engine has told."""
    prompt_tokens = output_tokens = blocks = 0
    for choice in choices:
        # The last of a short answer may have come after the engine's last word about it.
        computed = choice.prompt_tokens if completed else min(choice.prompt_tokens, choice.computed_tokens)
        prompt_tokens += max(0, computed - choice.cached_tokens)
        output_tokens += choice.output_tokens
        blocks += held_blocks(choice.prompt_tokens, choice.output_tokens, limits)
    return _engine_us(limits, prompt_tokens, output_tokens, blocks * stayed_us)


def used_tokens(choices: Iterable[Progress], *, completed: bool) -> int:
    """Prompt and output tokens that a call which leaves has used, as far as the engine has told."""
    return sum(
        # What it was credited with others computed: of one that never began nothing was used.
        choice.output_tokens
        + (choice.prompt_tokens if completed or choice.computed_tokens > choice.cached_tokens else 0)
        for choice in choices
    )


def _engine_us(limits: Limits, prompt_tokens: int, output_tokens: int, block_us: int) -> int:
    """The larger of two shares: of the engine's time, by tokens, and of its KV pool over time."""
    step_us = limits.decode_step_us(limits.max_sequences)
    tokens_us = limits.computing_us(prompt_tokens) + output_tokens * step_us // limits.max_sequences
    return max(1, tokens_us, block_us // limits.total_blocks)
