"""What follows from one manifest and some step times: whether its promise can be kept, its memory holds it, it starts.

The derivation is the engine's own. Next: `verdict_text.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.config import ModelSource
from sluice_engine.core.fit import chunks_of
from sluice_engine.core.state import DerivedLimits
from sluice_engine.core.step_limits import Capacity, StepLimits, derive, idle_ttft_us
from sluice_engine.core.steptime import ChunkCeiling, StepTable, StepTimes
from sluice_operator.rendering.foreign.runtime import is_foreign
from sluice_operator.resource.host_memory import HostMemory, host_memory
from sluice_operator.resource.known_model import KnownModel, known_model, refusals
from sluice_operator.resource.spec import ServiceSpec

# What is not known before a model is loaded: as much as never binds, so that only the promise does.
_UNBOUND_TOKENS = 1 << 22
# The largest decode batch an engine on a GPU measures at its start.
_PLANNING_DECODES = 256
# The example of docs/worked-example.md.
LONG_PROMPT_TOKENS = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """A long prompt, in one step and in chunks."""

    prompt_tokens: int
    whole_us: int
    """Alone, in one step."""
    chunks: int
    alone_us: int
    """Alone, a step each chunk."""
    beside_us: int
    """The same beside one decode, which goes on in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from one manifest."""

    name: str
    source: str
    """Where the step times come from."""
    is_measured: bool
    """Whether an engine measured them; else they are assumed."""
    feasible: bool
    reason: str
    chunk_ceiling_tokens: int
    """c(1): the most prefill beside one decode within the promise."""
    prefill_chunk_tokens: int
    """What a step will carry: the chunk that is set, or the ceiling, but at least a block."""
    chunk_is_set: bool
    chunk_step_us: int
    """What a step with that chunk beside one decode takes."""
    inter_token_latency_us: int
    token_budget: int
    max_sequences: int
    idle_ttft_us: int
    """First token of a prompt of the reference length in an idle pod."""
    time_to_first_token_us: int
    reference_prompt_tokens: int
    is_enforced: bool
    derives: bool
    """Whether the engine derives its chunk from the promise; another one has to be told."""
    chunked: Chunked | None
    """What chunking a long prompt costs; None where no such step was measured."""
    memory: HostMemory | None
    """The container's memory; None where it is not limited."""
    refusals: tuple[str, ...] = ()
    """Why the engine would end at its start."""

    @property
    def is_kept(self) -> bool:
        """Whether the manifest keeps its own promise, or only observes it."""
        return self.feasible or not self.is_enforced

    @property
    def fits(self) -> bool:
        """Whether the memory limit holds what the manifest puts there."""
        return self.memory is None or not self.memory.shortage_bytes


def judge(spec: ServiceSpec, times: StepTimes, source: str, model: ModelSource | None = None) -> Verdict:
    """What an engine with these step times would derive from the spec; `model` stands for its own on this machine.

    Raises:
        ModelUnavailable: there are no such files.
    """
    table = times if isinstance(times, StepTable) else None
    planned = max(_PLANNING_DECODES, spec.scheduling.max_sequences or 0)
    capacity = Capacity(
        num_blocks=_UNBOUND_TOKENS // spec.cache.block_tokens,
        block_tokens=spec.cache.block_tokens,
        max_length_tokens=spec.model.max_length_tokens or _UNBOUND_TOKENS,
        max_decode_requests=table.decode_axis[-1] if table else planned,
        max_prefill_tokens=table.prefill_axis[-1] if table else _UNBOUND_TOKENS,
    )
    slo = spec.live.slo
    derived, limits = derive(slo, spec.scheduling, spec.live.scheduling, times, capacity)
    depth = min(slo.reference_prompt_tokens, capacity.max_length_tokens)
    ceiling = ChunkCeiling(times, slo.inter_token_latency_us, search_up_to_tokens=capacity.max_prefill_tokens)
    return _verdict(spec, source, derived, limits, times, ceiling(1, depth, depth), depth, known_model(spec, model))


def _verdict(  # what it is made of
    spec: ServiceSpec,
    source: str,
    derived: DerivedLimits,
    limits: StepLimits,
    times: StepTimes,
    ceiling: int,
    depth: int,
    known: KnownModel,
) -> Verdict:
    slo = spec.live.slo
    # As the engine does it: where not even a block keeps the promise, a block it is.
    chunk = spec.live.scheduling.prefill_chunk_tokens or max(ceiling, spec.cache.block_tokens)
    return Verdict(
        name=spec.name,
        source=source,
        is_measured=isinstance(times, StepTable),
        feasible=derived.feasible,
        reason=derived.reason,
        chunk_ceiling_tokens=ceiling,
        prefill_chunk_tokens=chunk,
        chunk_is_set=spec.live.scheduling.prefill_chunk_tokens is not None,
        chunk_step_us=times.bound_us(1, chunk, depth, chunk * depth),
        inter_token_latency_us=slo.inter_token_latency_us,
        token_budget=derived.token_budget,
        max_sequences=derived.max_sequences,
        idle_ttft_us=idle_ttft_us(slo.reference_prompt_tokens, limits, times),
        time_to_first_token_us=slo.time_to_first_token_us,
        reference_prompt_tokens=slo.reference_prompt_tokens,
        is_enforced=slo.enforcement == "Enforce",
        derives=not is_foreign(spec),
        chunked=_chunked(times, chunk, slo.reference_prompt_tokens),
        memory=host_memory(spec, known),
        refusals=tuple(refusals(spec, known)),
    )


def _chunked(times: StepTimes, chunk: int, reference_tokens: int) -> Chunked | None:
    prompt = LONG_PROMPT_TOKENS
    if isinstance(times, StepTable):
        prompt = min(reference_tokens, times.prefill_axis[-1])
    steps = list(chunks_of(prompt, chunk))
    if len(steps) < 2:
        return None
    return Chunked(
        prompt_tokens=prompt,
        whole_us=times.bound_us(0, prompt, 0),
        chunks=len(steps),
        alone_us=sum(times.bound_us(0, tokens, 0, tokens * start) for tokens, start in steps),
        beside_us=sum(times.bound_us(1, tokens, 0, tokens * start) for tokens, start in steps),
    )
