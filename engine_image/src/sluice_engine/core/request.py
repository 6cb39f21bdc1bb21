"""A request: what was asked, how far it is, and how it ended. Plain data; the scheduler alone changes its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from sluice_engine.core.constraint import Constraint
from sluice_engine.core.fit import peak_tokens

# Sampling treats every value below this as greedy: dividing logits by less overflows float32.
GREEDY_BELOW_TEMPERATURE = 1e-5

# Class standard, of critical 0, interactive 2, standard 4, batch 6, background 8.
STANDARD_PRIORITY = 4


class RequestStatus(Enum):
    """Where a request is. One way only, but for preemption: running → waiting."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Outcome(StrEnum):
    """How a request ended: distinct and final."""

    STOP = "stop"
    """The model ended it, or a stop string was produced."""
    LENGTH = "length"
    """`max_tokens`, or the model's or the pool's length was reached."""
    ABORTED = "aborted"
    """The caller left."""
    EXPIRED = "expired"
    """Its deadline passed, or can no longer be met: it left the order, and nothing more is computed for it."""
    FAILED = "failed"
    """Something broke for this request; the others went on."""

    @property
    def is_answer(self) -> bool:
        """Whether the answer came to an end of its own; otherwise something cut it off."""
        return self in {Outcome.STOP, Outcome.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn from the logits of one request."""

    max_tokens: int
    """Most output tokens; resolved before the request enters, so that prompt + max_tokens fits."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are dropped."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Resolved before the request enters (drawn where the caller gave none)."""
    choice: int = 0
    """Index within one prompt's `n`; with seed and position it keys the randomness, and nothing else."""
    logprobs: bool = False
    """Whether the log probability of the chosen token is wanted."""
    top_logprobs: int = 0
    """How many of the likeliest tokens are wanted beside it, with theirs."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the request and are not part of its text."""
    min_tokens: int = 0
    """Output tokens before which nothing ends it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to their logits."""
    constrained: bool = False
    """Whether the request's constraint says which tokens may come."""

    @property
    def penalised(self) -> bool:
        """Whether tokens are judged by how often they occurred."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def adjusted(self) -> bool:
        """Whether the model's logits are changed before a token is taken from them."""
        unready = self.min_tokens > 0 and bool(self.stop_token_ids)
        return self.penalised or self.constrained or bool(self.logit_bias) or unready

    @property
    def plain(self) -> bool:
        """Whether it takes the likeliest token and wants nothing else of the logits."""
        return self.greedy and not self.logprobs and not self.adjusted

    @property
    def can_draft(self) -> bool:
        """Whether guesses at its tokens may be computed: penalties and grammars would count guesses that are lost."""
        return not self.penalised and not self.constrained

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or a sound inside a prompt, which an encoder turns into the state of some of its tokens."""

    position: int
    """Of the first of its tokens in the prompt."""
    encoder_tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one call. `eq=False`: a request is itself, and hashable by identity."""

    id: str
    """Unique in the engine: the gate's request id and the choice's index."""
    tokens: list[int]
    """Prompt, then output, token ids."""
    num_prompt: int
    sampling: SamplingParams
    arrival_us: int
    """First arrival; a preemption does not change it."""
    gate_id: str = ""
    """The gate's request id, shared by the choices of one call."""
    index: int = 0
    """Position within the call, over all choices of all prompts: with `gate_id` it names the request outside."""
    priority: int = STANDARD_PRIORITY
    """Lower is more urgent: the class's index × 2 (critical 0, interactive 2, standard 4, batch 6, background 8)."""
    tenant: str = ""
    """Whose share of the engine it uses; also the salt that keeps its cached prefix from others."""
    first_token_deadline_us: int | None = None
    """When its first token is of no use any more; absolute, on the engine's clock."""
    finish_deadline_us: int | None = None
    """When its last token is of no use any more; absolute, on the engine's clock."""
    expected_output_tokens: int | None = None
    """Predicted output, at most `max_tokens`; None: no better guess than `max_tokens`."""

    adapter: str = ""
    """Key of the weights beside the model's own that it runs with, used for one load of one adapter; empty: none."""
    media: tuple[Media, ...] = ()
    """By position."""
    constraint: Constraint | None = None
    """What its tokens are limited by; whoever samples owns it."""
    leader: Request | None = None
    """The first choice of the same prompt: what that one computes of it, this one shares."""

    # The scheduler's own, from here on.
    place: int = -1
    """Order of its first entry into the queue, kept for life: it decides among equals."""
    status: RequestStatus = RequestStatus.WAITING
    num_prefilled: int = 0
    """While its prompt (or, after a preemption, all it had) is computed: settled tokens whose KV is held."""
    is_decoding: bool = False
    """Whether its prefill is settled: from then on all but the last token is computed, whatever is in flight."""
    blocks: list[int] = field(default_factory=list)
    """The block table: ids of the KV blocks held, in order."""
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of its first full blocks, as far as they were needed yet; the prefix cache's."""
    num_settled_blocks: int = 0
    """Of `blocks`, those that the prefix cache knows; the prefix cache's."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found computed when it first entered."""
    host_blocks: list[int] = field(default_factory=list)
    """Ids of the host blocks that keep its computed tokens while it is swapped out; empty otherwise."""
    slot: int = -1
    """Row of the persistent batch while running, -1 otherwise."""
    incarnation: int = 0
    """Raised at each preemption; results of an earlier one are stale."""
    num_preemptions: int = 0
    protected_until: int = 0
    """After a resume: not a victim before `num_computed` has passed this."""
    outcome: Outcome | None = None
    error: str | None = None
    """Why it failed, for a person; set with `Outcome.FAILED`."""
    queued_us: int = -1
    """When the loop took it in: later than its arrival by tokenization and the step that ran."""
    queued_step: int = -1
    """Number of the last step that was planned before the loop took it in."""
    scheduled_us: int = -1
    """When it first ran."""
    first_token_us: int = -1
    """When its first token was settled."""
    last_token_us: int = -1
    """When its last token was settled, kept here while it has no slot."""
    num_overtaken: int = 0
    """Requests behind it that entered while it could not be placed."""

    @property
    def num_computed(self) -> int:
        """Settled tokens whose KV is held. A decode's is derived, so that no step has to write it."""
        return len(self.tokens) - 1 if self.is_decoding else self.num_prefilled

    @num_computed.setter
    def num_computed(self, num_tokens: int) -> None:
        self.num_prefilled, self.is_decoding = num_tokens, False

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far: what `num_computed` catches up to."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def peak_tokens(self) -> int:
        """Most tokens whose KV it can ever hold: the last sampled token never holds state."""
        return peak_tokens(self.num_prompt, self.sampling.max_tokens)
