"""`/state`: the engine's live state as versioned JSON, read by the gate and, through it, by the operator.

The types are the contract. Readers decode with `ignore_unknown` and accept two minor versions back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sluice_engine.core.request import Request, RequestStatus

SCHEMA_VERSION = "1.2"

Phase = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingProgress:
    """How far a start is."""

    stage: Literal["download", "weights", "warmup", "step_table", "done"]
    bytes_done: int = 0
    bytes_total: int = 0
    steps_done: int = 0
    """Of those that are measured for the step table."""
    steps_total: int = 0
    """0 while a kept table is checked."""

    @property
    def percent(self) -> int | None:
        """How much of the stage is done; None where nobody can say."""
        for done, of in ((self.bytes_done, self.bytes_total), (self.steps_done, self.steps_total)):
            if of:
                return 100 * done // of
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The measured cost of a mixed step: fixed + per prefill token × prefill tokens + decode, rounded up.

    Its chunk is the last of a prompt of the reference length: a promise holds to there.
    """

    fixed_us: int
    decode_us: int
    """decode(b) at b = maxSequences where that is set, else 1."""
    per_prefill_token_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """What prefill adds to a step, wherever in its prompt it lies: what a time to first token is predicted with."""

    per_token_ns: int
    """Of a token at the start of its prompt."""
    per_prior_pair_ps: int
    """Per token of prefill and token computed before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedLimits:
    """What the engine derived from the promise and its step times. 0 where nothing works."""

    feasible: bool
    reason: str = ""
    """A sentence when infeasible: which promise, why, and the least that would work."""
    least_inter_token_latency_us: int = 0
    """Least promise that would work, when infeasible for the inter-token latency."""
    least_time_to_first_token_us: int = 0
    chunk_ceiling_tokens: int = 0
    """The chunk that is set, or c(1) at the end of a prompt of the reference length; nearer to its start more fits."""
    token_budget: int = 0
    max_sequences: int = 0
    kv_capacity_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """KV blocks."""

    block_tokens: int
    total_blocks: int
    free_blocks: int
    """Blocks that can be had at once, cached ones included."""
    cached_blocks: int = 0
    """Of the free ones, those whose content can still be shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixState:
    """What requests that begin alike shared since the start."""

    enabled: bool
    hits_total: int
    """Requests that found a part of their prompt when they first entered."""
    queried_tokens_total: int
    """Prompt tokens of requests that entered."""
    hit_tokens_total: int
    """Of those, tokens found computed."""
    resumed_tokens_total: int
    """Tokens that preempted requests found computed when they came back."""
    dropped_blocks_total: int
    """Cached blocks that made room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """Host memory for the KV of preempted requests, and the measured way there."""

    total_blocks: int
    free_blocks: int
    swaps_total: int
    blocks_out_total: int
    blocks_in_total: int
    link_fixed_us: int
    link_out_ns_per_block: int
    link_in_ns_per_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """One request in the engine."""

    id: str
    """The gate's request id."""
    choice: int
    """Index of the reply's choice, over all prompts of the call."""
    status: Literal["waiting", "running"]
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    blocks: int
    incarnation: int
    preemptions: int
    cached_tokens: int = 0
    """Prompt tokens that were found computed when it first entered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedState:
    """A request that ended lately."""

    id: str
    choice: int
    outcome: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were found computed when it first entered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarWait:
    """A request that waits for its grammar: it is in no queue of the scheduler yet, and delays nobody there."""

    id: str
    """The gate's request id."""
    waited_us: int
    compiling: bool
    """Whether its grammar is being compiled; else others are before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarState:
    """Grammars of structured output."""

    waiting: tuple[GrammarWait, ...] = ()
    kept: int = 0
    """Those that are known, and need no compiling."""
    found_total: int = 0
    """Requests whose grammar was known."""
    compiled_total: int = 0
    refused_total: int = 0
    """Grammars that did not compile."""
    compile_us_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """A LoRA adapter in memory."""

    name: str
    rank: int
    num_bytes: int
    retiring: bool = False
    """Whether it was unloaded, and ends with the requests that have begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The whole document."""

    schema_version: str
    boot_id: str
    """Changes with each start of the engine: counters begin anew."""
    seq: int
    """Raised at each publication; a seq that stands still is a frozen engine thread or an idle one."""
    phase: Phase
    engine: str = "sluice"
    """Another engine's name where a gate tells in these words what that engine's metrics say; such a state lists no
    request that the gate let in."""
    failure: str = ""
    model: str = ""
    model_revision: str = ""
    """The commit that a model of a hub is; empty for other sources."""
    max_length_tokens: int = 0
    ranks: int = 1
    """Processes that compute the model together."""
    step: int = 0
    step_running_us: int = 0
    """How long the step in flight has run; 0 between steps."""
    step_predicted_us: int = 0
    hung: bool = False
    """A step with work present outlived max(10 s, 20 × predicted)."""
    pool: PoolState | None = None
    prefix: PrefixState | None = None
    host: HostState | None = None
    """None where no KV is ever kept on the host."""
    running_requests: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of waiting requests that are still to be computed."""
    preemptions_total: int = 0
    derived: DerivedLimits | None = None
    step_cost: StepCost | None = None
    prefill_cost: PrefillCost | None = None
    decode_curve_us: tuple[tuple[int, int], ...] = ()
    """(decode batch, µs of a step that only decodes, in a cache that is half full): what a gate predicts gaps with."""
    decode_context_ps: int = 0
    """What each token of KV that the decodes attend to adds to such a step, shared ones once for each request."""
    table_digest: str = ""
    engine_config_hash: str = ""
    live_config_hash: str = ""
    """Of the `live.json` that the scheduler obeys."""
    live_config_refused: str = ""
    """Why the one that lies there now is not obeyed; empty where it is."""
    loading: LoadingProgress | None = None
    grammars: GrammarState | None = None
    """None of an engine that knows no grammars."""
    adapters: tuple[AdapterState, ...] = ()
    requests: tuple[RequestState, ...] = ()
    finished: tuple[FinishedState, ...] = ()


def request_state(request: Request) -> RequestState:
    """A request as the document shows it."""
    return RequestState(
        id=request.gate_id or request.id,
        choice=request.index,
        status="running" if request.status is RequestStatus.RUNNING else "waiting",
        prompt_tokens=request.num_prompt,
        computed_tokens=request.num_computed,
        output_tokens=request.num_output,
        max_tokens=request.sampling.max_tokens,
        blocks=len(request.blocks),
        incarnation=request.incarnation,
        preemptions=request.num_preemptions,
        cached_tokens=request.num_cached_tokens,
    )


def is_readable(schema_version: str, own: str = SCHEMA_VERSION) -> bool:
    """Whether a reader of version `own` understands that document: same major, at most two minors back, or newer."""
    try:
        major, minor = (int(part) for part in schema_version.split("."))
    except ValueError:
        return False
    own_major, own_minor = (int(part) for part in own.split("."))
    return major == own_major and minor >= own_minor - 2
