"""What one step does, and what came of it: the messages between scheduler and runner.

A step's batch is in two parts. `decodes`: requests that compute one token each, as arrays. They share one object, from
step to step, until somebody starts or ends, and only their positions are new. `chunks`: one object for each request
that computes more of its prompt. Results come in the order of the plan's *sampling rows*: the decodes, then the chunks
that sample. Plans carry a step number, requests an incarnation: a result that comes late is recognised and never
applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sluice_engine.core.host_pool import Copies
from sluice_engine.core.price import PriceReason
from sluice_engine.core.request import Request

Ints = npt.NDArray[np.int64]
Objects = npt.NDArray[Any]
"""Arrays of Python objects: taking a part of one copies references in bulk."""

IdleReason = Literal[
    "no_requests",
    "no_free_blocks",
    "no_free_slots",
    "adapters_in_use",
    "entry_latched",
    "budget_exhausted",
    "in_flight",
    "behind_others",
    "shared_prompt",
]

DrainReason = Literal["window_full", "preemption", "host_tokens", "stranded_blocks", "drafts"]
"""Why steps in flight must be settled before the next is planned."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: its tokens [start, start + num_tokens)."""

    request: Request
    incarnation: int
    slot: int
    start: int
    num_tokens: int
    samples: bool
    """Whether the last of these tokens is the last known one, so that a new token is sampled after it."""
    drafts: tuple[int, ...] = ()
    """Guesses, which are the last of these tokens: a token is sampled after the last known one and after each guess."""

    @property
    def num_sampled(self) -> int:
        """Tokens that are sampled after it."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def tokens(self) -> list[int]:
        """The tokens themselves; all of them were known, or guessed, when they were planned."""
        return [*self.request.tokens[self.start : self.start + self.num_tokens - len(self.drafts)], *self.drafts]

    def sampling(self) -> Iterator[ScheduledRequest]:
        """One share for each token that is sampled, which ends with the token that it follows."""
        if not self.drafts:
            yield from (self,) if self.samples else ()
            return
        known = self.num_tokens - len(self.drafts)
        for count in range(self.num_sampled):
            yield replace(self, num_tokens=known + count, drafts=self.drafts[:count])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecodeBatch:
    """Requests that decode, as parallel arrays in order of their slots. Immutable, and shared by many steps."""

    slots: Ints
    tenures: Ints
    """Which stay at its slot each is: a slot with another tenure has changed hands since."""
    incarnations: Ints
    requests: Objects
    ids: Objects
    plain: bool
    """Whether all take the likeliest token and nothing else is wanted of the logits."""
    penalised: bool
    """Whether any is judged by the tokens it had so far: sampling needs them on the host."""

    def __len__(self) -> int:
        """Requests."""
        return len(self.slots)

    def part(self, indices: Ints) -> DecodeBatch:
        """The requests at these indices alone."""
        return DecodeBatch(
            slots=self.slots[indices],
            tenures=self.tenures[indices],
            incarnations=self.incarnations[indices],
            requests=self.requests[indices],
            ids=self.ids[indices],
            plain=self.plain,
            penalised=self.penalised,
        )


def _nobody() -> DecodeBatch:
    ints, objects = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=object)
    return DecodeBatch(
        slots=ints, tenures=ints, incarnations=ints, requests=objects, ids=objects, plain=True, penalised=False
    )


NOBODY = _nobody()
NO_POSITIONS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TableChange:
    """Blocks that a slot's table holds from index `first` on; 0: the slot has a new owner."""

    slot: int
    first: int
    blocks: tuple[int, ...]
    adapter: str = ""
    """What a new owner runs with; empty: the model alone."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A victim, and what it lost."""

    request_id: str
    num_computed: int
    freed_blocks: int
    recompute_us: int
    """Price of computing its state again, from the measured table."""
    beneficiary_id: str
    """The request that needed the blocks."""
    swap_us: int | None = None
    """Price of keeping its state on the host, by the measured link; None where that cannot be done."""
    choice: Literal["recompute", "swap"] = "recompute"
    reason: PriceReason = "no_host_pool"
    """Why it went that way."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A waiting request that was looked at and not let in."""

    request_id: str
    reason: IdleReason


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batch of one step."""

    step: int
    decodes: DecodeBatch = NOBODY
    decode_starts: Ints = field(default_factory=lambda: NO_POSITIONS)
    """Position of each decode's token."""
    chunks: tuple[ScheduledRequest, ...] = ()
    prefill_tokens: int = 0
    context_tokens: int = 0
    """KV tokens that the decodes attend to, their own included."""
    prior_pairs: int = 0
    """Query–key pairs of the prefill with tokens computed before this step."""
    table_changes: tuple[TableChange, ...] = ()
    """What the runner must write into its block tables before it runs this step."""
    preempted: tuple[Preemption, ...] = ()
    swap_out: Copies = ()
    """KV to take to the host before the step computes: pairs (device block, host block)."""
    swap_in: Copies = ()
    """KV to bring back, after all copies out and before the step computes: pairs (device block, host block)."""
    expired: tuple[Request, ...] = ()
    """Requests that were ended while planning: their deadline passed, or can no longer be met."""
    failed: tuple[Request, ...] = ()
    """Requests that were ended while planning, by a fault of ours."""
    idle_reason: IdleReason | None = None
    """Why nothing runs; None when something does, or when `drain_reason` says why."""
    drain_reason: DrainReason | None = None
    """Why nothing was planned before the steps in flight are settled."""
    waiting_reasons: tuple[tuple[IdleReason, int], ...] = ()
    """Requests that stay waiting, counted by the gate that held them."""
    held_back: tuple[HeldBack, ...] = ()
    """Those of them that were looked at, in the queue's order."""
    optimistic_blocks: int = 0
    """Blocks taken for tokens that follow tokens in flight: wasted where one of those ends its request."""
    predicted_us: int = 0
    tokens_left: int = 0
    """Of the token budget, after planning."""
    prefill_left: int = 0
    free_blocks_before: int = 0
    free_blocks_after: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for a runner to do: a plan may copy and compute nothing."""
        return not (len(self.decodes) or self.chunks or self.swap_out or self.swap_in)

    @property
    def decode_requests(self) -> int:
        """Requests that compute one token after their last."""
        return len(self.decodes)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.decodes) + self.prefill_tokens

    @property
    def plain(self) -> bool:
        """Whether all that is wanted of the logits is each row's likeliest token."""
        return self.decodes.plain and all(chunk.request.sampling.plain for chunk in self.chunks if chunk.samples)

    @property
    def draft_tokens(self) -> int:
        """Guesses that are computed in this step."""
        return sum(len(chunk.drafts) for chunk in self.chunks)

    @property
    def num_sampling(self) -> int:
        """Tokens that are sampled in this step."""
        return len(self.decodes) + sum(chunk.num_sampled for chunk in self.chunks)

    @property
    def scheduled(self) -> tuple[ScheduledRequest, ...]:
        """The whole batch, one object each, made on demand: for tests and for people."""
        return tuple(self._each())

    def _each(self) -> Iterator[ScheduledRequest]:
        batch = self.decodes
        for slot, request, incarnation, start in zip(
            batch.slots.tolist(), batch.requests, batch.incarnations.tolist(), self.decode_starts.tolist(), strict=True
        ):
            yield ScheduledRequest(request, incarnation, slot, start, 1, samples=True)
        yield from self.chunks

    def sampling(self) -> tuple[ScheduledRequest, ...]:
        """The sampling rows, in the order of results."""
        return tuple(row for entry in self._each() for row in entry.sampling())


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token that was taken."""

    value: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and theirs, likeliest first; as many as were asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step produced."""

    step: int
    token_ids: Ints
    """[sampling rows of the plan], in its order."""
    logprobs: Mapping[int, Logprob] = field(default_factory=dict)
    """Of the tokens whose requests want it, by sampling row."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Rows whose request alone failed (its logits were not finite), and why; their token means nothing."""
    failure: str | None = None
    """Why the whole step failed; nothing else is set then."""

    @classmethod
    def failed(cls, step: int, failure: str) -> StepResult:
        """The step gave nothing: all of its requests fail."""
        return cls(step, NO_POSITIONS, failure=failure)
